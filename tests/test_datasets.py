"""Datasets: every source becomes a list of `Example`; what cannot be scored is left out, counted and printed.

Run: pytest tests/test_datasets.py
"""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sqlenv import datasets, hygiene
from sqlenv.datasets import Example, load_examples, main, question_files, read_questions

GOLD = "SELECT price FROM item"


def make_database(path: Path, script: str = "CREATE TABLE item (price INT); INSERT INTO item VALUES (5), (7)") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return path


def write_questions(file: Path, rows: list) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.suffix == ".jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) if lines else json.dumps(rows), encoding="utf-8")
    return file


def own(folder: Path, *rows: dict, name: str = "test.jsonl") -> Path:
    """A question file whose rows ask about shop.sqlite beside it, unless they say otherwise."""
    return write_questions(
        folder / name, [{"question": "How?", "gold": GOLD, "db": "shop.sqlite"} | row for row in rows]
    )


@pytest.fixture(autouse=True)
def _a_new_process():
    datasets._usable.cache_clear()


# Loaders


LAYOUTS = {  # a source's training and test file, the folder of its databases beside each, and how its rows say it
    "Spider": ("train_spider.json", "dev.json", "database", {"question": "q", "query": GOLD, "sql": {"select": []}}),
    "BIRD, flat": (
        "train.json",
        "dev.json",
        "{}_databases",
        {"question": "q", "SQL": GOLD, "evidence": "price = cost", "difficulty": "simple"},
    ),
    "BIRD, as it is unpacked": (
        "train/train.json",
        "dev/dev.json",
        "{}_databases",
        {"question": "q", "SQL": GOLD, "evidence": "price = cost"},
    ),
    "SynSQL": (
        "data.json",
        None,
        "databases",
        {"question": "q", "sql": GOLD, "external_knowledge": "", "sql_complexity": "Simple", "cot": "..."},
    ),
    "your own": ("train.jsonl", "test.jsonl", "databases", {"question": "q", "gold": GOLD, "evidence": None}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_becomes_examples(tmp_path, layout):
    """Two training databases, of which the hash of its name puts college_1 into val, and one test database."""
    train, test, databases, row = LAYOUTS[layout]
    for file, ids in ((train, ("shop", "college_1")), (test, ("hall",))):
        if file:
            write_questions(tmp_path / file, [row | {"db_id": db_id} for db_id in ids])
            for db_id in ids:
                folder = (tmp_path / file).parent / databases.format((tmp_path / file).stem) / db_id
                path = make_database(folder / f"{db_id}.sqlite")
                description = folder / "database_description" / "item.csv"  # as in BIRD; nobody reads it
                description.parent.mkdir()
                description.write_bytes(b"caf\xe9\xff")
    (example,) = load_examples(tmp_path, "train")
    assert load_examples(tmp_path, "sft") == [example]
    assert (example.question, example.gold, example.db_id, example.row) == ("q", GOLD, "shop", 0)
    assert example.database.name == "shop.sqlite"
    assert example.evidence == (row.get("evidence") or "")
    assert example.difficulty == (row.get("difficulty") or row.get("sql_complexity") or "")
    (val,) = load_examples(tmp_path, "val")
    assert (val.db_id, val.row) == ("college_1", 1)
    if test:
        (example,) = load_examples(tmp_path, "test")
        assert (example.db_id, example.database) == ("hall", path)
    else:
        with pytest.raises(ValueError, match=r"has no test questions; expected a folder with test\.jsonl or dev\.json"):
            load_examples(tmp_path, "test")


def test_a_bird_split_is_never_answered_by_the_other_splits_databases(tmp_path):
    for split in ("train", "dev"):
        path = make_database(tmp_path / f"{split}_databases" / "shop" / "shop.sqlite")
        file = write_questions(tmp_path / f"{split}.json", [{"question": "q", "SQL": GOLD, "db_id": "shop"}])
        assert read_questions(file)[0].database == path


@pytest.mark.parametrize("place", ["database/a/a.sqlite", "databases/a/a.sqlite", "dev_databases/a/a.db", "a/a.sqlite"])
@pytest.mark.parametrize("name", ["spider-dk.json", "kaggle_test.jsonl"])
def test_a_single_file_finds_its_databases_and_is_a_test_set(tmp_path, place, name):
    path = make_database(tmp_path / place)
    file = write_questions(tmp_path / name, [{"db_id": "a", "question": " q ", "query": GOLD, "hardness": "easy"}])
    assert load_examples(file, "test") == [Example("q", GOLD, "a", path, difficulty="easy")]
    for split in ("train", "val", "sft"):
        with pytest.raises(ValueError, match=rf"{name} has no {split} questions.*train.jsonl, test.jsonl, perhaps val"):
            load_examples(str(file), split)


def test_a_row_may_name_its_database_file(tmp_path):
    """Relative to the question file, whatever the current directory, or absolute; a byte order mark is no text."""
    path, far = make_database(tmp_path / "shop.sqlite"), make_database(tmp_path / "far" / "b.db")
    file = own(tmp_path, {}, {"db": str(far)}, {"db_id": "Shop", "evidence": "e"})
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n\r\n"))
    expected = [("shop", path, "", 0), ("b", far, "", 1), ("Shop", path, "e", 2)]
    assert [(e.db_id, e.database, e.evidence, e.row) for e in load_examples(file, "test")] == expected


def test_a_validation_file_of_its_own_replaces_the_cut(tmp_path):
    """What the hash would put into val stays, and in val golds without rows do no harm: it trains nobody."""
    make_database(tmp_path / "college_1.sqlite")
    empty = {"db": "college_1.sqlite", "gold": f"{GOLD} WHERE price = 0"}
    for name in ("train.jsonl", "val.jsonl"):
        own(tmp_path, {"db": "college_1.sqlite"}, empty, name=name)
    assert [e.row for e in load_examples(tmp_path, "train")] == [0]
    assert [e.row for e in load_examples(tmp_path, "val")] == [0, 1]
    (tmp_path / "val.jsonl").unlink()
    make_database(tmp_path / "shop.sqlite")
    own(tmp_path, {}, name="train.jsonl")
    with pytest.raises(ValueError, match=r"no usable question for val .*one in ten, by its name, is val without a val"):
        load_examples(tmp_path, "val")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"question": "q"', r"test.jsonl: Expecting.*; expected a JSON list of questions, or .jsonl"),
        ("\udcff", "test.jsonl: 'utf-8' codec can't decode"),
        ('[{"question": "q"}]', r"test.jsonl, row 0 = \[\{'question': 'q'\}\]; expected an object"),
        ('{"gold": "SELECT 1", "db": "a"}', "row 0: question = None; expected text, as in"),
        (
            '{"question": "q", "gold": "SELECT 1", "db": "a"}\n{"question": "q", "db": "a"}',
            "row 1: gold or query or SQL",
        ),
        ('{"question": "q", "sql": {"select": 1}, "db": "a"}', "gold or query or SQL or sql = {'select': 1}; expected"),
        ('{"question": 7, "gold": "SELECT 1", "db": "a"}', "row 0: question = 7; expected text"),
        ('{"question": "q", "gold": "SELECT 1"}', 'row 0: db = None; expected text, as in .*"db": "shop.sqlite"'),
        ('{"question": "q", "gold": "SELECT 1", "db_id": 3}', "row 0: db_id = 3; expected text"),
        ('{"question": "q", "gold": "SELECT 1", "db": "a", "evidence": ["e"]}', r"evidence or .* = \['e'\]; expected"),
        ("", "no usable question for test"),
    ],
)
def test_a_malformed_row_is_one_clear_error(tmp_path, text, message):
    (tmp_path / "test.jsonl").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        load_examples(tmp_path, "test")


def test_wrong_sources_are_one_clear_error(tmp_path):
    with pytest.raises(
        ValueError, match="nowhere: no questions there; expected a question file, or a folder with train"
    ):
        load_examples(tmp_path / "nowhere", "train")
    with pytest.raises(ValueError, match="split = 'dev'; expected \"sft\""):
        load_examples(tmp_path, "dev")
    (tmp_path / "dev.json").write_text('{"question": "q"}')
    with pytest.raises(ValueError, match=r"it holds {.*expected a JSON list"):
        load_examples(tmp_path, "test")


def test_a_single_file_is_a_test_set(tmp_path):
    file = own(tmp_path, {}, name="a.jsonl")
    assert question_files(str(file)) == {"test": file}


def test_the_front_makes_synthetic_splits(tmp_path):
    sizes = {"num_databases": 2, "questions_per_database": 3, "seed": 0}
    examples = load_examples("synthetic", "test", folder=tmp_path, **sizes)
    assert len(examples) == 6
    assert examples == load_examples("synthetic", "test", folder=tmp_path, **sizes)


# Hygiene


def truncated(path: Path) -> None:
    rows = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 999) SELECT hex(zeroblob(40)) FROM n"
    )
    make_database(path, f"CREATE TABLE item AS {rows}")
    os.truncate(path, path.stat().st_size // 2)


def beside(suffix: str, content: bytes = b"x"):
    return lambda path: Path(f"{make_database(path)}{suffix}").write_bytes(content)


FAULTS = {  # what is wrong with a database: how to make it so
    "database missing": [lambda path: None],
    "database empty": [Path.touch, lambda path: make_database(path, "CREATE TABLE t(a); DROP TABLE t")],
    "database is a Git LFS pointer": [
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid 1")
    ],
    "database not SQLite or corrupt": [Path.mkdir, lambda path: path.write_bytes(b"<html>"), truncated],
    "database has a live -wal or -journal": [beside("-wal"), beside("-journal")],
    "": [
        beside("-wal", b""),
        beside("-journal", b""),
        lambda p: make_database(p, "PRAGMA journal_mode=WAL; CREATE TABLE a(b)"),
    ],
}


@pytest.mark.parametrize(("fault", "make"), [(fault, make) for fault, makers in FAULTS.items() for make in makers])
def test_every_fault_of_a_database_is_named(tmp_path, fault, make):
    path = tmp_path / "a b?#.sqlite"
    make(path)
    files = sorted(tmp_path.iterdir())
    assert hygiene.database_fault(path) == fault
    assert sorted(tmp_path.iterdir()) == files  # looking leaves nothing behind


def test_a_database_that_someone_is_writing_is_locked(tmp_path):
    """An immutable connection ignores locks, so it could see half of a change."""
    path = make_database(tmp_path / "shop.sqlite")
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        assert hygiene.database_fault(path) == "database locked"
        writer.rollback()
        assert hygiene.database_fault(path) == ""


MIXED = [
    {"question": " What does it cost? "},
    {"question": "What is free?", "gold": "SELECT price FROM item WHERE price = 0"},
    {"question": "What fails?", "gold": "SELECT nothing FROM item"},
    {"question": "What is done?", "gold": "DROP TABLE item"},
    {"question": "what  does it COST?"},
    {"question": "What does it cost?", "gold": "SELECT price FROM item "},  # another gold
    {"question": "What is first?", "gold": "SELECT price FROM item LIMIT 1"},
    {"question": "What is in it?", "db": "hollow.sqlite"},
    {"question": "Where is it?", "db": "gone.sqlite"},
    {"question": "What is free?", "gold": "SELECT price FROM item WHERE price = 0"},
    {"question": "How much is it?"},  # another question
]
REPORT = """\
test.jsonl: 7 of 11 questions kept
     1 left out: database empty
     1 left out: database missing
     2 kept: duplicate
     1 left out: gold fails (rejected)
     1 left out: gold fails (sql_error)
     2 kept: gold without rows
     1 kept: undetermined, rows depend on the scan order
"""


@pytest.fixture
def mixed(tmp_path):
    """A folder of your own with golds and databases of every fate; college_1 is val's by its name."""
    make_database(tmp_path / "shop.sqlite")
    make_database(tmp_path / "college_1.sqlite")
    (tmp_path / "hollow.sqlite").touch()
    own(tmp_path, *MIXED)
    own(tmp_path, *MIXED, {"db": "college_1.sqlite"}, name="train.jsonl")
    return tmp_path


def test_what_cannot_be_scored_is_left_out_and_counted(mixed, capsys):
    for _ in range(2):
        examples = load_examples(mixed, "test")
        assert [e.row for e in examples] == [0, 1, 4, 5, 6, 9, 10]
        examples.clear()  # the caller's own list
    assert capsys.readouterr().out == REPORT


def test_golds_without_rows_never_train_and_a_file_is_reported_once(mixed, capsys):
    """Any query that returns nothing would be rewarded. train and val are cut from one file: it is checked once."""
    assert [e.row for e in load_examples(mixed, "train")] == [0, 4, 5, 6, 10]
    assert [e.row for e in load_examples(mixed, "val")] == [11]
    out = capsys.readouterr().out
    assert out.count("train.jsonl: 6 of 12 questions kept") == 1
    assert "     2 left out: gold without rows\n" in out
    assert "     1 kept: duplicate\n" in out  # the other one is left out as it is


def test_no_usable_question_is_an_error(mixed):
    (mixed / "shop.sqlite").write_bytes(b"")
    with pytest.raises(ValueError, match=r"test\.jsonl has no usable question for test .are the databases beside it"):
        load_examples(mixed, "test")


def test_check_prints_examples_and_what_the_sets_share(mixed, capsys):
    assert main(["--check", str(mixed)]) == 0
    out = capsys.readouterr().out
    assert "train.jsonl: 6 of 12" in out
    assert "     1 left out: gold fails (sql_error)\n        question 3, shop: SELECT nothing FROM item\n" in out
    assert out.endswith(
        "train: 5 usable questions on 1 databases\ntest: 7 usable questions on 1 databases\n"
        "val: 1 usable questions on 1 databases\ndatabases of train or val that are in test too: shop\n"
    )


def test_checks_exit_code_says_whether_every_set_can_be_used(mixed, capsys):
    assert main(["--check", str(mixed / "test.jsonl")]) == 0
    (mixed / "val.jsonl").write_text((mixed / "test.jsonl").read_text().replace("shop", "gone"))
    assert main(["--check", str(mixed)]) == 1
    assert "val: 0 usable questions" in capsys.readouterr().out
    (mixed / "val.jsonl").write_text("[]")
    assert main(["--check", str(mixed)]) == 2
    assert capsys.readouterr().err == f"error: {mixed / 'val.jsonl'}, row 0 = []; expected an object\n"


def test_check_runs_as_a_command_and_a_bad_path_is_one_line(tmp_path):
    command = [sys.executable, "-m", "sqlenv.datasets", "--check", str(tmp_path / "nowhere")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "nowhere: no questions there" in done.stderr


# The cache


def fails(*_):
    raise AssertionError("a gold was run")


def test_golds_are_run_once_for_the_same_bytes(mixed, tmp_path, monkeypatch, capsys):
    cache = tmp_path / "cache"
    first = load_examples(mixed, "test", cache=cache)
    (stored,) = cache.iterdir()
    datasets._usable.cache_clear()
    monkeypatch.setattr(hygiene, "run_gold", fails)
    assert load_examples(mixed, "test", cache=cache) == first
    assert capsys.readouterr().out == REPORT * 2
    for path in mixed.rglob("*"):  # time stamps do not matter, nor does the place
        os.utime(path, (0, 0))
    moved = mixed.rename(mixed.with_name("moved"))
    assert [e.row for e in load_examples(moved, "test", cache=moved / "cache")] == [e.row for e in first]
    assert (moved / "cache" / stored.name).is_file()


CHANGES = {
    "a database": lambda folder: make_database(folder / "shop.sqlite", "INSERT INTO item VALUES (0)"),
    "a fault": lambda folder: make_database(folder / "gone.sqlite"),
    "the questions": lambda folder: own(folder, *MIXED[1:]),
    "the rules": lambda folder: None,
    "SQLite": lambda folder: None,
}


@pytest.mark.parametrize("change", CHANGES)
def test_golds_are_run_again_when_anything_they_depend_on_changes(mixed, change, monkeypatch):
    load_examples(mixed, "test", cache=mixed)
    datasets._usable.cache_clear()
    CHANGES[change](mixed)
    if change in ("the rules", "SQLite"):
        monkeypatch.setattr(*((hygiene, "RULES", 0) if change == "the rules" else (sqlite3, "sqlite_version", "9")))
    monkeypatch.setattr(hygiene, "run_gold", fails)
    with pytest.raises(AssertionError, match="a gold was run"):
        load_examples(mixed, "test", cache=mixed)


@pytest.mark.parametrize("damage", ["", "{", "[]", "7", '{"duplicate": 3}', '{"duplicate": ["x"]}'])
def test_a_damaged_cache_file_is_ignored_and_rewritten(mixed, damage, tmp_path):
    cache = tmp_path / "cache"
    first = load_examples(mixed, "test", cache=cache)
    (stored,) = cache.iterdir()
    whole = stored.read_bytes()
    stored.write_text(damage)
    datasets._usable.cache_clear()
    assert load_examples(mixed, "test", cache=cache) == first
    assert stored.read_bytes() == whole
    assert list(cache.iterdir()) == [stored]


def test_a_huge_database_is_known_by_its_size_its_time_stamp_and_its_start(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(100_000))
    whole, start = hygiene._digest(path), hygiene._digest(path, 99_999)
    stat = path.stat()
    with path.open("r+b") as file:
        file.seek(90_000)
        file.write(b"x")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert hygiene._digest(path) == hygiene._digest(path, 100_000) != whole
    assert hygiene._digest(path, 99_999) == start
    os.utime(path, (0, 0))
    assert hygiene._digest(path, 99_999) != start


# Spider, where it is


def test_spider_splits_never_share_a_database(shared, monkeypatch, capsys):
    """val is a tenth of the training databases. Golds are not run here: only the split is looked at."""

    def only_missing(examples: list[Example], faults: dict[Path, str], _) -> dict[str, list[int]]:
        return {"database missing": [e.row for e in examples if faults[e.database]]}

    monkeypatch.setattr(hygiene, "_check_golds", only_missing)
    sets = {split: load_examples(shared / "spider", split) for split in ("train", "val", "test")}
    ids = {split: {e.db_id for e in examples} for split, examples in sets.items()}
    assert not ids["train"] & ids["val"]
    assert not ids["test"] & (ids["train"] | ids["val"])
    assert len(sets["train"]) + len(sets["val"]) == 6_904
    assert len(sets["test"]) == 972
    assert len(ids["val"]) == 17
    assert min(ids["val"]) == "college_1"  # on every machine, in every process
    assert "dev.json: 972 of 1034 questions kept\n    62 left out: database missing\n" in capsys.readouterr().out


def test_spiders_dev_golds_run(shared, capsys):
    """Of 972, one in twenty returns what SQLite chose among ties. The counts may depend on SQLite's version."""
    examples = load_examples(shared / "spider", "test")
    assert examples[0].gold == "SELECT count(*) FROM singer"
    assert capsys.readouterr().out == (
        "dev.json: 972 of 1034 questions kept\n    62 left out: database missing\n    49 kept: gold without rows\n"
        "    46 kept: undetermined, a tie is cut by LIMIT\n    14 kept: undetermined, the order of ties is free\n"
    )
