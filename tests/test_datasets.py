"""Datasets: every source becomes a list of `Example`; what cannot be scored is left out, counted and printed.

Run: pytest tests/test_datasets.py
"""

import json
import sqlite3
from contextlib import closing

import pytest

from sqlenv.datasets import Example, load_examples, load_spider


@pytest.fixture
def spider(tmp_path):
    """A folder in Spider's layout: one good database, one empty file, one missing, golds of every fate."""
    for name in ("shop", "hollow"):
        (tmp_path / "database" / name).mkdir(parents=True)
    (tmp_path / "database" / "hollow" / "hollow.sqlite").touch()
    with closing(sqlite3.connect(tmp_path / "database" / "shop" / "shop.sqlite")) as connection:
        connection.executescript("CREATE TABLE item (price INT); INSERT INTO item VALUES (5)")
    questions = [
        ("shop", " What does it cost? ", "SELECT price FROM item"),
        ("shop", "What is free?", "SELECT price FROM item WHERE price = 0"),
        ("shop", "What fails?", "SELECT nothing FROM item"),
        ("hollow", "What is in it?", "SELECT 1"),
        ("gone", "Where is it?", "SELECT 1"),
    ]
    table = json.dumps([{"db_id": d, "question": q, "query": sql} for d, q, sql in questions])
    for name in ("train_spider.json", "dev.json"):
        (tmp_path / name).write_text(table, encoding="utf-8")
    return tmp_path


def test_training_questions_without_a_usable_gold_are_left_out_and_counted(spider, capsys):
    database = spider / "database" / "shop" / "shop.sqlite"
    assert load_spider(spider, "train") == [Example("What does it cost?", "SELECT price FROM item", "shop", database)]
    assert capsys.readouterr().out == (
        "train_spider.json: 1 questions kept; "
        "left out: 1 database empty, 1 database missing, 1 gold fails, 1 gold without rows\n"
    )


def test_dev_questions_keep_empty_golds(spider, capsys):
    assert [e.question for e in load_spider(spider, "dev")] == ["What does it cost?", "What is free?"]
    assert "2 questions kept; left out: 1 database empty, 1 database missing, 1 gold fails\n" in capsys.readouterr().out


def test_wrong_folders_are_one_clear_error(tmp_path, spider):
    with pytest.raises(ValueError, match="expected a Spider folder"):
        load_spider(tmp_path / "nowhere", "train")
    with pytest.raises(ValueError, match="split = 'dev'; expected \"sft\""):
        load_examples(spider, "dev")
    (spider / "database" / "shop" / "shop.sqlite").unlink()
    with pytest.raises(ValueError, match="no usable question"):
        load_spider(spider, "dev")


def test_the_front_makes_synthetic_splits(tmp_path):
    sizes = {"num_databases": 2, "questions_per_database": 3, "seed": 0}
    examples = load_examples("synthetic", "test", folder=tmp_path, **sizes)
    assert len(examples) == 6
    assert examples == load_examples("synthetic", "test", folder=tmp_path, **sizes)


def test_spider_splits_never_share_a_database(shared, monkeypatch, capsys):
    """val is a tenth of the training databases. Golds are not run here: only the split is looked at."""
    monkeypatch.setattr("sqlenv.datasets._why_not", lambda database, *_, **__: "" if database.is_file() else "missing")
    sets = {split: load_examples(shared / "spider", split) for split in ("train", "val", "test")}
    ids = {split: {e.db_id for e in examples} for split, examples in sets.items()}
    assert not ids["train"] & ids["val"]
    assert not ids["test"] & (ids["train"] | ids["val"])
    assert len(sets["train"]) + len(sets["val"]) == 6_904
    assert len(sets["test"]) == 972
    assert len(ids["val"]) == 17
    assert min(ids["val"]) == "college_1"  # on every machine, in every process
    assert "dev.json: 972 questions kept; left out: 62 missing" in capsys.readouterr().out


def test_spiders_dev_golds_run(shared, capsys):
    examples = load_spider(shared / "spider", "dev")
    assert len(examples) == 972
    assert examples[0].gold == "SELECT count(*) FROM singer"
    assert "left out: 62 database missing" in capsys.readouterr().out
