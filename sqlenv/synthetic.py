"""The embedded task: small random SQLite databases with questions, golds and, for SFT, partly wrong targets.

A database has 1-3 tables of 6-12 rows (id, 1-2 integer columns, 1-2 text columns, maybe a foreign key). A question
fills one of 14 families. Departures from hand-made text-to-SQL data, each for a reason:
- {sft, train}, val and test share no table or column name but `id`, and nine names in ten of sft and train are
  pseudo-words: only a model that copies from the schema can write them, and only such a model can serve val and test.
- Some paraphrases do not name the table, so that the schema must be read.
- Gold and target are one query in two styles. The gold is written as people write datasets (see `compact`). The target,
  what SFT teaches, is spaced with upper-case keywords: each copied word keeps the leading space, hence the BPE pieces,
  that it has in the prompt. So the model's string never equals the gold's although the rows do, and a reward that
  compares strings sees only failures (configs/dead_reward.toml).
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
from itertools import islice
from pathlib import Path

from sqlenv.datasets import Example
from sqlenv.schema import KEYWORDS

RECIPE = 1  # raise it when the same arguments make something else: finished splits are then built anew
POOLS = {"sft": "train", "train": "train", "val": "val", "test": "test"}  # split -> pool of names

# words.json: single lower-case words (a query copies them piece by piece) for names, capitalised ones for text cells.
_WORDS = json.loads(Path(__file__).with_name("words.json").read_text(encoding="utf-8"))
VALUES = " ".join(_WORDS.pop("values")).split()
NAMES = {pool: {kind: " ".join(lines).split() for kind, lines in kinds.items()} for pool, kinds in _WORDS.items()}

# Two lines a family: its name and paraphrases; its query, where [a|b] is a in the good one and b in the one that is
# wrong by convention. t is a table, u its parent; c, d, b, e are columns, n one of numbers, x of text (c is not n, d
# not c, b not x; e is the parent's); number, text, either, parent are conditions in words, each with its SQL; twin_sql
# is number_sql with > for >= and so on.
_FAMILIES = """
list_one: list the {c} of every {t} | show all {c} values | give the {c} of each {t}
SELECT [|id , ]{c} FROM {t}
list_two: list the {c} and {d} of every {t} | show each {c} and its {d}
SELECT [|id , ]{c} , {d} FROM {t}
number_filter: list the {c} of every {t} with {number} | which {c} values have {number} | show the {c} for {number}
SELECT {c} FROM {t} WHERE [{number_sql}|{twin_sql}]
text_filter: list the {b} of every {t} with {text} | which {b} values have {text} | show the {b} for {text}
SELECT {b}[| , {x}] FROM {t} WHERE {text_sql}
count: how many {t} rows are there | count every {t} | what is the number of {t} rows
SELECT [COUNT ( * )|*] FROM {t}
count_filter: how many {t} rows have {either} | how many rows have {either} | count those with {either}
SELECT [COUNT ( * )|*] FROM {t} WHERE {either_sql}
aggregate: what is the {agg} {n} of all {t} rows | find the {agg} {n} | give the {agg} {n} over every {t}
SELECT [|id , ]{AGG} ( {n} ) FROM {t}
superlative: give the {c} of the {t} with the {most} {n} | which {c} has the {most} {n}
SELECT {c}[| , {MOST} ( {n} )] FROM {t}[ ORDER BY {n} {DIR} LIMIT 1|]
group: how many {t} rows are there for each {x} | count the rows per {x} | for each {x} count every {t}
SELECT [{x} , |]COUNT ( * ) FROM {t} GROUP BY {x}
distinct: list the different {x} values of {t} | which {x} values occur | show every {x} once
SELECT [DISTINCT |]{x} FROM {t}
above_average: list the {c} of every {t} with {n} above average | which {c} values have {n} above average
SELECT {c}[| , {n}] FROM {t} WHERE {n} > ( SELECT AVG ( {n} ) FROM {t} )
sort: list the {c} of every {t} sorted by {n} | show each {c} in order of {n}
SELECT {c} FROM {t} ORDER BY {n}[| DESC]
join: show the {c} of each {t} and the {e} of its {u} | list every {c} with the {e} of its {u}
SELECT {t} . {c} , {u} . {e} FROM {t} JOIN {u} ON {t} . [{u}_id|id] = {u} . id
join_filter: list the {c} of every {t} whose {u} has {parent} | which {c} values belong to a {u} with {parent}
SELECT {t} . {c} FROM {t} JOIN {u} ON {t} . [{u}_id|id] = {u} . id WHERE {parent_sql}
"""
FAMILIES = {  # name -> paraphrases, good query, wrong query
    name: (texts.split(" | "), *(re.sub(r"\[(.*?)\|(.*?)\]", kept, query) for kept in (r"\1", r"\2")))
    for name, texts, query in re.findall(r"(.+?): (.+)\n(.+)\n", _FAMILIES)
}
OPERATORS = {"more than": (">", ">="), "less than": ("<", "<="), "at least": (">=", ">"), "at most": ("<=", "<")}
AGGREGATES = {"average": "AVG", "highest": "MAX", "lowest": "MIN", "total": "SUM"}
_PROMPT_WORDS = "table key integer text question evidence sql count avg max min sum rowid oid".split()
RESERVED = KEYWORDS.union(  # no name may be one of these: SQL's words and those of prompts and questions
    _PROMPT_WORDS, AGGREGATES, " ".join(OPERATORS).split(), *(" ".join(f[0]).split() for f in FAMILIES.values())
)


def make_split(
    folder: str | Path, split: str, *, num_databases: int, questions_per_database: int, seed: int, sloppy: float = 0.0
) -> list[Example]:
    """Make (or find, if finished with the same arguments) the databases and questions of one split.

    Files: folder/<split>/<db_id>.sqlite, and manifest.json, written last: a folder without it is unfinished and is
    built anew. Database i depends on (seed, split, i) only.

    Args:
        split: "sft" and "train" (the same words, other databases), "val" or "test" (words of their own).
        sloppy: the probability, 0-1, that a target is the family's wrong query; nothing else depends on it.
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
                target = wrong if careless.random() < sloppy else good
                rows.append([question, compact(good), db_id, family, target])
    manifest = json.dumps({"arguments": arguments, "examples": rows})
    (building / "manifest.json").write_text(manifest, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # another run was faster: its files are the same
        building.rename(folder)
    shutil.rmtree(building, ignore_errors=True)
    return _read_manifest(folder, arguments)


def compact(sql: str) -> str:
    """Spaced SQL as people write it: lower-case keywords, no spaces around operators and dots, nor inside brackets.

    Example: "SELECT AVG ( age ) FROM guest WHERE city = 'Oslo'" -> "select avg(age) from guest where city='Oslo'"
    """
    sql = re.sub(r"\b[A-Z]+\b", lambda word: word[0].lower(), sql)  # 'Oslo' is not all capitals and stays
    return re.sub(r" ([,)])", r"\1", re.sub(r" ?([<>=.(]) ?", r"\1", sql))


def _read_manifest(folder: Path, arguments: dict) -> list[Example]:
    """The examples of a finished split that these arguments made; none if there is no such split."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return []
    if manifest.get("arguments") != arguments:
        return []
    examples = [
        Example(question, gold, db_id, folder / f"{db_id}.sqlite", difficulty=family, target=target)
        for question, gold, db_id, family, target in manifest["examples"]
    ]
    return examples if all(example.database.is_file() for example in examples) else []


def check_name_pools() -> None:
    """Raise ValueError unless every table, column and foreign-key name is in one pool, once, and not reserved."""
    seen = dict.fromkeys(RESERVED, "reserved")
    for pool, kinds in NAMES.items():
        for name in [*_names(pool), *(f"{table}_id" for table in kinds["table"])]:
            if name in seen:
                raise ValueError(f"name {name!r} of pool {pool!r} is also {seen[name]}; expected once (words.json)")
            seen[name] = f"in pool {pool!r}"


def make_name(rng: random.Random, pool: str, kind: str, taken: set[str]) -> str:
    """A "table", "number" or "text" name that its database lacks yet; nine train names in ten are pseudo-words."""
    while True:
        real = pool != "train" or rng.random() < 0.1
        name = rng.choice(NAMES[pool][kind]) if real else _pseudo_word(rng)
        if name not in taken:
            taken.add(name)
            return name


def _names(pool: str) -> list[str]:
    return [name for names in NAMES[pool].values() for name in names]


_SPLICED, _FORBIDDEN = _names("train"), RESERVED.union(_names("val"), _names("test"))


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
    tables: list[_Table] = []
    taken: set[str] = set()
    for i in range(rng.choices((1, 2, 3), (2, 5, 3))[0]):
        size = rng.randint(6, 12)
        name = make_name(rng, pool, "table", taken)
        columns = {
            make_name(rng, pool, "number", taken): rng.sample(range(1, 100), size) for _ in range(rng.randint(1, 2))
        }
        for _ in range(rng.randint(1, 2)):
            few = [_make_value(rng, pool) for _ in range(rng.randint(3, 5))]  # fewer than rows: DISTINCT has work to do
            columns[make_name(rng, pool, "text", taken)] = [rng.choice(few) for _ in range(size)]
        columns = dict(rng.sample(list(columns.items()), len(columns)))
        parent = rng.choice(tables) if i and rng.random() < 0.85 else None
        tables.append(_Table(name, columns, parent, size))
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


def _questions(
    rng: random.Random, tables: list[_Table], connection: sqlite3.Connection
) -> Iterator[tuple[str, str, str, str]]:
    """Different (family, question, good query, wrong query) without end; all families before any comes again."""
    asked = set()
    while True:
        for family in rng.sample(list(FAMILIES), len(FAMILIES)):
            paraphrases, good, wrong = FAMILIES[family]
            usable = [table for table in tables if table.parent or "{u}" not in good]
            if not usable:
                continue
            slots = _slots(rng, rng.choice(usable))
            question, good, wrong = (text.format(**slots) for text in (rng.choice(paraphrases), good, wrong))
            good_rows, wrong_rows = connection.execute(good).fetchall(), connection.execute(wrong).fetchall()
            if "ORDER BY" not in good:
                good_rows, wrong_rows = sorted(good_rows), sorted(wrong_rows)
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
