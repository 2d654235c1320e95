"""The embedded task: small random SQLite databases with questions, golds and, for SFT, partly wrong targets.

A database has 1-3 tables of 6-12 rows (id, 1-2 integer columns, 1-2 text columns, maybe a foreign key). A question
fills one of 14 families. Departures from hand-made text-to-SQL data, each for a reason:
- {sft, train}, val and test share no table or column name but `id`, and nine names in ten of sft and train are
  pseudo-words: only a model that copies from the schema can write them, and only such a model can serve val and test.
- Some paraphrases do not name the table, so that the schema must be read.
- Gold and target are one query in two styles: the gold as people write it (see `compact`); the target, taught by SFT,
  spaced with upper-case keywords, so that a copied word keeps the leading space, hence the BPE pieces, of the prompt.
  The model's string is never the gold's: a reward that compares strings sees only failures (configs/dead_reward.toml).
- `sloppy` targets are wrong by convention, not by grammar. A model trained on them knows the language and the schema
  but wavers between conventions, which is what reinforcement can settle.
- A question is kept only if its gold returns rows and its family's wrong query returns other rows, so that luck cannot
  blur the reward. The numbers of a column differ, hence no ties, and `>` is not `>=`.
"""

import json
import os
import random
import re
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from sqlenv.example import Example
from sqlenv.schema import KEYWORDS

RECIPE = 1  # raise it when the same arguments make something else: finished splits are then built anew
POOLS = {"sft": "train", "train": "train", "val": "val", "test": "test"}  # split -> pool of names

# words.json: names and text cells, all single words, which a query copies piece by piece; and families: paraphrases, a
# good query, and one that is wrong by convention. In a family t is a table, u its parent; c, d, b, e are columns, n one
# of numbers, x of text (c is not n, d not c, b not x; e is the parent's); number, text, either, parent are conditions
# in words, each with its SQL; twin_sql is number_sql with > for >= and so on.
_WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
VALUES = " ".join(_WORDS["values"]).split()
NAMES = {pool: {kind: " ".join(ws).split() for kind, ws in kinds.items()} for pool, kinds in _WORDS["names"].items()}
FAMILIES = {name: (f["questions"], f["good"], f["wrong"]) for name, f in _WORDS["families"].items()}
OPERATORS = {"more than": (">", ">="), "less than": ("<", "<="), "at least": (">=", ">"), "at most": ("<=", "<")}
AGGREGATES = {"average": "AVG", "highest": "MAX", "lowest": "MIN", "total": "SUM"}
_PHRASES = [*_WORDS["prompt"], *OPERATORS, *AGGREGATES, *chain(*(questions for questions, *_ in FAMILIES.values()))]
RESERVED = KEYWORDS.union(" ".join(_PHRASES).split())  # no name may be a word of SQL, of prompts or of questions
_SPLICED = [*chain(*NAMES["train"].values())]
_FORBIDDEN = RESERVED.union(*NAMES["val"].values(), *NAMES["test"].values())


def make_split(
    folder: str | Path, split: str, *, num_databases: int, questions_per_database: int, seed: int, sloppy: float = 0.0
) -> list[Example]:
    """Make (or find, if finished with the same arguments) the databases and questions of one split.

    Files: folder/<split>/<db_id>.sqlite, and manifest.json, written last: a folder without it is unfinished and is
    built anew. Database i depends on (seed, split, i) only; "sft" and "train" share their words, not their databases.
    `sloppy` is the probability that a target is the family's wrong query; nothing else depends on it.
    Returns num_databases x questions_per_database examples, grouped by database; `difficulty` holds the family.
    Raises ValueError if an argument is out of range or the word pools overlap.
    """
    if split not in POOLS or num_databases < 1 or not 1 <= questions_per_database <= 20 or not 0 <= sloppy <= 1:
        wanted = f"a split of {list(POOLS)}, at least 1 database, 1 to 20 questions each, sloppy between 0 and 1"
        raise ValueError(f"{split=}, {num_databases=}, {questions_per_database=}, {sloppy=}; expected {wanted}")
    check_name_pools()
    folder = Path(folder) / split
    arguments = {"recipe": RECIPE, "split": split, "num_databases": num_databases}
    arguments |= {"questions_per_database": questions_per_database, "seed": seed, "sloppy": float(sloppy)}
    if found := _read_manifest(folder, arguments):
        return found
    building = folder.with_name(f"{split}.{os.getpid()}")  # moved into place when complete; runs may share the folder
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    rows = []
    for i in range(num_databases):
        rng = random.Random(f"{seed}/{split}/{i}")  # text seeds go through sha512, not through PYTHONHASHSEED
        db_id = f"{split}_{i:05d}"
        tables = _make_tables(rng, POOLS[split])
        careless = random.Random(f"{rng.random()}")  # a stream of its own: targets never touch questions
        with closing(sqlite3.connect(building / f"{db_id}.sqlite", isolation_level=None)) as connection:
            connection.executescript(_script(rng, tables))
            for family, question, good, wrong in islice(_questions(rng, tables, connection), questions_per_database):
                rows.append([question, compact(good), db_id, family, wrong if careless.random() < sloppy else good])
    (building / "manifest.json").write_text(json.dumps({"arguments": arguments, "examples": rows}), encoding="utf-8")
    if not (found := _read_manifest(folder, arguments)):  # else another run was faster, and may read it already
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            building.rename(folder)
    shutil.rmtree(building, ignore_errors=True)
    return found or _read_manifest(folder, arguments)


def compact(sql: str) -> str:
    """Spaced SQL as people write it: lower-case keywords, no spaces around operators and dots, nor inside brackets.

    Example: "SELECT AVG ( age ) FROM guest WHERE city = 'Oslo'" -> "select avg(age) from guest where city='Oslo'"
    """
    sql = re.sub(r"\b[A-Z]+\b", lambda word: word[0].lower(), sql)  # 'Oslo' is not all capitals and stays
    return re.sub(r" ([,)])", r"\1", re.sub(r" ?([<>=.(]) ?", r"\1", sql))


def _read_manifest(folder: Path, arguments: dict) -> list[Example]:
    """The examples of a finished split that these arguments made; none if there is no such split."""
    manifest = {}
    with suppress(FileNotFoundError, ValueError):
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    rows = manifest["examples"] if manifest.get("arguments") == arguments else []
    examples = [
        Example(question, gold, db_id, folder / f"{db_id}.sqlite", difficulty=family, target=target)
        for question, gold, db_id, family, target in rows
    ]
    return examples if all(example.database.is_file() for example in examples) else []


def check_name_pools() -> None:
    """Raise ValueError unless every table, column and foreign-key name is in one pool, once, and not reserved."""
    seen = dict.fromkeys(RESERVED, "reserved")
    for pool, kinds in NAMES.items():
        for name in [*chain(*kinds.values()), *(f"{table}_id" for table in kinds["table"])]:
            if name in seen:
                raise ValueError(f"name {name!r} of pool {pool!r} is also {seen[name]}; expected once (words.json)")
            seen[name] = f"in pool {pool!r}"


def make_name(rng: random.Random, pool: str, kind: str, taken: set[str]) -> str:
    """A "table", "number" or "text" name that its database lacks yet; nine train names in ten are pseudo-words."""
    while True:
        name = rng.choice(NAMES[pool][kind]) if pool != "train" or rng.random() < 0.1 else _pseudo_word(rng)
        if name not in taken:
            taken.add(name)
            return name


def _pseudo_word(rng: random.Random) -> str:
    """A word of no dictionary: the start of one train word and the end of another (70 %), or random syllables."""
    while True:
        if rng.random() < 0.7:
            word = rng.choice(_SPLICED)[: rng.randint(2, 4)] + rng.choice(_SPLICED)[-rng.randint(2, 4) :]
        else:
            syllables = (rng.choice("bcdfghjklmnprstvwyz") + rng.choice("aeiou") for _ in range(rng.randint(2, 3)))
            word = "".join(syllables) + rng.choice("dklmnprstx")
        if word not in _FORBIDDEN:
            return word


def _make_value(rng: random.Random, pool: str) -> str:
    return _pseudo_word(rng).capitalize() if pool == "train" and rng.random() < 0.7 else rng.choice(VALUES)


@dataclass(slots=True)
class _Table:
    """A table while it is made; `columns` maps its own columns (neither id nor the foreign key) to their values."""

    name: str
    columns: dict[str, list]
    parent: "_Table | None"
    size: int

    def names(self, kind: type) -> list[str]:
        return [name for name, values in self.columns.items() if isinstance(values[0], kind)]


def _make_tables(rng: random.Random, pool: str) -> list[_Table]:
    tables, taken = [], set()
    for i in range(rng.choices((1, 2, 3), (2, 5, 3))[0]):
        size = rng.randint(6, 12)
        name = make_name(rng, pool, "table", taken)
        numbers = range(rng.randint(1, 2))
        columns = {make_name(rng, pool, "number", taken): rng.sample(range(1, 100), size) for _ in numbers}
        for _ in range(rng.randint(1, 2)):
            few = [_make_value(rng, pool) for _ in range(rng.randint(3, 5))]  # fewer than rows: DISTINCT has work to do
            columns[make_name(rng, pool, "text", taken)] = [rng.choice(few) for _ in range(size)]
        columns = dict(rng.sample(list(columns.items()), len(columns)))
        parent = rng.choice(tables) if i and rng.random() < 0.85 else None
        tables.append(_Table(name, columns, parent, size))
    return rng.sample(tables, len(tables))


def _script(rng: random.Random, tables: list[_Table]) -> str:
    """The SQL that writes the file: small pages, no journal, one transaction; the repr of ints and words is SQL."""
    lines = ["PRAGMA page_size = 512; PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN;"]
    for table in tables:
        kinds = [f"{c} {'integer' if isinstance(v[0], int) else 'text'}" for c, v in table.columns.items()]
        cells = [range(1, table.size + 1), *table.columns.values()]
        if table.parent:
            kinds.append(f"{table.parent.name}_id integer references {table.parent.name} (id)")
            cells.append(rng.choices(range(1, table.parent.size + 1), k=table.size))
        lines.append(f"CREATE TABLE {table.name} (id integer primary key, {', '.join(kinds)});")
        lines.append(f"INSERT INTO {table.name} VALUES {', '.join(map(str, zip(*cells, strict=True)))};")
    return "\n".join([*lines, "COMMIT;"])


def _questions(rng: random.Random, tables: list[_Table], connection: sqlite3.Connection) -> Iterator[tuple[str, ...]]:
    """Different (family, question, good query, wrong query) without end; all families before any comes again."""
    asked = set()
    while True:
        for family in rng.sample(list(FAMILIES), len(FAMILIES)):
            paraphrases, good, wrong = FAMILIES[family]
            if not (usable := [table for table in tables if table.parent or "{u}" not in good]):
                continue
            slots = _slots(rng, rng.choice(usable))
            question, good, wrong = (text.format(**slots) for text in (rng.choice(paraphrases), good, wrong))
            arrange = list if "ORDER BY" in good else sorted
            good_rows, wrong_rows = (arrange(connection.execute(query)) for query in (good, wrong))
            if good_rows and good_rows != wrong_rows and question not in asked:
                asked.add(question)
                yield family, question, good, wrong


def _slots(rng: random.Random, table: _Table) -> dict[str, str]:
    """A value for everything that a family may name."""
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
    if u := table.parent:
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
