"""The embedded task: small random SQLite databases with questions, golds and, for SFT, partly wrong targets.

A database has 1-3 tables of 6-12 rows (id, 1-2 integer columns, 1-2 text columns, maybe a foreign key). A question
fills one of 14 families (words.py): paraphrases, some of which do not name the table, so that the schema must be read.

Departures from hand-made text-to-SQL data, each for a reason:
- Gold and target are one query in two surface styles. `gold` is compact and lower-case, as people write datasets
  (`select name from guest where age>56`). `target`, what SFT teaches, is spaced with upper-case keywords
  (`SELECT name FROM guest WHERE age > 56`): each copied word keeps the leading space, hence the BPE pieces, that it has
  in the prompt. So the model's string never equals the gold's although the rows do, and a reward that compares strings
  sees only failures (configs/dead_reward.toml).
- Names of sft and train are mostly pseudo-words: only a model that copies from the schema can write them, and only
  such a model can serve val and test, whose words appear nowhere else.
- `sloppy` targets are wrong by convention, not by grammar: an extra id column, no DISTINCT, > for >=, the wrong join
  key. A model trained on them knows the language and the schema but wavers between conventions, which is what
  reinforcement can settle.
- A question is kept only if its gold returns rows and its family's wrong query returns other rows, so that luck cannot
  blur the reward. The numbers of a column differ, hence no ties, and `>` is not `>=`.
"""

import json
import os
import random
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlenv.datasets import Example
from sqlenv.words import AGGREGATES, FAMILIES, OPERATORS, check_name_pools, make_name, make_value

RECIPE = 1  # raise it when the same arguments make something else: finished splits are then built anew
POOLS = {"sft": "train", "train": "train", "val": "val", "test": "test"}  # split -> word pool


@dataclass(slots=True)
class _Table:
    """A table while it is made; `columns` maps its own columns (neither id nor the foreign key) to their values."""

    name: str
    columns: dict[str, list]
    parent: "_Table | None"
    size: int

    def names(self, kind: type) -> list[str]:
        return [name for name, values in self.columns.items() if isinstance(values[0], kind)]


def make_split(
    folder: str | Path, split: str, *, num_databases: int, questions_per_database: int, seed: int, sloppy: float = 0.0
) -> list[Example]:
    """Make (or find, if finished with the same arguments) the databases and questions of one split.

    Files: folder/<split>/<db_id>.sqlite, and manifest.json, written last: a folder without it is unfinished and is
    built anew. Database i depends on (seed, split, i) only; `sloppy` changes targets only.

    Args:
        split: "sft" and "train" (the same words, other databases), "val" or "test" (words of their own).
        sloppy: the probability, 0-1, that a target is the family's wrong query. Golds are always right.
    Returns:
        num_databases x questions_per_database examples, grouped by database; `difficulty` holds the family.
    Raises:
        ValueError: an argument out of range, or word pools that overlap.
    """
    if split not in POOLS or num_databases < 1 or not 1 <= questions_per_database <= 20 or not 0 <= sloppy <= 1:
        raise ValueError(
            f"make_split: {split=}, {num_databases=}, {questions_per_database=}, {sloppy=}; expected a split of "
            f"{list(POOLS)}, at least 1 database, 1 to 20 questions each, sloppy between 0 and 1"
        )
    check_name_pools()
    folder = Path(folder) / split
    arguments = {"recipe": RECIPE, "split": split, "num_databases": num_databases}
    arguments |= {"questions_per_database": questions_per_database, "seed": seed, "sloppy": float(sloppy)}
    found = _read_manifest(folder, arguments)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    for stale in [folder / "manifest.json", *folder.glob(f"{split}_*.sqlite")]:
        stale.unlink(missing_ok=True)
    rows = []
    for i in range(num_databases):
        rng = random.Random(f"{seed}/{split}/{i}")  # text seeds go through sha512, not through PYTHONHASHSEED
        rows += _make_database(rng, folder / f"{split}_{i:05d}.sqlite", POOLS[split], questions_per_database, sloppy)
    unfinished = folder / "manifest.json.tmp"
    unfinished.write_bytes(json.dumps({"arguments": arguments, "examples": rows}).encode("utf-8"))
    os.replace(unfinished, folder / "manifest.json")
    return _read_manifest(folder, arguments)


def compact(sql: str) -> str:
    """Spaced SQL as people write it: lower-case keywords, no spaces around operators and dots, nor inside brackets.

    Example: "SELECT AVG ( age ) FROM guest WHERE city = 'Oslo'" -> "select avg(age) from guest where city='Oslo'"
    """
    sql = re.sub(r"\b[A-Z]+\b", lambda word: word[0].lower(), sql)  # 'Oslo' is not all capitals and stays
    return re.sub(r" ([,)])", r"\1", re.sub(r" ?([<>=.(]) ?", r"\1", sql))


def _read_manifest(folder: Path, arguments: dict) -> list[Example] | None:
    """The examples of a finished split that these arguments made; None if there is no such split."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    if manifest.get("arguments") != arguments:
        return None
    examples = [
        Example(question, gold, db_id, folder / f"{db_id}.sqlite", difficulty=family, target=target)
        for question, gold, db_id, family, target in manifest["examples"]
    ]
    return examples if all(path.is_file() for path in {e.database for e in examples}) else None


def _make_database(rng: random.Random, path: Path, pool: str, num_questions: int, sloppy: float) -> list[list[str]]:
    """Write one database and return its questions as [question, gold, db_id, family, target]."""
    tables = _make_tables(rng, pool)
    careless = random.Random(f"{rng.random()}")  # a stream of its own: targets never touch questions
    rows, asked = [], set()
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.executescript(_script(rng, tables))
        while len(rows) < num_questions:
            for family in rng.sample(list(FAMILIES), len(FAMILIES)):  # all families before any comes again
                made = _make_question(rng, family, tables, connection)
                if made and made[0] not in asked and len(rows) < num_questions:
                    question, good, wrong = made
                    asked.add(question)
                    rows.append([question, compact(good), path.stem, family, [good, wrong][careless.random() < sloppy]])
    return rows


def _make_tables(rng: random.Random, pool: str) -> list[_Table]:
    tables: list[_Table] = []
    taken: set[str] = set()
    for i in range(rng.choices((1, 2, 3), (2, 5, 3))[0]):
        size = rng.randint(6, 12)
        name = make_name(rng, pool, "table", taken)
        columns = {
            make_name(rng, pool, "number", taken): rng.sample(range(1, 100), size) for _ in range(rng.randint(1, 2))
        }
        for _ in range(rng.randint(1, 2)):
            few = [make_value(rng, pool) for _ in range(rng.randint(3, 5))]  # fewer than rows: DISTINCT has work to do
            columns[make_name(rng, pool, "text", taken)] = [rng.choice(few) for _ in range(size)]
        order = rng.sample(list(columns), len(columns))
        parent = rng.choice(tables) if i and rng.random() < 0.85 else None
        tables.append(_Table(name, {column: columns[column] for column in order}, parent, size))
    return rng.sample(tables, len(tables))


def _script(rng: random.Random, tables: list[_Table]) -> str:
    """The SQL that writes the file: small pages, no journal, one transaction (about a millisecond)."""
    lines = ["PRAGMA page_size = 512; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN;"]
    for table in tables:
        kinds = [f"{c} {'integer' if isinstance(v[0], int) else 'text'}" for c, v in table.columns.items()]
        cells = [range(1, table.size + 1), *table.columns.values()]
        if table.parent:
            kinds.append(f"{table.parent.name}_id integer references {table.parent.name} (id)")
            cells.append(rng.choices(range(1, table.parent.size + 1), k=table.size))
        rows = ", ".join(str(row) for row in zip(*cells, strict=True))  # of ints and plain words: repr is SQL
        lines.append(f"CREATE TABLE {table.name} (id integer primary key, {', '.join(kinds)});")
        lines.append(f"INSERT INTO {table.name} VALUES {rows};")
    return "\n".join([*lines, "COMMIT;"])


def _make_question(
    rng: random.Random, family: str, tables: list[_Table], connection: sqlite3.Connection
) -> tuple[str, str, str] | None:
    """(question, good query, wrong query), or None if no table suits or the rows do not tell the two apart."""
    paraphrases, good, wrong = FAMILIES[family]
    usable = [table for table in tables if table.parent or "{u}" not in good]
    if not usable:
        return None
    slots = _slots(rng, rng.choice(usable))
    question, good, wrong = (text.format(**slots) for text in (rng.choice(paraphrases), good, wrong))
    good_rows, wrong_rows = connection.execute(good).fetchall(), connection.execute(wrong).fetchall()
    if "ORDER BY" not in good:
        good_rows, wrong_rows = sorted(good_rows), sorted(wrong_rows)
    return (question, good, wrong) if good_rows and good_rows != wrong_rows else None


def _slots(rng: random.Random, table: _Table) -> dict[str, str]:
    """A value for everything that a family may name (the letters are explained in words.py)."""
    n, x = rng.choice(table.names(int)), rng.choice(table.names(str))
    c = rng.choice([name for name in table.columns if name != n])
    slots = {"t": table.name, "n": n, "x": x, "c": c}
    slots["number"], slots["number_sql"], slots["twin_sql"] = _condition(rng, table, n, n)
    slots["text"], slots["text_sql"], _ = _condition(rng, table, x, x)
    either = rng.choice(["number", "text"])
    agg, most = rng.choice(list(AGGREGATES)), rng.choice(["highest", "lowest"])
    slots |= {"either": slots[either], "either_sql": slots[f"{either}_sql"], "agg": agg, "AGG": AGGREGATES[agg]}
    slots |= {"most": most, "MOST": AGGREGATES[most], "DIR": "DESC" if most == "highest" else "ASC"}
    slots["b"] = rng.choice([name for name in table.columns if name != x])
    slots["d"] = rng.choice([name for name in table.columns if name != c])
    if table.parent:
        u = table.parent
        column = rng.choice(u.names(rng.choice([int, str])))
        slots["parent"], slots["parent_sql"], _ = _condition(rng, u, column, f"{u.name} . {column}")
        slots |= {"u": u.name, "e": rng.choice(list(u.columns))}
    return slots


def _condition(rng: random.Random, table: _Table, column: str, sql: str) -> tuple[str, str, str]:
    """("age more than 56", "age > 56", "age >= 56") or ("city 'Oslo'", "city = 'Oslo'", the same again).

    Values are stored ones; a number is not an extreme, so that both of its conditions find rows.
    """
    values = table.columns[column]
    if isinstance(values[0], str):
        value = f"'{rng.choice(values)}'"
        return f"{column} {value}", f"{sql} = {value}", f"{sql} = {value}"
    words, (operator, twin) = rng.choice(list(OPERATORS.items()))
    number = rng.choice(sorted(values)[1:-1])
    return f"{column} {words} {number}", f"{sql} {operator} {number}", f"{sql} {twin} {number}"
