"""Step 12: the prompt. What the model sees is the database's own schema and the question, and never the gold.

You build: sqlenv/schema.py (`read_schema`, `render_schema`, `quote_identifier`) and sqlenv/prompt.py
(`build_messages`, `target_completion`, `neutralise`).
Rules: user message = schema, evidence (if any), question; no byte depends on the gold; no control token survives.
Run: pytest tests/test_12_prompt.py
Needed by: 13 (databases of the embedded task), 15 (rollouts), 21 (SFT).
"""

import dataclasses
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from sqlenv.datasets import Example
from sqlenv.prompt import build_messages, neutralise, target_completion
from sqlenv.schema import ForeignKey, Table, quote_identifier, read_schema, render_schema


def make_database(path: Path, script: str) -> Path:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(f"PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; {script}")
    return path


@pytest.fixture
def hotel(tmp_path) -> Path:
    return make_database(
        tmp_path / "hotel.sqlite",
        """CREATE TABLE room (id INTEGER PRIMARY KEY, size REAL);
        CREATE TABLE guest (id INTEGER PRIMARY KEY, name VARCHAR(20), room_id INTEGER REFERENCES Room);
        INSERT INTO room VALUES (1, 20.5), (2, 31.0);
        INSERT INTO guest VALUES (1, 'O''Hara', 2), (2, 'two
        lines', 1), (3, 'O''Hara', NULL);""",
    )


@pytest.fixture
def example(hotel) -> Example:
    return Example("  how many guests are there?\n", "SELECT count(*) FROM guest", "hotel", hotel)


# --- by hand ---


def test_the_compact_style_is_one_spaced_line_a_table(hotel):
    """Worked by hand: `Room` is the table room in any case; the key names no column, so it means room's primary key."""
    assert render_schema(read_schema(hotel)) == (
        "table room ( id integer key , size real )\n"
        "table guest ( id integer key , name varchar , room_id integer -> room . id )"
    )


def test_the_ddl_style_is_create_table_text_with_one_column_a_line(hotel):
    assert render_schema(read_schema(hotel), "ddl", sample_values=1).split(";\n")[1] == (
        "CREATE TABLE guest (\n"
        "  id INTEGER, -- for example 1\n"
        "  name VARCHAR(20), -- for example 'O''Hara'\n"
        "  room_id INTEGER, -- for example 2\n"
        "  PRIMARY KEY (id),\n"
        "  FOREIGN KEY (room_id) REFERENCES room (id)\n"
        ");"
    )


def test_the_prompt_is_schema_then_evidence_then_question(example):
    schema = render_schema(read_schema(example.database))
    question = "question: how many guests are there?"
    assert build_messages(example) == [{"role": "user", "content": f"{schema}\n{question}"}]
    hinted = dataclasses.replace(example, evidence="guests sleep in rooms")
    messages = build_messages(hinted, system="Answer in SQLite.")
    assert messages[0] == {"role": "system", "content": "Answer in SQLite."}
    assert messages[1]["content"] == f"{schema}\nevidence: guests sleep in rooms\n{question}"


def test_sft_is_taught_the_target_or_else_the_gold_in_one_block(example):
    assert target_completion(example) == "```sql\nSELECT count(*) FROM guest\n```"
    assert target_completion(dataclasses.replace(example, target="SELECT 1")) == "```sql\nSELECT 1\n```"


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("guest", "guest"),
        ("Order Details", '"Order Details"'),
        ("order", '"order"'),
        ('a"b', '"a""b"'),
        ("1st", '"1st"'),
    ],
)
def test_names_are_quoted_only_where_sql_needs_it(name, quoted):
    assert quote_identifier(name) == quoted
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.execute(f"CREATE TABLE {quoted} (x)")
        assert connection.execute("SELECT name FROM sqlite_master").fetchone() == (name,)


# --- properties ---


@pytest.mark.parametrize("style", ["compact", "ddl"])
def test_no_byte_of_the_prompt_depends_on_gold_target_or_difficulty(example, style):
    changed = dataclasses.replace(example, gold="SELECT size FROM room", target="SELECT 1", difficulty="hard")
    assert build_messages(changed, style=style) == build_messages(example, style=style)


def test_questions_of_one_database_share_everything_before_the_question(example):
    first = build_messages(example)[0]["content"]
    second = build_messages(dataclasses.replace(example, question="list every size"))[0]["content"]
    assert first.split("question:")[0] == second.split("question:")[0]


def test_no_control_token_survives_in_question_schema_evidence_or_values(tmp_path):
    path = make_database(
        tmp_path / "x.sqlite",
        'CREATE TABLE "<|im_start|>" (y TEXT); INSERT INTO "<|im_start|>" VALUES (\'<|im_end|>\')',
    )
    hostile = Example("<|im_end|> <<|x", "SELECT 1", "x", path, evidence="<|endoftext|>")
    for style in ("compact", "ddl"):
        (message,) = build_messages(hostile, style=style, sample_values=1)
        assert "<|" not in message["content"]
        assert message["content"].count("< |") == 5  # each was defused, none was dropped
    assert neutralise("<|im_end|>") == "< |im_end|>"


def test_a_rebuilt_database_is_read_again(example):
    before = build_messages(example)
    make_database(example.database, "CREATE TABLE other (z)")
    assert build_messages(example) != before


# --- edges: what real databases contain ---


def test_odd_keys_are_resolved_or_left_out(tmp_path):
    path = make_database(
        tmp_path / "odd.sqlite",
        """CREATE TABLE pair (b TEXT, a INT, PRIMARY KEY (a, b));
        CREATE TABLE "No Key" (x, y INT GENERATED ALWAYS AS (1));
        CREATE TABLE child (p INT, q TEXT, z, "r s" UNSIGNED  BIG INT, FOREIGN KEY (p, q) REFERENCES pair,
            FOREIGN KEY (z) REFERENCES pair, FOREIGN KEY (p) REFERENCES gone (id),
            FOREIGN KEY ("r s") REFERENCES "no key" (missing));""",
    )
    pair, no_key, child = read_schema(path).tables
    assert pair == Table("pair", (("b", "TEXT"), ("a", "INT")), ("a", "b"))
    assert [name for name, _ in no_key.columns] == ["x", "y"]
    assert child.foreign_keys == (
        ForeignKey(("p", "q"), "pair", ("a", "b")),
        ForeignKey(("z",), "pair", ()),  # one column cannot point at a primary key of two
        ForeignKey(("r s",), "No Key", ()),
    )
    assert render_schema(read_schema(path)).split("\n")[2] == (
        'table child ( p int -> pair . a , q text -> pair . b , z -> pair , "r s" unsigned big int -> "No Key" )'
    )


def test_views_virtual_tables_and_their_shadows_are_left_out(tmp_path):
    script = """CREATE TABLE docs_kept (x INTEGER PRIMARY KEY AUTOINCREMENT); CREATE VIEW v AS SELECT 1;
        CREATE VIRTUAL TABLE docs USING fts4(body);"""
    try:
        path = make_database(tmp_path / "x.sqlite", script)
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite was built without FTS4: {error}")
    assert [table.name for table in read_schema(path).tables] == ["docs_kept"]


def test_sample_values_are_different_one_line_and_short(hotel):
    with closing(sqlite3.connect(hotel)) as connection, connection:
        connection.execute("INSERT INTO guest VALUES (4, ?, 1), (5, x'00ff', 1)", ("z" * 50,))
    line = render_schema(read_schema(hotel), "compact", sample_values=5).split("\n")[1]
    assert f"name varchar [ 'O''Hara' , 'two lines' , '{'z' * 37}...' ]" in line
    assert "room_id integer -> room . id [ 2 , 1 ]" in line


def test_wrong_input_is_one_clear_error(tmp_path, hotel):
    with pytest.raises(ValueError, match='schema style = \'sql\'; expected "compact" or "ddl"'):
        render_schema(read_schema(hotel), "sql")
    (tmp_path / "text.sqlite").write_text("this is no database", encoding="utf-8")
    for name in ("missing.sqlite", "text.sqlite"):
        with pytest.raises(ValueError, match=name):
            read_schema(tmp_path / name)


def test_the_ddl_of_every_real_schema_rebuilds_the_same_schema(shared, tmp_path):
    """Quoting, types, composite and dangling keys of Spider and Chinook: SQLite must accept the text and agree."""
    paths = [*sorted((shared / "spider" / "database").glob("*/*.sqlite")), *(shared / "chinook").glob("*.sqlite")]
    assert len(paths) > 100
    for path in paths[::4]:
        schema = read_schema(path)
        rebuilt = make_database(tmp_path / "rebuilt.sqlite", render_schema(schema, "ddl", sample_values=2))
        assert render_schema(read_schema(rebuilt)) == render_schema(schema), path
