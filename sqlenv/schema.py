"""The schema of a SQLite file, read from the file itself, and its text for a prompt.

Nothing comes from a side file (Spider's tables.json): what the prompt shows is what the query will run on. Two styles:

    compact  one line a table, every word behind a space, so that a byte-level BPE cuts a name into the same pieces
             in the schema, in the question and in spaced SQL (the tiny quickstart model copies them):
                 table guest ( id integer key , name text , room_id integer -> room . id )
    ddl      CREATE TABLE text, regenerated: one column a line, PRIMARY KEY and FOREIGN KEY lines

Left out: views, virtual tables with their shadow tables, sqlite_ tables, and foreign keys to missing tables. A foreign
key that names no existing parent column points at the parent's primary key, else at the table only.
"""

import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from sqlenv.database import run_sql

# All keywords of SQLite: names among them are quoted in prompts and refused for synthetic databases.
KEYWORDS = frozenset(
    """abort action add after all alter always analyze and as asc attach autoincrement before begin between by cascade
    case cast check collate column commit conflict constraint create cross current current_date current_time
    current_timestamp database default deferrable deferred delete desc detach distinct do drop each else end escape
    except exclude exclusive exists explain fail filter first following for foreign from full generated glob group
    groups having if ignore immediate in index indexed initially inner insert instead intersect into is isnull join
    key last left like limit match materialized natural no not nothing notnull null nulls of offset on or order others
    outer over partition plan pragma preceding primary query raise range recursive references regexp reindex release
    rename replace restrict returning right rollback row rows savepoint select set table temp temporary then ties to
    transaction trigger unbounded union unique update using vacuum values view virtual when where window with
    without""".split()
)
_SHADOW = "content segdir segments stat docsize data idx config node rowid parent".split()  # of FTS and R-tree tables


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

    Raises:
        ValueError: the file is missing, empty or not a SQLite database.
    Example:
        a file with `CREATE TABLE a (x INTEGER PRIMARY KEY)` -> tables (Table("a", (("x", "INTEGER"),), ("x",)),)
    """
    with closing(_connect(database)) as connection:
        tables = [_read_table(connection, name) for name in _table_names(connection)]
        by_name = {table.name.lower(): table for table in tables}  # SQLite ignores case in names
        keys = [_foreign_keys(connection, table.name, by_name) for table in tables]
    return Schema(Path(database), tuple(replace(t, foreign_keys=k) for t, k in zip(tables, keys, strict=True)))


def render_schema(schema: Schema, style: str = "compact", sample_values: int = 0) -> str:
    """The schema as prompt text, in the style "compact" or "ddl" (see the module's docstring).

    `sample_values` > 0 adds that many different values of each column, the first ones stored.

    Example: tables a (x INTEGER PRIMARY KEY) and b (y VARCHAR(9), a_id INTEGER REFERENCES a) ->
        table a ( x integer key )
        table b ( y varchar , a_id integer -> a . x )
    """
    if style not in ("compact", "ddl"):
        raise ValueError(f'schema style = {style!r}; expected "compact" or "ddl"')
    samples = _sample_values(schema, sample_values) if sample_values else {}
    render = _compact_table if style == "compact" else _ddl_table
    return "\n".join(render(table, samples) for table in schema.tables)


def _connect(database: str | Path) -> sqlite3.Connection:
    run_sql(database, "SELECT 1")  # ValueError unless this is a SQLite file that can be read
    connection = sqlite3.connect(f"{Path(database).resolve().as_uri()}?mode=ro&immutable=1", uri=True)
    connection.text_factory = lambda raw: raw.decode("utf-8", errors="replace")  # real data is not always UTF-8
    return connection


def _table_names(connection: sqlite3.Connection) -> list[str]:
    rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table' ORDER BY rowid").fetchall()
    virtual = {name for name, sql in rows if re.match(r"\s*CREATE\s+VIRTUAL", sql or "", re.IGNORECASE)}
    hidden = virtual | {f"{name}_{suffix}" for name in virtual for suffix in _SHADOW}
    return [name for name, _ in rows if name not in hidden and not name.lower().startswith("sqlite_")]


def _read_table(connection: sqlite3.Connection, table: str) -> Table:
    # table_xinfo, not table_info: generated columns can be queried too.
    rows = connection.execute("SELECT name, type, pk FROM pragma_table_xinfo(?)", (table,)).fetchall()
    primary = sorted((place, name) for name, _, place in rows if place)
    columns = tuple((name, " ".join((kind or "").split())) for name, kind, _ in rows)
    return Table(table, columns, tuple(name for _, name in primary))


def _foreign_keys(connection: sqlite3.Connection, table: str, by_name: dict[str, Table]) -> tuple[ForeignKey, ...]:
    # Some of the pragma's columns are named like keywords, hence the quotes. SQLite numbers the keys backwards.
    sql = 'SELECT id, "table", "from", "to" FROM pragma_foreign_key_list(?) ORDER BY id DESC, seq'
    found: dict[int, list] = {}
    for key, parent, column, target in connection.execute(sql, (table,)):
        if parent.lower() in by_name:
            found.setdefault(key, []).append((by_name[parent.lower()], column, target or ""))
    result = []
    for rows in found.values():
        parent = rows[0][0]
        names = {name.lower(): name for name, _ in parent.columns}
        parents = tuple(names.get(target.lower(), "") for _, _, target in rows)
        if not all(parents):
            parents = parent.primary_key if len(parent.primary_key) == len(rows) else ()
        result.append(ForeignKey(tuple(column for _, column, _ in rows), parent.name, parents))
    return tuple(result)


def _compact_table(table: Table, samples: dict) -> str:
    points_at = {}
    for key in table.foreign_keys:
        for column, parent in zip(key.columns, key.parents or [""] * len(key.columns), strict=True):
            dot = f" . {quote_identifier(parent)}" if parent else ""
            points_at[column.lower()] = f" -> {quote_identifier(key.table)}{dot}"
    parts = []
    for name, declared in table.columns:
        kind = re.sub(r"\s*\(.*", "", declared).lower()  # varchar(20) -> varchar
        values = samples.get((table.name, name))
        text = quote_identifier(name) + (f" {kind}" if kind else "") + (" key" if name in table.primary_key else "")
        parts.append(text + points_at.get(name.lower(), "") + (f" [ {' , '.join(values)} ]" if values else ""))
    return f"table {quote_identifier(table.name)} ( {' , '.join(parts)} )"


def _ddl_table(table: Table, samples: dict) -> str:
    def names(columns: tuple[str, ...]) -> str:
        return f" ({', '.join(map(quote_identifier, columns))})" if columns else ""

    lines = [f"{quote_identifier(name)} {declared}".rstrip() for name, declared in table.columns]
    notes = [", ".join(samples.get((table.name, name), ())) for name, _ in table.columns]
    if table.primary_key:
        lines.append(f"PRIMARY KEY{names(table.primary_key)}")
    for key in table.foreign_keys:
        lines.append(f"FOREIGN KEY{names(key.columns)} REFERENCES {quote_identifier(key.table)}{names(key.parents)}")
    body = [f"  {line}{',' if i < len(lines) - 1 else ''}" for i, line in enumerate(lines)]
    for i, note in enumerate(notes):
        body[i] += f" -- for example {note}" if note else ""
    return "\n".join([f"CREATE TABLE {quote_identifier(table.name)} (", *body, ");"])


def _sample_values(schema: Schema, count: int) -> dict[tuple[str, str], list[str]]:
    """Up to `count` different values of every column as SQL literals, from its first 1,000 usable rows."""
    result = {}
    with closing(_connect(schema.database)) as connection:
        for table in schema.tables:
            for column, _ in table.columns:
                name, source = ('"' + text.replace('"', '""') + '"' for text in (column, table.name))
                usable = f"SELECT {name} AS v FROM {source} WHERE v IS NOT NULL AND typeof(v) <> 'blob' LIMIT 1000"
                values = connection.execute(f"SELECT DISTINCT v FROM ({usable}) LIMIT ?", (count,))
                result[table.name, column] = [_literal(value) for (value,) in values]
    return result


def _literal(value: str | int | float) -> str:
    if not isinstance(value, str):
        return str(value)
    text = " ".join(value.split())  # a newline would break the one-line comment
    return "'" + (text if len(text) <= 40 else text[:37] + "...").replace("'", "''") + "'"
