"""Questions with their golds and databases, from every source, as one `Example`.

    synthetic   generated here (synthetic.py), for the quickstart
    Spider      a folder with train_spider.json, dev.json and database/<db_id>/<db_id>.sqlite (Yu et al. 2018)

Three sets everywhere: "train"; "val", databases taken from the training side; "test", Spider's dev split. A question
whose database is missing or whose gold fails is a data error, and a gold without rows rewards every query that
returns none: they are left out and counted in a printed report (empty golds only where the questions train).
"""

import hashlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from sqlenv.database import run_gold


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one database. `difficulty` is the source's label; synthetic questions put their family."""

    question: str
    gold: str  # the SQL whose rows are right
    db_id: str
    database: Path  # the SQLite file
    evidence: str = ""  # a hint that belongs to the question (BIRD)
    difficulty: str = ""
    target: str = ""  # the SQL text that SFT teaches; the gold if empty


def load_examples(source: str | Path, split: str, *, folder: Path | None = None, **synthetic) -> list[Example]:
    """The examples of one split ("sft", "train", "val" or "test") of a source: "synthetic", or a Spider folder.

    `folder` is where synthetic databases are made or found, `synthetic` the other arguments of make_split.
    Raises ValueError for an unknown split, or a folder that is not Spider's.
    Example: load_examples("synthetic", "val", folder=Path("data"), num_databases=100, questions_per_database=4, seed=0)
    """
    if split not in ("sft", "train", "val", "test"):
        raise ValueError(f'split = {split!r}; expected "sft", "train", "val" or "test"')
    if source == "synthetic":
        from sqlenv.synthetic import make_split  # which needs Example from here

        return make_split(folder, split, **synthetic)
    if split == "test":
        return load_spider(source, "dev")
    # val: one training database in ten, by a hash of its name, so the same ones on every machine and in every run
    examples = load_spider(source, "train")
    return [e for e in examples if (hashlib.sha256(e.db_id.encode()).digest()[0] % 10 == 0) == (split == "val")]


def load_spider(folder: str | Path, split: str) -> list[Example]:
    """Spider's "train" or "dev" questions that can be scored (ValueError if none); prints how many cannot and why."""
    path = Path(folder) / {"train": "train_spider.json", "dev": "dev.json"}[split]
    if not path.is_file():
        raise ValueError(f"{path} not found; expected a Spider folder: train_spider.json, dev.json, database/")
    examples, left_out = [], Counter()
    for row in json.loads(path.read_text(encoding="utf-8")):
        database = path.parent / "database" / row["db_id"] / f"{row['db_id']}.sqlite"
        if reason := _why_not(database, row["query"], training=split == "train"):
            left_out[reason] += 1
        else:
            examples.append(Example(row["question"].strip(), row["query"], row["db_id"], database))
    counts = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items())) or "none"
    print(f"{path.name}: {len(examples)} questions kept; left out: {counts}")
    if not examples:
        raise ValueError(f"{path} has no usable question (left out: {counts}); are the databases beside it?")
    return examples


def _why_not(database: Path, gold: str, *, training: bool) -> str:
    """Why a question cannot be used; empty if it can."""
    if not database.is_file():
        return "database missing"
    if database.stat().st_size == 0:
        return "database empty"
    result = run_gold(database, gold)
    if result.status != "ok":
        return "gold fails"
    return "gold without rows" if training and not result.rows else ""
