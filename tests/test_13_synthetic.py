"""Step 13: the embedded task, small databases with questions whose answers are known, on words never seen in training.

You build: sqlenv/synthetic.py (`make_split`, `compact`, `check_name_pools`, `make_name`); words.json is given.
Rules: {sft, train}, val and test share no name but `id`; golds return rows; a sloppy target executes and is wrong.
Run: pytest tests/test_13_synthetic.py
Needed by: 21 (SFT), 23 (the whole run).
"""

import hashlib
import os
import random
import re
import sqlite3
import subprocess
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from sqlenv import synthetic
from sqlenv.prompt import build_messages
from sqlenv.schema import KEYWORDS, read_schema
from sqlenv.synthetic import check_name_pools, compact, make_split

SIZES = {"num_databases": 60, "questions_per_database": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("synthetic")


@pytest.fixture(scope="module")
def splits(folder) -> dict:
    return {
        s: make_split(folder, s, **SIZES, seed=3, sloppy=float(s == "sft")) for s in ("sft", "train", "val", "test")
    }


def rows(example, sql: str) -> list[tuple]:
    with closing(sqlite3.connect(example.database)) as connection:
        return connection.execute(sql).fetchall()


def names(examples) -> set[str]:
    tables = [table for path in {e.database for e in examples} for table in read_schema(path).tables]
    return {table.name for table in tables} | {name for table in tables for name, _ in table.columns}


# --- by hand ---


@pytest.mark.parametrize(
    ("spaced", "expected"),
    [
        ("SELECT AVG ( age ) FROM guest WHERE city = 'Oslo'", "select avg(age) from guest where city='Oslo'"),
        ("SELECT name , age FROM guest WHERE age >= 56", "select name, age from guest where age>=56"),
        (
            "SELECT guest . id FROM guest ORDER BY age DESC LIMIT 1",
            "select guest.id from guest order by age desc limit 1",
        ),
        ("SELECT a FROM t WHERE n > ( SELECT AVG ( n ) FROM t )", "select a from t where n>(select avg(n) from t)"),
    ],
)
def test_golds_are_written_compactly_as_people_do(spaced, expected):
    assert compact(spaced) == expected


def test_every_family_has_a_good_and_a_wrong_query_and_paraphrases():
    assert len(synthetic.FAMILIES) >= 13
    for paraphrases, good, wrong in synthetic.FAMILIES.values():
        assert 2 <= len(paraphrases) <= 3
        assert good != wrong
    silent = [family for family, (texts, *_) in synthetic.FAMILIES.items() if any("{t}" not in text for text in texts)]
    assert len(silent) >= 10  # the table is not named: the schema must be read


# --- words ---


def test_no_name_but_id_is_shared_between_training_val_and_test(splits):
    check_name_pools()
    found = [names(splits["sft"] + splits["train"]), names(splits["val"]), names(splits["test"])]
    for i in range(3):
        assert len(found[i]) > 50
        assert found[i] & found[i - 1] == {"id"}
        assert not found[i] & KEYWORDS
    assert sum(len(pool["table"]) for pool in synthetic.NAMES.values()) >= 60
    assert sum(len(pool["number"]) + len(pool["text"]) for pool in synthetic.NAMES.values()) >= 100


@pytest.mark.parametrize("bad", ["guest", "guest_id", "order", "every"])
def test_overlapping_or_reserved_names_are_refused(monkeypatch, tmp_path, bad):
    monkeypatch.setitem(synthetic.NAMES["val"], "text", [*synthetic.NAMES["val"]["text"], bad])
    with pytest.raises(ValueError, match=f"name '{bad}' of pool 'val' is also"):
        check_name_pools()
    with pytest.raises(ValueError, match=bad):  # asserted before anything is made
        make_split(tmp_path, "sft", **SIZES, seed=3)


def test_train_names_are_mostly_pseudo_words_that_are_never_held_out_or_reserved():
    rng = random.Random(0)
    drawn = [synthetic.make_name(rng, "train", "table", set()) for _ in range(20_000)]
    real = sum(name in synthetic.NAMES["train"]["table"] for name in drawn) / len(drawn)
    assert 0.08 < real < 0.13  # one in ten, and splices that come out as a word of the pool
    held_out = {word for pool in ("val", "test") for kind in synthetic.NAMES[pool].values() for word in kind}
    assert not set(drawn) & (held_out | synthetic.RESERVED)


# --- golds and targets ---


def test_every_gold_returns_rows_and_every_family_occurs(splits):
    for examples in splits.values():
        assert len(examples) == 480 == sum(len(e.question.split()) <= 15 for e in examples)
        assert len({(e.db_id, e.question) for e in examples}) == 480
        assert {e.difficulty for e in examples} == set(synthetic.FAMILIES)
        assert all(rows(e, e.gold) for e in examples)
        assert all(e.database.stem == e.db_id for e in examples)


def test_clean_targets_give_the_golds_rows_but_never_its_string(splits):
    for example in splits["train"] + splits["val"]:
        assert rows(example, example.target) == rows(example, example.gold)
        assert example.target != example.gold
        assert compact(example.target) == example.gold


def test_every_sloppy_target_executes_and_returns_other_rows(splits):
    """With `sloppy=1` all targets are wrong; the 0.3 % of questions where one matches by luck are drawn again."""
    families = Counter(example.difficulty for example in splits["sft"])
    assert set(families) == set(synthetic.FAMILIES)
    for example in splits["sft"]:
        wrong, right = rows(example, example.target), rows(example, example.gold)
        if example.difficulty != "sort":
            wrong, right = sorted(wrong), sorted(right)
        assert wrong != right, example


def test_sloppiness_changes_targets_only_and_as_often_as_asked(tmp_path, splits):
    half = make_split(tmp_path, "sft", **SIZES, seed=3, sloppy=0.5)
    for a, b in zip(half, splits["sft"], strict=True):
        assert (a.question, a.gold, a.db_id) == (b.question, b.gold, b.db_id)
        assert a.database.read_bytes() == b.database.read_bytes()
    assert 0.43 < sum(a.target == b.target for a, b in zip(half, splits["sft"], strict=True)) / len(half) < 0.57


def test_a_copied_word_is_written_in_the_target_as_in_the_prompt(splits):
    """Each name or text value of a target stands between blanks in the prompt too (the same BPE pieces), and a question
    is made of reserved words, names of the schema as they are there, numbers and quoted values only."""
    for example in splits["val"]:
        prompt = build_messages(example)[0]["content"]
        schema, question = prompt.rsplit("\nquestion:", 1)
        for word in re.findall(r" ('\w+'|[a-z]\w*)", example.target):
            assert f" {word} " in f"{prompt} ", example
        for word in question.split():
            assert word in synthetic.RESERVED or word.isdigit() or word[0] == "'" or f" {word} " in schema, example


def test_numbers_differ_within_a_column_so_that_no_gold_has_ties(splits):
    for example in splits["test"][::8]:
        for table in read_schema(example.database).tables:
            for column, declared in table.columns:
                kind = declared.upper()  # older versions of SQLite report the type as it was typed
                values = rows(example, f"SELECT {column} FROM {table.name}")
                assert 6 <= len(values) <= 12
                if kind == "INTEGER" and not column.endswith("_id"):
                    assert len(set(values)) == len(values)
                if kind == "TEXT":
                    assert len(set(values)) < len(values)


# --- the same arguments, the same files ---


def digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_seed_alone_decides_every_byte(tmp_path, splits, folder):
    script = "import sys; from sqlenv.synthetic import make_split\n" + (
        "make_split(sys.argv[1], 'val', num_databases=60, questions_per_database=8, seed=3)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "77", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, env=environment)
    assert digest(tmp_path / "val") == digest(folder / "val")
    other = make_split(tmp_path / "other", "val", **SIZES, seed=4)
    assert {e.question for e in other} != {e.question for e in splits["val"]}


def test_more_databases_do_not_change_the_first_ones(tmp_path, splits):
    few = make_split(tmp_path, "val", num_databases=2, questions_per_database=8, seed=3)
    assert [e.gold for e in few] == [e.gold for e in splits["val"][:16]]


def test_no_question_is_asked_twice_of_a_database(tmp_path):
    many = make_split(tmp_path, "val", num_databases=20, questions_per_database=20, seed=0)
    assert len({(e.db_id, e.question) for e in many}) == 400


def test_a_finished_split_is_kept_and_an_unfinished_or_other_one_is_rebuilt(tmp_path):
    arguments = {"num_databases": 3, "questions_per_database": 2, "seed": 0}
    first = make_split(tmp_path, "val", **arguments)
    manifest, times = tmp_path / "val" / "manifest.json", [e.database.stat().st_mtime_ns for e in first]
    assert make_split(tmp_path, "val", **arguments) == first
    assert [e.database.stat().st_mtime_ns for e in first] == times  # nothing was written
    for spoil in (manifest.unlink, lambda: manifest.write_text("{", encoding="utf-8"), first[0].database.unlink):
        spoil()
        assert make_split(tmp_path, "val", **arguments) == first
        assert rows(first[0], first[0].gold)
    other = make_split(tmp_path, "val", **(arguments | {"num_databases": 1}))
    assert other == first[:2]
    assert sorted(path.name for path in (tmp_path / "val").iterdir()) == ["manifest.json", "val_00000.sqlite"]


@pytest.mark.parametrize(
    "change", [{"split": "dev"}, {"num_databases": 0}, {"questions_per_database": 21}, {"sloppy": 1.5}]
)
def test_arguments_out_of_range_are_named_and_nothing_is_written(tmp_path, change):
    arguments = {"split": "val", "num_databases": 1, "questions_per_database": 1, "seed": 0, "sloppy": 0.0} | change
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}.*expected a split of"):
        make_split(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())
