"""Step 10: run a query of unknown origin without letting it write, escape, hang, or fill the memory.

Built here: sqlenv/database.py, run_sql(database, sql, ...) -> SqlResult and run_gold, candidate_budget.
Rule: whatever the SQL says, a status comes back (ok | rejected | sql_error | budget | too_big); the database's bytes,
the folder and the process stay as they were; the same query costs the same number of operations every time.
Command: pytest tests/test_10_sandbox.py
Needed by: step 11 compares the rows, step 14 pays for them.
"""

import hashlib
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from sqlenv import database
from sqlenv.database import MAX_OPS, SqlResult, candidate_budget, run_gold, run_sql, tokens

CANARY = "SELECT count(*), min(name), max(name LIKE 'A%') FROM country"


@pytest.fixture(scope="module")
def db(tmp_path_factory) -> Path:
    """239 countries, an `Order Details` table with one invalid UTF-8 text, a view."""
    path = tmp_path_factory.mktemp("sandbox") / "world.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE country(id INTEGER PRIMARY KEY, name TEXT, area REAL)")
        rows = [(i, f"country {i * 7919 % 239:03d}", i / 7) for i in range(239)]
        connection.executemany("INSERT INTO country VALUES (?, ?, ?)", rows)
        connection.execute('CREATE TABLE "Order Details"(qty INTEGER, note TEXT)')
        connection.execute("INSERT INTO \"Order Details\" VALUES (1, CAST(x'61ff62' AS TEXT)), (2, NULL)")
        connection.execute("CREATE TABLE log(id INTEGER PRIMARY KEY AUTOINCREMENT)")
        connection.execute("CREATE VIEW small AS SELECT name FROM country WHERE area < 1")
        connection.commit()
    return path


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) "
ROWS = ENDLESS.replace("FROM n", "FROM n WHERE i < 12000")
# One value of 65,536 letters, made of one: what most bombs need.
BIG = (
    "WITH RECURSIVE d(s) AS (SELECT 'a' UNION ALL SELECT s || s FROM d WHERE length(s) < 50000), "
    "big(s) AS MATERIALIZED (SELECT max(s) FROM d) "
)


def chain(body: str, start: str = "SELECT 1") -> str:
    """40 CTEs, each made of the one before: WITH t0(x) AS (start), t1(x) AS (body of t0), ... SELECT x FROM t40."""
    ctes = [f"t{i}(x) AS ({body.replace('t_', f't{i - 1}')})" for i in range(1, 41)]
    return f"WITH t0(x) AS ({start}), " + ", ".join(ctes) + " SELECT x FROM t40"


HOSTILE = [
    # --- no end ---
    ("infinite recursion, aggregated", ENDLESS + "SELECT sum(i) FROM n", "budget"),
    ("infinite recursion, rows", ENDLESS + "SELECT i FROM n", "too_big"),
    ("cyclic recursion with UNION ends", ENDLESS.replace("ALL SELECT i + 1", "SELECT 1 - i") + "SELECT i FROM n", "ok"),
    ("5-way product", "SELECT count(*) FROM country a, country b, country c, country d, country e", "budget"),
    ("product, sorted", "SELECT a.name||b.name||c.name FROM country a, country b, country c ORDER BY 1", "budget"),
    ("correlated product", "SELECT (SELECT count(*) FROM country b, country c WHERE b.id > a.id) FROM country a",
     "budget"),
    # --- memory ---
    ("zeroblob", "SELECT zeroblob(1000000000)", "rejected"),
    ("hex of zeroblob", "SELECT hex(zeroblob(400000000))", "rejected"),
    ("randomblob", "SELECT randomblob(900000000)", "rejected"),
    ("printf precision", "SELECT printf('%.*c', 900000000, 'x')", "rejected"),
    ("printf width", "SELECT PrintF('%900000000d', 1)", "rejected"),
    ("format", "SELECT format('%.*c', 900000000, 'x')", "rejected"),
    ("nested replace", "SELECT " + "replace(" * 9 + "'aaaaaaaaaa'" + ",'a','aaaaaaaaaa')" * 9, "too_big"),
    ("group_concat of a product", "SELECT group_concat(a.name) FROM country a, country b", "too_big"),
    ("doubling in a recursion", BIG.replace("WHERE length(s) < 50000", "") + "SELECT s FROM big", "too_big"),
    ("a blob per row", "SELECT zeroblob(10000000) FROM country", "rejected"),
    ("wide rows of text", BIG + "SELECT " + ", ".join(["s"] * 400) + " FROM big, country", "too_big"),
    ("wide rows of blobs", BIG + "SELECT " + ", ".join(["CAST(s AS BLOB)"] * 400) + " FROM big, country", "too_big"),
    ("many rows", ROWS + "SELECT a.i FROM n a, country b", "too_big"),
    ("CTEs used twice each", chain("SELECT a.x FROM t_ a, t_ b"), "too_big"),
    ("scalar CTEs used twice each", chain("SELECT (SELECT x FROM t_) + (SELECT x FROM t_)"), "too_big"),
    ("an expression that doubles", chain("SELECT x + x FROM t_", "SELECT id FROM country"), "too_big"),
    # --- one long operation ---
    ("instr", BIG + "SELECT instr(s, substr(s, 30000) || 'b') FROM big", "ok"),
    ("replace", BIG + "SELECT length(replace(s, substr(s, 30000) || 'b', '')) FROM big", "ok"),
    ("trim", BIG + "SELECT length(trim(s, substr(replace(s, 'a', 'b'), 1, 16000) || 'a')) FROM big", "ok"),
    ("LIKE, long pattern", BIG + "SELECT s LIKE '%' || substr(s, 1, 40000) || 'b' FROM big", "sql_error"),
    ("LIKE, 400 letters", BIG + "SELECT s LIKE '%' || substr(s, 1, 400) || 'b' FROM big", "ok"),
    ("GLOB, long set", BIG + "SELECT s GLOB '*[' || substr(s, 1, 40000) || ']b' FROM big", "sql_error"),
    ("LIKE, many wildcards", BIG + "SELECT s LIKE '" + "%a" * 60 + "b' FROM big", "ok"),
    ("json_patch", ROWS + "SELECT length(json_patch(j, j)) FROM (SELECT json_group_object(i, 1) j FROM n)", "ok"),
    # --- files and other databases ---
    ("ATTACH a new file", "ATTACH 'new.sqlite' AS x", "rejected"),
    ("ATTACH memory", "ATTACH ':memory:' AS x", "rejected"),
    ("ATTACH after a comment", "/* SELECT */ ATTACH 'new.sqlite' AS x", "rejected"),
    ("DETACH", "DETACH main", "rejected"),
    ("VACUUM INTO", "VACUUM INTO 'copy.sqlite'", "rejected"),
    ("VACUUM", "VACUUM", "rejected"),
    ("ANALYZE", "ANALYZE", "rejected"),
    ("REINDEX", "REINDEX", "rejected"),
    ("load_extension", "SELECT load_extension('x.so')", "rejected"),
    ("fts3_tokenizer", "SELECT hex(fts3_tokenizer('simple'))", "rejected"),
    ("sqlite_log", "SELECT sqlite_log(1, 'x')", "rejected"),
    ("readfile", "SELECT readfile('/etc/passwd')", "sql_error"),
    ("writefile", "SELECT writefile('new.txt', 'x')", "sql_error"),
    ("edit", "SELECT edit('x', 'vi')", "sql_error"),
    ("generate_series", "SELECT * FROM generate_series(1, 1000000000)", "sql_error"),
    ("another schema", "SELECT * FROM temp.sqlite_master", "ok"),
    # --- writing ---
    ("INSERT", "INSERT INTO country VALUES (1000, 'x', 0)", "rejected"),
    ("INSERT RETURNING", "INSERT INTO country VALUES (1000, 'x', 0) RETURNING id", "rejected"),
    ("DELETE", "DELETE FROM country", "rejected"),
    ("DELETE behind WITH", "WITH x AS (SELECT 1) DELETE FROM country RETURNING id", "rejected"),
    ("UPDATE behind WITH", "WITH x AS (SELECT 1) UPDATE country SET name = 'x'", "rejected"),
    ("REPLACE behind WITH", "WITH x AS (SELECT 1) REPLACE INTO country SELECT 1, 'x', 2", "rejected"),
    ("DROP", "DROP TABLE country", "rejected"),
    ("CREATE TABLE", "CREATE TABLE IF NOT EXISTS junk(a)", "rejected"),
    ("CREATE VIEW", "CREATE VIEW v AS SELECT 1", "rejected"),
    ("CREATE TEMP VIEW that shadows", "CREATE TEMP VIEW country AS SELECT 1", "rejected"),
    ("CREATE TEMP TABLE", "CREATE TEMP TABLE country(a)", "rejected"),
    ("ALTER", "ALTER TABLE country RENAME TO c", "rejected"),
    ("BEGIN", "BEGIN", "rejected"),
    ("SAVEPOINT", "SAVEPOINT s", "rejected"),
    ("COMMIT", "COMMIT", "rejected"),
    # --- settings and internals ---
    *((f"PRAGMA {name}", f"PRAGMA {name}", "rejected") for name in (
        "journal_mode = WAL", "query_only = OFF", "writable_schema = ON", "mmap_size = 1", "cache_size = 9999999",
        "temp_store_directory = '.'", "hard_heap_limit = 1", "case_sensitive_like = ON", "table_info(country)",
        "reverse_unordered_selects = ON",
    )),
    ("pragma function", "SELECT * FROM pragma_table_info('country')", "rejected"),
    ("pragma function that sets", "SELECT * FROM pragma_query_only(0)", "rejected"),
    ("json_each", "SELECT * FROM json_each('[1]')", "rejected"),
    ("dbstat", "SELECT * FROM dbstat", ("rejected", "sql_error")),
    ("sqlite_stmt", "SELECT * FROM sqlite_stmt", ("rejected", "sql_error")),
    ("random", "SELECT random()", "rejected"),
    ("ORDER BY random", "SELECT name FROM country ORDER BY random() LIMIT 1", "rejected"),
    ("random in a CTE", "WITH r AS (SELECT Random() AS x) SELECT id FROM country, r WHERE id < x", "rejected"),
    # --- not a query ---
    ("EXPLAIN", "EXPLAIN SELECT name FROM country", "rejected"),
    ("EXPLAIN QUERY PLAN", "-- x\nexplain query plan SELECT name FROM country", "rejected"),
    ("empty", "", "rejected"),
    ("blank", " \n\t", "rejected"),
    ("semicolon", ";", "rejected"),
    ("comment", "-- nothing", "rejected"),
    ("open comment", "/* SELECT 1", "rejected"),
    ("comment and semicolon", "; /* c */ ;", "rejected"),
    ("text", "I would select all names.", "rejected"),
    ("two statements", "SELECT 1; SELECT 2", "rejected"),
    ("a statement and a DROP", "SELECT id FROM country; DROP TABLE country", "rejected"),
    ("two semicolons", "SELECT 1;;", "rejected"),
    ("NUL", "SELECT 1 \0 DROP TABLE country", "rejected"),
    ("lone surrogate", "SELECT '\ud800'", "rejected"),
    ("parameters", "SELECT ?, :x, @x", "rejected"),
    ("no-break space", "\u00a0SELECT 1", "rejected"),
    # --- the parser ---
    ("1,500 parentheses", "SELECT " + "(" * 1500 + "1" + ")" * 1500, "sql_error"),
    ("4,000 NOT", "SELECT " + "NOT " * 4000 + "1", "sql_error"),
    ("100 nested queries", "SELECT * FROM (" * 100 + "SELECT 1" + ")" * 100, "sql_error"),
    ("4,000 additions", "SELECT 1" + " + 1" * 4000, "sql_error"),
    ("501 UNION ALL", "SELECT 1" + " UNION ALL SELECT 1" * 501, "sql_error"),
    ("65 tables", "SELECT 1 FROM " + ", ".join(f"country c{i}" for i in range(65)), "sql_error"),
    ("60 tables, OR", "SELECT count(*) FROM " + ", ".join(f"country c{i}" for i in range(60)) + " WHERE "
     + " AND ".join(f"(c{i}.id = c{i * 7 % 60}.id OR c{i}.name = c{i * 11 % 60}.name)" for i in range(60)), "budget"),
    ("2,001 columns", "SELECT " + ", ".join(["1"] * 2001), "sql_error"),
    ("more columns than a result may have", "SELECT " + ", ".join(["c.*"] * 200) + " FROM country c", "sql_error"),
    ("100,000 values IN", "SELECT 1 WHERE 1 IN (" + "1," * 100_000 + "1)", "too_big"),
    ("1.1 MB", "SELECT '" + "x" * 1_100_000 + "'", "too_big"),
    ("1.1 MB of quotes", "SELECT " + "'" * 1_100_001, "too_big"),
    ("sum overflow", "SELECT sum(9223372036854775807) FROM country", "sql_error"),
    ("abs of the smallest", "SELECT abs(-9223372036854775807 - 1)", "sql_error"),
    ("infinity", "SELECT 9e999, 9e999 - 9e999", "ok"),
    ("quadratic window", "SELECT sum(a.id) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING "
     "EXCLUDE CURRENT ROW) FROM country a, country b", "budget"),
]  # fmt: skip


def fingerprint(path: Path) -> tuple[str, list[str]]:
    """The bytes of the database, and the names of the files beside it."""
    return hashlib.sha256(path.read_bytes()).hexdigest(), sorted(file.name for file in path.parent.iterdir())


@pytest.mark.parametrize(("sql", "expected"), [case[1:] for case in HOSTILE], ids=[case[0] for case in HOSTILE])
def test_a_hostile_input_gets_a_status_and_changes_nothing(db, tmp_path, monkeypatch, sql, expected):
    monkeypatch.chdir(tmp_path)  # a relative path in the SQL would create its file here
    before, canary = fingerprint(db), run_sql(db, CANARY)
    start = time.process_time()
    result = run_sql(db, sql, max_ops=3_000_000)
    assert result.status in ([expected] if isinstance(expected, str) else expected), result.reason
    assert time.process_time() - start < 10  # a tenth of a second as a rule; the machine may be busy
    assert result.status == "ok" or (result.rows == [] and result.tables == frozenset() and result.reason)
    assert run_sql(db, CANARY) == canary
    assert canary.rows == [(239, "country 000", 0)]
    assert fingerprint(db) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sql", "rows", "tables"),
    [
        ("SELECT count(*) FROM country", [(239,)], {"country"}),
        ("select COUNT(*) from COUNTRY;", [(239,)], {"country"}),
        ("/* c */ -- d\n SELECT max(id) FROM country; -- e", [(238,)], {"country"}),
        ("\ufeffSELECT min(id) FROM [country]", [(0,)], {"country"}),
        ("SELECT qty FROM 'Order Details' WHERE note IS NULL", [(2,)], {"Order Details"}),
        ("SELECT count(*) FROM small", [(7,)], {"country"}),  # a view is no table, what it reads is
        ("SELECT 1 WHERE EXISTS (SELECT * FROM country)", [(1,)], {"country"}),
        ("SELECT max(qty), count(id) FROM `Order Details`, country", [(2, 478)], {"country", "Order Details"}),
        ("SELECT 1", [(1,)], set()),
        ("VALUES (1, 'a')", [(1, "a")], set()),
        ("SELECT count(*) > 0 FROM sqlite_master", [(1,)], set()),
        ("SELECT count(*) FROM sqlite_sequence", [(0,)], set()),
        ("WITH c AS (SELECT 5 AS x) SELECT x FROM c", [(5,)], set()),
        ("WITH c AS (SELECT 5 AS x) SELECT count(*) FROM c", [(1,)], set()),
        ("WITH country AS (SELECT 5 AS x) SELECT count(*) FROM country", [(1,)], set()),  # the name of a table, not one
        ("SELECT * FROM (WITH \"Country\"(x) AS (SELECT 5) SELECT count(*) FROM Country)", [(1,)], set()),
        ("WITH c AS (SELECT id FROM country) SELECT count(*) FROM c", [(239,)], {"country"}),
        ("WITH c AS (SELECT count(*) AS n FROM country) SELECT n FROM c", [(239,)], {"country"}),
    ],
)  # fmt: skip
def test_an_honest_query_returns_its_rows_and_the_real_tables_it_read(db, sql, rows, tables):
    result = run_sql(db, sql)
    assert (result.status, result.rows, result.tables) == ("ok", rows, tables), result.reason
    assert result.num_columns == len(rows[0])


def test_a_mistyped_column_in_double_quotes_executes_as_in_sqlite(db):
    # SQLite reads "nosuchcol" as a string if no column has the name; a fifth of Spider's golds rely on that rule.
    assert run_sql(db, 'SELECT "nosuchcol" FROM country LIMIT 1').rows == [("nosuchcol",)]
    assert run_sql(db, "SELECT [nosuchcol] FROM country").reason == "no such column: nosuchcol"


def test_invalid_utf8_is_dropped_from_text(db):
    assert run_sql(db, 'SELECT note FROM "Order Details"').rows == [("ab",), (None,)]


def test_two_argument_trim_equals_sqlites_own(db):
    values = ["'  abcabc '", "'xxaxx'", "''", "NULL", "120.0", "1200", "0.1 + 0.2", "x'616263'", "'éaé'"]
    characters = ["'a'", "'cba '", "'0'", "''", "NULL", "0", "'é'", "x'61'"]
    sql = "SELECT " + ", ".join(
        f"{name}({value}, {chars})" for name in ("trim", "ltrim", "rtrim") for value in values for chars in characters
    )
    with closing(sqlite3.connect(":memory:")) as connection:
        assert run_sql(db, sql).rows == connection.execute(sql).fetchall()


def smallest_budget(path: Path, sql: str) -> int:
    return next(budget for budget in range(1, 100) if run_sql(path, sql, max_ops=budget).status == "ok")


def test_the_schema_is_not_charged_and_the_count_is_exact(db, tmp_path):
    # The same query on a database with 200 more tables takes the same number of operations, on every run.
    crowded = tmp_path / "crowded.sqlite"
    crowded.write_bytes(db.read_bytes())
    with closing(sqlite3.connect(crowded)) as connection:
        connection.executescript("BEGIN;" + "".join(f"CREATE TABLE t{i}(a, b);" for i in range(200)) + "COMMIT;")
    counts = {smallest_budget(path, "SELECT max(id) FROM country") for path in (db, db, crowded)}
    assert len(counts) == 1
    assert min(counts) > 5


def test_operations_are_counted_alike_on_every_run(db):
    sql = "SELECT count(*) FROM country a, country b WHERE a.area < b.area"
    results = [run_sql(db, sql) for _ in range(3)]
    assert results[0] == results[1] == results[2]
    ops = results[0].ops
    assert 150_000 < ops < 400_000  # 239^2 pairs, a few operations each
    assert run_sql(db, sql, max_ops=ops).status == "budget"


def test_the_default_budget_ends_a_product_of_five_tables(db):
    result = run_sql(db, "SELECT count(*) FROM country a, country b, country c, country d, country e")
    assert (result.status, result.ops, result.reason) == ("budget", MAX_OPS, "more than 25000000 operations")


def test_caps_on_rows_and_bytes_are_inclusive(db):
    assert run_sql(db, "SELECT id FROM country", max_rows=239).status == "ok"
    assert run_sql(db, "SELECT id FROM country", max_rows=238).reason == "more than 238 rows"
    assert run_sql(db, "SELECT name FROM country", max_bytes=239 * (11 + 8)).status == "ok"  # 11 letters and 8 a value
    assert run_sql(db, "SELECT name FROM country", max_bytes=239 * (11 + 8) - 1).status == "too_big"
    assert run_sql(db, "SELECT x'00010203' FROM country", max_bytes=239 * (4 + 8) - 1).status == "too_big"


def test_a_scan_can_be_reversed_to_find_results_that_the_query_leaves_open(db):
    sql = "SELECT id FROM country LIMIT 1"
    assert (run_sql(db, sql).rows, run_sql(db, sql, reverse_scan=True).rows) == ([(0,)], [(238,)])


def test_the_wall_clock_is_a_backstop_only(db, monkeypatch):
    monkeypatch.setattr(database, "BACKSTOP_SECONDS", -1e6)
    assert run_sql(db, "SELECT max(id) FROM country").status == "ok"  # too short to be looked at
    result = run_sql(db, "SELECT count(*) FROM country a, country b, country c")
    assert (result.status, result.reason) == ("budget", "wall-clock backstop")


def test_control_c_during_a_query_is_not_taken_for_a_budget(db, monkeypatch):
    class Clock:
        calls = 0

        def monotonic(self) -> float:
            self.calls += 1
            if self.calls > 2:
                raise KeyboardInterrupt
            return 0.0

    monkeypatch.setattr(database, "time", Clock())
    with pytest.raises(KeyboardInterrupt):
        run_sql(db, "SELECT count(*) FROM country a, country b, country c")


def test_golds_run_once_and_set_the_budget_of_candidates(db):
    gold = "SELECT count(*) FROM country a, country b"
    assert run_gold(db, gold) is run_gold(str(db), gold)
    assert candidate_budget(run_gold(db, gold)) == MAX_OPS
    assert candidate_budget(SqlResult("ok", [], 1, "", 7_000_000, frozenset())) == 70_000_000
    assert candidate_budget(SqlResult("ok", [], 1, "", 600_000_000, frozenset())) == 1_000_000_000


def test_a_changed_database_is_read_again(tmp_path):
    path = tmp_path / "a.sqlite"
    for number in (1, 2):
        path.unlink(missing_ok=True)
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript(f"CREATE TABLE t{number}(a); INSERT INTO t{number} VALUES ({number});")
            connection.executescript("CREATE TABLE more(a);" * (number - 1))
        assert run_gold(path, f"SELECT a FROM t{number}").rows == [(number,)]
        assert run_sql(path, f"SELECT count(*) FROM t{number}").tables == {f"t{number}"}
    assert run_gold(path, "SELECT a FROM t1").status == "sql_error"


@pytest.mark.parametrize("name", ["a?mode=rwc.sqlite", "a#b.sqlite", "%41.sqlite", "a b.sqlite", "é.sqlite"])
def test_any_file_name_opens_that_file_and_creates_none(db, tmp_path, name):
    if sys.platform == "win32" and "?" in name:
        pytest.skip("not a file name on Windows")
    (tmp_path / name).write_bytes(db.read_bytes())
    assert run_sql(tmp_path / name, "SELECT count(*) FROM country").rows == [(239,)]
    assert [file.name for file in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not SQLite"),
        (b"id,name\n1,pen\n", "is not SQLite"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer: run `git lfs pull`"),
        (b"SQLite format 3\0" + b"\xff" * 4096, "cannot be read"),
        (None, "No such file"),
    ],
    ids=["empty", "text", "LFS pointer", "damaged", "missing"],
)
def test_an_unusable_database_is_a_clear_error(tmp_path, content, message):
    path = tmp_path / "a.sqlite"
    if content is not None:
        path.write_bytes(content)
    for run in (run_sql, run_gold):
        with pytest.raises(ValueError, match=message):
            run(path, "SELECT 1")
    assert path.exists() == (content is not None)  # nothing was created


def test_a_database_in_wal_mode_is_read_without_the_files_that_sqlite_would_put_beside_it(db, tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(db.read_bytes())
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
    before = fingerprint(path)
    assert run_sql(path, "SELECT count(*) FROM country").rows == [(239,)]
    assert fingerprint(path) == before
    assert before[1] == ["a.sqlite"]


def test_a_lock_held_by_another_program_is_not_waited_for(db, tmp_path):
    path = tmp_path / "a.sqlite"
    path.write_bytes(db.read_bytes())
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN EXCLUSIVE")
        assert run_sql(path, "SELECT count(*) FROM country").rows == [(239,)]


def test_attaching_fails_even_without_the_authorizer(tmp_path):
    with closing(sqlite3.connect(":memory:")) as connection:
        database._Run(1000, 1000, 1000).guard(connection)
        connection.set_authorizer(None)
        with pytest.raises(sqlite3.OperationalError, match="too many attached databases - max 0"):
            connection.execute(f"ATTACH '{tmp_path / 'new.sqlite'}' AS x")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_database(tmp_path):
    with pytest.raises(ValueError, match="expected a SQLite file"):
        run_sql(tmp_path, "SELECT 1")


@pytest.mark.parametrize("suffix", ["-wal", "-journal"])
def test_a_database_with_changes_that_are_not_in_it_is_refused(db, tmp_path, suffix):
    path = tmp_path / "a.sqlite"
    path.write_bytes(db.read_bytes())
    live = Path(str(path) + suffix)
    live.write_bytes(b"")
    assert run_sql(path, "SELECT 1").status == "ok"
    live.write_bytes(b"x")
    with pytest.raises(ValueError, match="holds changes that are not in it"):
        run_sql(path, "SELECT 1")


def test_tokens_follow_sqlites_lexer():
    sql = "SELECT 'it''s' /* , */ AS \"a\"\"b\", [c d], `e` FROM t1 -- end"
    words = [text for _, text in tokens(sql)]
    assert words == ["SELECT", "'it''s'", "AS", '"a""b"', ",", "[c d]", ",", "`e`", "FROM", "t1"]
    assert list(tokens("/* open")) == []
    assert list(tokens("'open")) == [("quoted", "'open")]


def test_only_the_standard_library_is_loaded():
    code = (
        "import sqlenv, sqlenv.score, sys; print([m for m in ('torch', 'numpy', 'grpo', 'model') if m in sys.modules])"
    )
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], cwd=root, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
