"""The schema of a SQLite file, read from the file itself, and its text for a prompt.

Nothing comes from a side file (Spider's tables.json): what the prompt shows is what the query will run on. Two styles:

    compact  one line a table, every word behind a space, so that a byte-level BPE cuts a name into the same pieces in
             the schema, in the question and in spaced SQL (the quickstart's model copies them):
                 table guest ( id integer key , name text , room_id integer -> room . id )
    ddl      CREATE TABLE text, regenerated: one column a line, PRIMARY KEY and FOREIGN KEY lines

Left out: views, virtual tables with their shadow tables, sqlite_ tables, and foreign keys to missing tables. A foreign
key that names no existing parent column points at the parent's primary key, else at the table only.
"""

import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path

from sqlenv.database import run_sql

# All keywords of SQLite: names among them are quoted in prompts and refused for synthetic databases.
KEYWORDS = frozenset(Path(__file__).with_name("keywords.txt").read_text(encoding="utf-8").split())
_SHADOW = "content segdir segments stat docsize data idx config node rowid parent".split()  # of FTS and R-tree tables
_FOLD = {capital: capital + 32 for capital in range(65, 91)}  # in names, SQLite ignores the case of A to Z only


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """`columns` point at `parents` of `table`; `parents` is empty where the database does not say which."""

    columns: tuple[str, ...]
    table: str
    parents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """One table: (name, declared type) of each column, the primary key's columns in its order, foreign keys."""

    name: str
    columns: tuple[tuple[str, str], ...]
    primary_key: tuple[str, ...]
    foreign_keys: tuple[ForeignKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one database file, in the order of their creation."""

    database: Path
    tables: tuple[Table, ...]


def quote_identifier(name: str) -> str:
    """The name as SQL needs it: bare if plain, else in double quotes. `Order Details` -> `"Order Details"`."""
    plain = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) and name.lower() not in KEYWORDS
    return name if plain else '"' + name.replace('"', '""') + '"'


def read_schema(database: str | Path) -> Schema:
    """Read tables, columns, types, primary and foreign keys of a SQLite file, which is never written to.

    Raises ValueError if the file is missing, empty or not a SQLite database.
    Example: a file with `CREATE TABLE a (x INTEGER PRIMARY KEY)` -> tables (Table("a", (("x", "INTEGER"),), ("x",)),)
    """
    run_sql(database, "SELECT 1")  # ValueError unless this is a SQLite file that can be read
    with closing(sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
        connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")  # real data is not always UTF-8
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
        virtual = {name for name, sql in rows if re.match(r"\s*CREATE\s+VIRTUAL", sql or "", re.IGNORECASE)}
        hidden = virtual | {f"{name}_{suffix}" for name in virtual for suffix in _SHADOW}
        names = [name for name, _ in rows if name not in hidden and not name.lower().startswith("sqlite_")]
        bare = {name.translate(_FOLD): _read_table(connection, name) for name in names}
        tables = [replace(table, foreign_keys=_foreign_keys(connection, table.name, bare)) for table in bare.values()]
    return Schema(Path(database), tuple(tables))


def trim_schema(schema: Schema, reads: frozenset[tuple[str, str]]) -> Schema:
    """The schema cut to `reads`, which are SqlResult.reads (in any case); all of it if they name none of its tables.

    A table of which only rows are counted keeps its primary key, else its first column. A key goes with a column of it.
    Example: a (x, y, PRIMARY KEY (x)), b (z, a_x REFERENCES a), reads {("a", "y"), ("B", "A_X")} -> a (y), b (a_x)
    """
    read = {(table.translate(_FOLD), column.translate(_FOLD)) for table, column in reads}
    left, tables = {}, []  # left: the columns that stay of each table that stays
    for table in schema.tables:
        names = [name for name, _ in table.columns]
        if wanted := {column for name, column in read if name == table.name.translate(_FOLD)}:
            left[table.name] = {n for n in names if n.translate(_FOLD) in wanted} or {*(table.primary_key or names[:1])}
    for table in schema.tables:
        if own := left.get(table.name):
            columns = tuple(column for column in table.columns if column[0] in own)
            foreign = [key for key in table.foreign_keys if key.table in left and own >= {*key.columns}]
            foreign = tuple(key for key in foreign if left[key.table] >= {*key.parents})
            tables.append(Table(table.name, columns, table.primary_key if own >= {*table.primary_key} else (), foreign))
    return replace(schema, tables=tuple(tables)) if tables else schema


def render_schema(schema: Schema, style: str = "compact", sample_values: int = 0) -> str:
    """The schema as prompt text, "compact" or "ddl", with the first `sample_values` different values of each column.

    Example: tables a (x INTEGER PRIMARY KEY) and b (y VARCHAR(9), a_id INTEGER REFERENCES a) ->
        table a ( x integer key )
        table b ( y varchar , a_id integer -> a . x )
    """
    styles = {"compact": _compact_table, "ddl": _ddl_table}
    if style not in styles:
        raise ValueError(f'schema style = {style!r}; expected "compact" or "ddl"')
    path, count = schema.database, sample_values
    samples = [[_sample_values(path, table.name, name, count) for name, _ in table.columns] for table in schema.tables]
    return "\n".join(map(styles[style], schema.tables, samples))


def _read_table(connection: sqlite3.Connection, table: str) -> Table:
    """One table with its generated columns (hence table_xinfo), without foreign keys: those need all tables."""
    found = connection.execute("SELECT name, type, pk FROM pragma_table_xinfo(?)", (table,)).fetchall()
    plain = re.compile(r"[\w\s]*(\([\w\s.,]*\))?")  # types can be any text: `a -- b` would hide a comma
    columns = tuple((name, " ".join(plain.match(kind or "")[0].split())) for name, kind, _ in found)
    primary = sorted((place, name) for name, _, place in found if place)
    return Table(table, columns, tuple(name for _, name in primary))


def _foreign_keys(connection: sqlite3.Connection, table: str, by_name: dict[str, Table]) -> tuple[ForeignKey, ...]:
    # Some of the pragma's columns are named like keywords, hence the quotes. SQLite numbers the keys backwards.
    sql = 'SELECT id, "table", "from", "to" FROM pragma_foreign_key_list(?) ORDER BY id DESC, seq'
    keys = []
    for _, rows in groupby(connection.execute(sql, (table,)), key=lambda row: row[0]):
        _, parent_names, columns, targets = zip(*rows, strict=True)
        if parent := by_name.get(parent_names[0].translate(_FOLD)):
            spelled = {name.translate(_FOLD): name for name, _ in parent.columns}
            parents = tuple(spelled.get((target or "").translate(_FOLD)) for target in targets)
            if None in parents:
                parents = parent.primary_key if len(parent.primary_key) == len(columns) else ()
            keys.append(ForeignKey(columns, parent.name, parents))
    return tuple(keys)


def _compact_table(table: Table, samples: list[list[str]]) -> str:
    points_at = {}
    for key in table.foreign_keys:
        for column, parent in zip_longest(key.columns, key.parents):  # without parents, the arrow ends at the table
            points_at[column] = "-> " + " . ".join(quote_identifier(name) for name in (key.table, parent) if name)
    parts = []
    for (name, declared), some in zip(table.columns, samples, strict=True):
        kind = re.sub(r"\s*\(.*", "", declared).lower()  # varchar(20) -> varchar
        key = "key" if name in table.primary_key else ""
        values = f"[ {' , '.join(some)} ]" if some else ""
        parts.append(" ".join(filter(None, (quote_identifier(name), kind, key, points_at.get(name), values))))
    return f"table {quote_identifier(table.name)} ( {' , '.join(parts)} )"


def _ddl_table(table: Table, samples: list[list[str]]) -> str:
    def names(columns: tuple[str, ...]) -> str:
        return f" ({', '.join(map(quote_identifier, columns))})" if columns else ""

    lines = [f"{quote_identifier(name)} {declared}".rstrip() for name, declared in table.columns]
    if table.primary_key:
        lines.append(f"PRIMARY KEY{names(table.primary_key)}")
    for key in table.foreign_keys:
        lines.append(f"FOREIGN KEY{names(key.columns)} REFERENCES {quote_identifier(key.table)}{names(key.parents)}")
    commas = [","] * (len(lines) - 1)
    notes = [f" -- for example {', '.join(some)}" if some else "" for some in samples]
    body = [f"  {line}{comma}{note}" for line, comma, note in zip_longest(lines, commas, notes, fillvalue="")]
    return "\n".join([f"CREATE TABLE {quote_identifier(table.name)} (", *body, ");"])


def _sample_values(database: Path, table: str, column: str, count: int) -> list[str]:
    """The first `count` different values as SQL literals, from 1,000 usable rows; none beyond the sandbox's limits."""
    name = quote_identifier(column)
    usable = f"{quote_identifier(table)} WHERE {name} IS NOT NULL AND typeof({name}) <> 'blob'"
    sql = f"SELECT DISTINCT * FROM (SELECT {name} FROM {usable} LIMIT 1000) LIMIT {count}"
    return [_literal(value) for (value,) in run_sql(database, sql).rows] if count else []


def _literal(value: str | int | float) -> str:
    text = " ".join(str(value).replace("\0", " ").split())  # one line, and whole: a NUL ends SQL
    short = text if len(text) <= 40 else text[:37] + "..."
    return "'" + short.replace("'", "''") + "'" if isinstance(value, str) else text
