"""Questions with their golds and databases, from every source, as one `Example`.

    synthetic     generated here (synthetic.py), for the quickstart
    Spider        train_spider.json, dev.json, database/<db_id>/<db_id>.sqlite (Yu et al. 2018)
    BIRD          train.json, dev.json, at the top or in train/ and dev/, with train_databases/, dev_databases/
    SynSQL-2.5M   data.json, databases/; no test set; files are read whole, so cut it to what you train on
    your own      train.jsonl, test.jsonl and perhaps val.jsonl; or one file (.jsonl, or .json with a list): a test set

Your rows are {"question", "gold", "db"}, the last a SQLite file relative to the question file, or "db_id" instead, and
perhaps "evidence" and "difficulty". Three sets everywhere: "train"; "val", databases taken from the training side
unless it has its own file; "test", Spider's and BIRD's dev. A question whose database is broken or whose gold fails is
a data error, and a gold without rows rewards every query that returns none: they are left out and counted in a printed
report (empty golds only where the questions train). `python -m sqlenv.datasets --check SOURCE` shows some of each.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from sqlenv.database import file_stamp
from sqlenv.example import Example
from sqlenv.hygiene import check
from sqlenv.synthetic import make_split

KEYS = {  # how the sources spell what a row says; the first one that a row has counts
    "question": ("question",),
    "gold": ("gold", "query", "SQL", "sql"),  # Spider's "sql" is a parse tree, beside its "query"
    "db": ("db",),
    "db_id": ("db_id",),
    "evidence": ("evidence", "external_knowledge"),
    "difficulty": ("difficulty", "hardness", "sql_complexity"),
}
FILES = {  # where the questions of each set may be
    "train": ("train.jsonl", "train_spider.json", "train.json", "train/train.json", "data.json"),
    "val": ("val.jsonl",),
    "test": ("test.jsonl", "dev.json", "dev/dev.json"),
}
FOLDERS = ("database", "databases", "train_databases", "dev_databases", "")  # of <db_id>/<db_id>.sqlite or .db


def load_examples(
    source: str | Path,
    split: str,
    *,
    folder: Path | None = None,
    cache: Path | None = None,
    progress: Callable = iter,
    **synthetic,
) -> list[Example]:
    """The usable examples of a split ("sft", "train", "val", "test") of "synthetic", a folder, or a question file.

    `folder` is where synthetic databases are made or found, `synthetic` the other arguments of make_split; `cache` is a
    folder that keeps what running the golds has shown; `progress` may wrap what is gone through, as tqdm does. A file
    is read, checked and reported once per process.
    Raises ValueError for an unknown split, a source that lacks it, a malformed row, or no usable question.
    Example: load_examples("synthetic", "val", folder=Path("data"), num_databases=100, questions_per_database=4, seed=0)
    """
    if split not in ("sft", "train", "val", "test"):
        raise ValueError(f'split = {split!r}; expected "sft", "train", "val" or "test"')
    if source == "synthetic":
        return make_split(folder, split, **synthetic)
    files = question_files(source)
    role = split if split == "test" or split in files else "train"
    if role not in files:
        wanted = f"a folder with {' or '.join(FILES[role])} (your own: train.jsonl, test.jsonl, perhaps val.jsonl)"
        raise ValueError(f"{source} has no {split} questions; expected {wanted}; a single file is a test set")
    examples = _usable(file_stamp(files[role]), role == "train", cache, progress=progress)
    if role == "train" and "val" not in files:
        examples = [e for e in examples if _is_val(e) == (split == "val")]
    if not examples:
        hint = "are the databases beside it? Of training databases, one in ten, by its name, is val without a val.jsonl"
        raise ValueError(f"{files[role]} has no usable question for {split} ({hint})")
    return list(examples)


def question_files(source: str | Path) -> dict[str, Path]:
    """The question file of each set that a source has; ValueError if none. Example: "a.jsonl" -> {"test": a.jsonl}."""
    source = Path(source)
    if source.is_file():
        return {"test": source}
    files = {split: [source / name for name in names if (source / name).is_file()] for split, names in FILES.items()}
    if not any(files.values()):
        names = ", ".join(name for names in FILES.values() for name in names)
        raise ValueError(f"source = {source}: no questions there; expected a question file, or a folder with {names}")
    return {split: paths[0] for split, paths in files.items() if paths}


def read_questions(file: Path) -> list[Example]:
    """Every question of a file, usable or not. Raises ValueError that names file, row and key if one is malformed.

    Example: {"question": "How many?", "gold": "SELECT 1", "db": "a.db"} -> Example("How many?", "SELECT 1", "a", ...)
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
        if file.suffix == ".jsonl":
            text = "[" + ",\n".join(line for line in text.split("\n") if line.strip()) + "]"
        if not isinstance(rows := json.loads(text), list):
            raise ValueError(f"it holds {text:.40}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}; expected a JSON list of questions, or .jsonl with one a line") from None
    examples, find = [], lru_cache(maxsize=None)(partial(_find_database, file))
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"{file}, row {number} = {row!r:.60}; expected an object")
        text = {key: next((row[n] for n in names if row.get(n) is not None), None) for key, names in KEYS.items()}
        text["difficulty"] = None if text["difficulty"] is None else str(text["difficulty"])
        needed = ("question", "gold", "db" if text["db_id"] is None else "db_id")
        for key, value in text.items():
            if not isinstance(value, str) and (key in needed or value is not None):
                wanted = 'text, as in {"question": "How many?", "gold": "SELECT ...", "db": "shop.sqlite"}'
                raise ValueError(f"{file}, row {number}: {' or '.join(KEYS[key])} = {value!r:.60}; expected {wanted}")
        database = find(text["db_id"]) if text["db"] is None else file.parent / text["db"]
        db_id, extras = text["db_id"] or database.stem, [text[key] or "" for key in ("evidence", "difficulty")]
        examples.append(Example(text["question"].strip(), text["gold"], db_id, database, *extras, row=number))
    return examples


def _find_database(file: Path, db_id: str) -> Path:
    folders = [file.parent / name / db_id for name in (f"{file.stem}_databases", *FOLDERS)]
    paths = [folder / f"{db_id}{suffix}" for folder in folders for suffix in (".sqlite", ".db")]
    return next((path for path in paths if path.is_file()), paths[0])


def _is_val(example: Example) -> bool:
    """One training database in ten, by a hash of its name, so the same ones on every machine and in every run."""
    return hashlib.sha256(example.db_id.encode()).digest()[0] % 10 == 0


@lru_cache(maxsize=32)
def _usable(
    stamp: tuple[str, int, int], training: bool, cache: Path | None, shown: int = 0, progress: Callable = iter
) -> list[Example]:
    """The usable questions of a file; prints how many have which defect, and `shown` examples of each."""
    file = Path(stamp[0])
    examples = read_questions(file)
    findings = check(file, examples, cache, progress)
    fatal = ("database", "gold fails", *["gold without rows"] * training)
    out = {row for reason, rows in findings.items() if reason.startswith(fatal) for row in rows}
    print(f"{file.name}: {len(examples) - len(out)} of {len(examples)} questions kept")
    for reason, rows in sorted(findings.items()):
        fate = "left out" if reason.startswith(fatal) else "kept"
        if rows := [row for row in rows if fate == "left out" or row not in out]:
            print(f"{len(rows):6d} {fate}: {reason}")
        for e in [examples[row] for row in rows[:shown]]:
            print(f"{'':8}question {e.row + 1}, {e.db_id}: {' '.join(e.gold.split())[:80]}")
    return [example for example in examples if example.row not in out]


def main(arguments: list[str] | None = None) -> int:
    """The report of every set that a source has: 0, or 1 if a set has no usable question, or 2 if the source is bad."""
    parser = argparse.ArgumentParser(description="which questions of a source can be used, and why the others cannot")
    parser.add_argument("--check", required=True, metavar="SOURCE", help="a folder or a question file")
    options = parser.parse_args(arguments)
    try:
        files = question_files(options.check)
        sets = {split: _usable(file_stamp(file), split == "train", None, shown=3) for split, file in files.items()}
        if "train" in sets and "val" not in sets:
            sets["train"], sets["val"] = ([e for e in sets["train"] if _is_val(e) == val] for val in (False, True))
        names = {split: {e.db_id for e in sets.get(split, ())} for split in FILES}
        for split, examples in sets.items():
            print(f"{split}: {len(examples)} usable questions on {len(names[split])} databases")
        both = (names["train"] | names["val"]) & names["test"]
        print(f"databases of train or val that are in test too: {', '.join(sorted(both)) or 'none'}")
        return int(not all(sets.values()))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
