"""Running model-written SQL on a SQLite file: read only, bounded, deterministic, never an exception.

Every execution gets a fresh connection on which nothing but reading is possible, built in this order:
  1. `mode=ro&immutable=1`: the file cannot change; locks and journals are ignored;
  2. the schema is loaded (else the first query would be charged for it);
  3. limits: no ATTACH (it creates files even on a read-only connection), short values, short SQL, short patterns;
  4. an authorizer: SELECT, reading columns, recursion, and functions that are not denied;
  5. a progress handler counts SQLite's virtual-machine operations: unlike seconds, the same on every machine;
  6. rows are streamed under a row cap and a byte cap.

Three kinds of bombs get past that count. Compiling can be exponential (30 CTEs, each using the one before twice), and
sorting fills files: SQLite's heap is capped, for the whole process, and the usual budget sorts within it. One operation
can be long: short values bound most to 0.1 s; two-argument trim(), up to 10 s, is Python's.
NOT covered: a memory bug inside SQLite (put untrusted work in a container as well); the clock (`'now'` is real); a loop
of long operations (upper() of 65,000 letters, again and again), ended after 5 to 10 s of CPU time, far above what an
honest query takes; temporary files (unlinked) of a candidate whose gold was heavy; builds of SQLite without memory
statistics, which ignore the heap cap. Costs of the attacks we know: benchmarks/sandbox.py.
A mistyped "column" in double quotes is a string, as in SQLite: a fifth of Spider's golds write their strings so.
"""

import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

MAX_OPS = 25_000_000  # a candidate's budget; about half a second
GOLD_MAX_OPS = 1_000_000_000
LIMITS = {
    sqlite3.SQLITE_LIMIT_LENGTH: 100_000,  # bytes of one value; instr() and replace() are quadratic in it
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: 20_000,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 500,  # SQLite's own 50,000 allows a LIKE of 8 s
    sqlite3.SQLITE_LIMIT_COLUMN: 500,  # SQLite's own 2,000 allow one row of 400 MB
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
}
# One operation that fills gigabytes or runs for seconds; chance; code from a file.
DENIED_FUNCTIONS = set("printf format zeroblob json_patch random randomblob load_extension".split())
DENIED_PREFIXES = ("sqlite_", "fts", "rtree")  # the process's log and build, heap pointers, the insides of indexes
SLOW_FUNCTIONS = ("LIKE", "GLOB", "INSTR", "REPLACE", "JSON", "TRIM")  # the clock is looked at every 100 operations
HEAP_BYTES = 64_000_000  # no gold of Spider needs 16
VALUE_BYTES = 24  # what a value counts besides its bytes: about the least that an object of Python's takes
BACKSTOP_SECONDS = 5.0  # of this thread's CPU, plus 0.2 microseconds per operation, 10 times the usual

TOKEN = re.compile(r"""(?sx)
    (?P<skip>[ \t\n\f\r\ufeff]+ | --[^\n]* | /\*.*?(?:\*/|\Z))
  | (?P<quoted>'[^']*(?:''[^']*)*'? | "[^"]*(?:""[^"]*)*"? | `[^`]*(?:``[^`]*)*`? | \[[^\]]*\]?)
  | (?P<word>[A-Za-z0-9_$\u0080-\U0010ffff]+)
  | (?P<symbol>.)""")


@dataclass(frozen=True, slots=True)
class SqlResult:
    """What one execution gave; no rows, columns and reads unless the status is "ok".

    Others: "rejected" (not one self-contained, read-only query), "sql_error" (SQLite could not compile or finish it),
    "budget" (too many operations), "too_big" (a value, the SQL, the rows, the bytes, the memory).
    """

    status: str
    rows: list[tuple]
    num_columns: int
    reason: str
    ops: int  # operations of SQLite's virtual machine, in steps of 1,000 or 100
    reads: frozenset[tuple[str, str]]  # (real table, column) that the query reads; "" as column where it only counts

    @property
    def tables(self) -> frozenset[str]:
        """The real tables that the query reads."""
        return frozenset(table for table, _ in self.reads)


def tokens(sql: str) -> Iterator[tuple[str, str]]:
    """(kind, text) of all but blanks and comments: "word", "quoted", "symbol". "a -- b" gives one, ("word", "a")."""
    for match in TOKEN.finditer(sql):
        if match.lastgroup != "skip":
            yield match.lastgroup, match.group()


def run_sql(
    database: str | Path,
    sql: str,
    *,
    max_ops: int = MAX_OPS,
    max_rows: int = 100_000,
    max_bytes: int = 20_000_000,
    reverse_scan: bool = False,
) -> SqlResult:
    """Run one query of unknown origin: its rows, or why there are none. Nothing that the SQL says raises.

    The caps are of the whole result; a value counts 24 and its bytes.
    reverse_scan: tables are scanned backwards where no ORDER BY applies.
    Raises ValueError if the database is missing, empty, not SQLite, a Git LFS pointer, or has a live -wal or -journal.
    Example: run_sql(db, "SELECT 1 + 1").rows -> [(2,)]; run_sql(db, "DROP TABLE t").status -> "rejected"
    """
    uri, tables = _inspect(file_stamp(database))
    first = next(tokens(sql), ("", ""))[1].upper()
    if first not in ("SELECT", "WITH", "VALUES"):
        return SqlResult("rejected", [], 0, f"not a query: it starts with {first[:20]!r}", 0, frozenset())
    rows, run = [], _Run(sql, max_ops, max_bytes)
    with closing(_connect(uri)) as connection:
        if max_ops <= MAX_OPS:  # sorting in memory ends at the heap's cap; a heavy gold may need a file for it
            connection.execute("PRAGMA temp_store = MEMORY")
        if reverse_scan:
            connection.execute("PRAGMA reverse_unordered_selects = ON")
        run.guard(connection)
        try:
            cursor = connection.execute(sql)
            for row in cursor:
                blobs = [value for value in row if type(value) is bytes] if bytes in map(type, row) else ()
                run.charge(VALUE_BYTES * len(row) + sum(map(len, blobs)))
                rows.append(row)
                if len(rows) > max_rows:
                    raise MemoryError(f"more than {max_rows} rows")
            reads = _real_reads(connection, sql, run.reads, tables)
        except (sqlite3.Error, UnicodeError, MemoryError, OverflowError) as error:  # anything else is a bug of ours
            return run.explain(error)
    return SqlResult("ok", rows, len(cursor.description), "", run.ops, reads)


def run_gold(database: str | Path, gold: str) -> SqlResult:
    """Run a gold query with 1,000 M operations, once per file and query; later calls return the same object."""
    return _run_gold(file_stamp(database), gold)


@lru_cache(maxsize=16_384)
def _run_gold(stamp: tuple[str, int, int], gold: str) -> SqlResult:
    return run_sql(stamp[0], gold, max_ops=GOLD_MAX_OPS)


def candidate_budget(gold_result: SqlResult) -> int:
    """Operations of a candidate: 10 times the gold's, at least 25 M, at most 1,000 M. Example: gold 7 M -> 70 M."""
    return max(MAX_OPS, min(10 * gold_result.ops, GOLD_MAX_OPS))


class _Run:
    """The live state of one execution: operations and bytes so far, names read, why it was ended."""

    def __init__(self, sql: str, max_ops: int, max_bytes: int):
        self.max_ops, self.max_bytes, self.words = max_ops, max_bytes, sql.upper()
        self.step = max(1, min(100 if any(word in self.words for word in SLOW_FUNCTIONS) else 1000, max_ops))
        self.ops = self.bytes = 0
        self.reads: set[tuple[str, str]] = set()
        self.ended: tuple[str, str] | None = None  # by us: (status, reason)
        self.start = time.thread_time()  # not the wall clock: other programs and a slow disk do not count

    def guard(self, connection: sqlite3.Connection) -> None:
        for limit, value in LIMITS.items():
            connection.setlimit(limit, value)
        if "TRIM" in self.words:
            for name, strip in (("trim", str.strip), ("ltrim", str.lstrip), ("rtrim", str.rstrip)):
                connection.create_function(name, 2, partial(_trim, strip), deterministic=True)
        connection.text_factory = self.decode
        connection.set_authorizer(self.authorize)
        connection.set_progress_handler(self.tick, self.step)

    def authorize(self, action: int, first: str | None, second: str | None, *_: str | None) -> int:
        """SQLite asks before all it does: allow SELECT, columns (noted in `reads`), recursion, harmless functions."""
        if action == sqlite3.SQLITE_READ:
            self.reads.add((first.lower(), second))
        elif action == sqlite3.SQLITE_FUNCTION:
            if second in DENIED_FUNCTIONS or second.startswith(DENIED_PREFIXES):
                self.ended = "rejected", f"the function {second}() is not allowed"
        elif action not in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            self.ended = "rejected", "only reading is allowed"
        return sqlite3.SQLITE_DENY if self.ended else sqlite3.SQLITE_OK

    def tick(self) -> bool:
        """Called every `step` operations: count them; True, with the reason in `ended`, ends the query."""
        self.ops += self.step
        if self.ops >= self.max_ops:
            self.ended = "budget", f"more than {self.max_ops} operations"
        elif time.thread_time() - self.start > BACKSTOP_SECONDS + self.ops * 2e-7:
            self.ended = "budget", "backstop on CPU time"
        return bool(self.ended)

    def decode(self, text: bytes) -> str:
        self.charge(len(text))  # here, so that a wide row is stopped before all of its values are copied
        return text.decode("utf-8", "ignore")  # the official evaluator drops invalid bytes too

    def charge(self, count: int) -> None:
        self.bytes += count
        if self.bytes > self.max_bytes:
            raise MemoryError(f"more than {self.max_bytes} bytes")

    def explain(self, error: Exception) -> SqlResult:
        if self.ended:
            status, reason = self.ended
        elif isinstance(error, (MemoryError, sqlite3.DataError)):
            status, reason = "too_big", str(error) or "out of memory"
        elif isinstance(error, (sqlite3.ProgrammingError, UnicodeEncodeError)):
            status, reason = "rejected", str(error)  # several statements, unbound parameters, NUL, lone surrogates
        elif getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
            raise KeyboardInterrupt from error  # a Ctrl-C inside a callback, which the driver swallows
        else:
            status, reason = "sql_error", str(error)
        return SqlResult(status, [], 0, reason, self.ops, frozenset())


def _trim(strip: Callable[[str, str], str], *arguments: object) -> str | None:
    """SQLite's trim(value, characters)."""
    if None in arguments:
        return None
    decoded = [a.decode("utf-8", "ignore") if isinstance(a, bytes) else a for a in arguments]
    value, characters = (str(float(f"{a:.15g}") if isinstance(a, float) else a) for a in decoded)
    return strip(value, "".join(set(characters)))


def _real_reads(connection: sqlite3.Connection, sql: str, seen: set, tables: dict[str | int, str]) -> frozenset:
    """What the authorizer saw, less the names that are no tables: CTEs, aliases of subqueries, views."""
    reads = {(tables[name], column) for name, column in seen if name in tables}
    # `WITH singer AS (SELECT 1) SELECT count(*) FROM singer` is reported as a read of singer. The program knows.
    if reads and "WITH" in sql.upper():
        connection.set_progress_handler(None, 0)
        connection.text_factory = bytes
        connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, len("EXPLAIN ") + LIMITS[sqlite3.SQLITE_LIMIT_SQL_LENGTH])
        program = connection.execute("EXPLAIN " + sql)
        opened = {tables.get(step[3]) for step in program if step[1] in (b"OpenRead", b"ReopenIdx")}
        reads = {(table, column) for table, column in reads if table in opened}
    return frozenset(reads)


def _connect(uri: str) -> sqlite3.Connection:
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    if hasattr(sqlite3, "SQLITE_DBCONFIG_DQS_DML"):  # Python 3.12; some builds are compiled without "strings"
        connection.setconfig(sqlite3.SQLITE_DBCONFIG_DQS_DML, True)
    connection.execute("SELECT 1 FROM sqlite_master LIMIT 0")  # loads the schema, uncounted
    return connection


def file_stamp(database: str | Path) -> tuple[str, int, int]:
    """(path, modification time, size): what is cached about a file holds as long as these stay the same."""
    path = os.fspath(database)
    real = os.path.realpath(path) if os.path.islink(path) else path  # changes stand beside the file
    if _is_live(real + "-wal") or _is_live(real + "-journal"):
        raise ValueError(f"database = {path}: its -wal or -journal holds changes that are not in it; close the writer")
    try:
        file = os.stat(path)
        return path, file.st_mtime_ns, file.st_size
    except OSError as error:
        raise ValueError(f"database = {path}: {error.strerror}; expected a SQLite file") from None


def _is_live(path: str) -> bool:
    """Whether a side file holds changes; a journal that SQLite has finished with may stay, its start zeroed."""
    try:
        with open(path, "rb") as file:
            return any(file.read(8))
    except OSError:
        return False


@lru_cache(maxsize=1024)
def _inspect(stamp: tuple[str, int, int]) -> tuple[str, dict[str | int, str]]:
    """(URI, tables by lower-case name and by root page); ValueError if this is no usable database."""
    path = Path(stamp[0]).resolve()
    uri = path.as_uri() + "?mode=ro&immutable=1"  # escapes '?', '#', '%', which would open (create) another file
    try:
        with path.open("rb") as file:
            head = file.read(23)
        if not head.startswith(b"SQLite format 3\0"):
            what = "a Git LFS pointer: run `git lfs pull`" if head == b"version https://git-lfs" else repr(head)
            raise ValueError(f"database = {path} is not SQLite; expected 'SQLite format 3', found {what}")
        with closing(_connect(uri)) as connection:
            connection.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")  # can only be lowered
            schema = connection.execute("SELECT type, name, tbl_name, rootpage FROM sqlite_master").fetchall()
            connection.execute('SELECT "text"')  # this build must take double-quoted strings
    except (OSError, sqlite3.Error) as error:
        raise ValueError(f"database = {path} cannot be read: {error}; expected a SQLite file") from None
    tables = {name.lower(): name for kind, name, _, _ in schema if kind == "table" and not name.startswith("sqlite_")}
    return uri, tables | {root: table for _, _, table, root in schema if root}
