"""From verdicts to figures: error classes, tables, the paired test, worker processes, predictions of every form.

Run: pytest tests/test_report.py
"""

import json
import math
import sqlite3
from contextlib import closing

import pytest

from sqlenv import score, score_sql
from sqlenv.compare import is_selection
from sqlenv.errors import error_class
from sqlenv.metrics import accuracy_by, mcnemar_exact, percentile, smallest_difference
from sqlenv.report import cost, describe, load_result, measure, paired, paired_lines
from sqlenv.workers import in_order


@pytest.fixture
def db(tmp_path):
    """t (a, b, c) = (1, x, 1.5), (2, x, 2.5), (3, y, 3.5), (3, y, 4.5) and u (a)."""
    path = tmp_path / "shop.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE t (a INTEGER, b TEXT, c REAL); CREATE TABLE u (a INTEGER);")
        connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, "x", 1.5), (2, "x", 2.5), (3, "y", 3.5)])
        connection.execute("INSERT INTO t VALUES (3, 'y', 4.5)")
        connection.commit()
    return path


@pytest.mark.parametrize(
    ("gold", "pred", "expected"),
    [
        ("SELECT a FROM t", "SELECT a FROM t ORDER BY a DESC", "correct"),
        ("SELECT z FROM t", "SELECT a FROM t", "gold fails"),
        ("SELECT a FROM t", "DROP TABLE t", "rejected"),
        (
            "SELECT a FROM t",
            "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i FROM r) SELECT sum(i) FROM r",
            "budget",
        ),
        (
            "SELECT a FROM t",
            "SELECT hex(x) FROM (SELECT group_concat(a) x FROM t) WHERE length(quote(x)) >",
            "syntax error",
        ),
        ("SELECT a FROM t", "SELECT d FROM t", "no such column"),
        ("SELECT a FROM t", "SELECT t.d FROM t", "no such column"),
        ("SELECT a FROM t", "SELECT a FROM v", "no such table"),
        ("SELECT a FROM t", "SELECT a FROM t JOIN u", "ambiguous column"),
        ("SELECT a FROM t", "SELECT a FROM t WHERE count(*) > 1", "misuse of aggregate"),
        ("SELECT a FROM t", "SELECT a FRM t", "syntax error"),
        ("SELECT a FROM t", "SELECT a FROM t WHERE (", "syntax error"),
        ("SELECT a FROM t", "SELECT nosuch(a) FROM t", "other error"),
        ("SELECT a FROM t ORDER BY a", "SELECT a FROM t ORDER BY a DESC", "order only"),
        ("SELECT a FROM t", "SELECT DISTINCT a FROM t", "duplicates only"),
        ("SELECT DISTINCT b FROM t", "SELECT b FROM t", "duplicates only"),
        ("SELECT a FROM t", "SELECT a, b FROM t", "columns only"),
        ("SELECT a, c FROM t", "SELECT c FROM t", "columns only"),
        ("SELECT a, c FROM t", "SELECT b, c, a FROM t", "columns only"),  # the wider in another order
        ("SELECT a FROM t", "SELECT a FROM t WHERE a < 3", "missing rows"),
        ("SELECT a FROM t", "SELECT a FROM t WHERE a > 99", "missing rows"),
        ("SELECT a FROM t WHERE a < 3", "SELECT a FROM t", "extra rows"),
        ("SELECT a FROM t WHERE a > 99", "SELECT a FROM t", "extra rows"),  # gold without rows
        ("SELECT a FROM t WHERE a < 3", "SELECT a FROM t WHERE a > 1", "other rows"),
        ("SELECT a FROM t", "SELECT a, count(*) FROM t", "other rows"),
    ],
)
def test_every_failure_has_a_class(db, gold, pred, expected):
    assert error_class(db, gold, score_sql(db, gold, pred)) == expected


def test_a_selection_needs_whole_rows_and_not_only_equal_columns():
    assert is_selection([("Oslo",)], [(1, "Oslo")])
    assert is_selection([(1, "a"), (2, "b")], [("a", 0, 1), ("b", 0, 2)])
    assert not is_selection([(1, "a"), (2, "b")], [("b", 0, 1), ("a", 0, 2)])  # each column is there, the rows are not
    assert not is_selection([(1, "Oslo")], [("Oslo",)])
    assert not is_selection([], [(1, 2)])


def answer(match: bool, db_id: str = "a", **others) -> dict:
    """One answered question."""
    outcome = {"outcome": "correct" if match else "other rows"}
    return {"db_id": db_id, "gold": "g", "match": match, "match_bird": match} | outcome | others


def test_measure_on_hand_counted_answers():
    answers = [
        answer(True, "a", difficulty="easy", hits=[True, True, False, False], vote_match=False),
        answer(False, "a", difficulty="hard", hits=[False] * 4, vote_match=False),
        answer(True, "b", difficulty="easy", hits=[True, True, True, False], vote_match=True),
        answer(False, "b", difficulty="hard", hits=[False, False, False, True], vote_match=True),
    ]
    result = measure(answers)
    assert (result["n"], result["databases"], result["execution_accuracy"]) == (4, 2, 0.5)
    assert (result["mean@4"], result["pass@4"], result["vote@4"]) == (6 / 16, 0.75, 0.5)
    assert result["outcomes"] == {"correct": 2, "other rows": 2}
    assert {k: (v["accuracy"], v["n"]) for k, v in result["by_difficulty"].items()} == {"easy": (1, 2), "hard": (0, 2)}
    assert {k: v["accuracy"] for k, v in result["by_database"].items()} == {"a": 0.5, "b": 0.5}
    assert result["correct"] == [1, 0, 1, 0]
    text = describe(result | cost(3600.0, [1.0, 2.0, 3.0, 10.0], 20, 0.5, num_tokens=7))
    assert "by difficulty\n    easy               1.000  [0.342, 1.000] n 2\n    hard               0.000  [0.0" in text
    assert "cost: 7 tokens decoded, 20 SQL executions, 3600.0 s, latency p50 2 s, p95 10 s, price 0.5000" in text
    assert "over databases" not in text  # two databases say nothing about databases


def test_the_bootstrap_draws_databases_where_there_are_five():
    def spread(per_database: int) -> float:
        result = measure([answer(i // per_database % 2 == 0, str(i // per_database)) for i in range(40)])
        assert ("over databases" in describe(result | cost(0.0, [], 0))) == (40 / per_database >= 5)
        return result["bootstrap_high"] - result["bootstrap_low"]

    assert spread(8) > 1.5 * spread(1)  # five databases, each all right or all wrong, are five observations
    assert spread(10) == pytest.approx(spread(1), abs=0.1)  # four are too few, so questions are drawn


def test_no_answers_are_no_error():
    assert measure([])["execution_accuracy_high"] == 1.0
    assert describe(measure([]) | cost(0.0, [], 0)).startswith("0 questions on 0 databases")


def test_the_paired_test_by_hand_and_what_the_questions_could_show():
    one = measure([answer(i == 0) for i in range(8)])
    more = measure([answer(i < 7) for i in range(8)])
    points, p, words = paired(one, more)
    assert (points, p) == (75.0, 2 / 2**6)
    assert words == "gained 6, lost 0 of 8 questions, exact McNemar p = 0.031"
    assert paired(one, one)[2].endswith("p = 1; the least that could show is 75.0 points")
    assert paired(measure([answer(True)]), measure([answer(False)]))[2].endswith("too few to show anything")
    with pytest.raises(ValueError, match=r"different questions \(8 and 7 questions\)"):
        paired(one, measure([answer(True)] * 7))
    with pytest.raises(ValueError, match="different questions"):
        paired(one, measure([answer(True, "other")] * 8))


def test_samples_and_votes_are_paired_like_greedy_answers():
    """Right samples of 2 on six questions: 0 -> 1 on all of them, +50 points; the vote was lost on each but one."""
    one, more = (
        measure([answer(True) | {"hits": [False, after], "vote_match": not after or i == 0} for i in range(6)])
        for after in (False, True)
    )
    assert (one["hits"], more["hits"], more["votes"]) == ([0] * 6, [1] * 6, [1, 0, 0, 0, 0, 0])
    words = "gained 6, lost 0 of 6 questions, exact sign test p = 0.031"
    assert paired(one, more, "hits") == (50.0, 2 / 2**6, words)
    assert paired(one, more, "votes")[0] == pytest.approx(-500 / 6)
    lines = paired_lines(one, more, "B against A")
    assert [line.split(" points")[0] for line in lines] == [
        "B against A: +0.0",
        "mean@2, B against A: +50.0",
        "vote@2, B against A: -83.3",
    ]
    assert len(paired_lines(one, measure([answer(True)] * 6), "x")) == 1  # greedy only


def test_the_smallest_difference_is_the_first_that_mcnemar_calls_real():
    assert smallest_difference(500, 20) == 10 / 500  # 15 to 5: p = 0.041; 14 to 6: 0.115
    assert smallest_difference(100, 0) == smallest_difference(100, 6) == 6 / 100
    assert smallest_difference(100, 7) == 7 / 100  # 6 to 1: p = 0.125


def test_percentiles_and_tables_by_label():
    assert [percentile([4, 1, 3, 2], share) for share in (0.0, 0.25, 0.5, 0.51, 0.95, 1.0)] == [1, 1, 2, 3, 4, 4]
    table = accuracy_by("aab", [True, False, True])
    assert {key: (value["n"], value["accuracy"]) for key, value in table.items()} == {"a": (2, 0.5), "b": (1, 1.0)}


def test_workers_give_the_same_results_in_the_same_order(db):
    preds = [f"SELECT a FROM t LIMIT {i}" for i in range(40)]
    jobs = ([db] * 40, ["SELECT a FROM t"] * 40, preds)
    assert list(in_order(pow, [2, 3], [5, 2])) == [32, 9]
    assert list(in_order(score_sql, *jobs, workers=2)) == list(in_order(score_sql, *jobs))


def test_a_database_of_your_own_needs_no_folder_of_databases(db, capsys):
    rows = [
        {"db": "shop.sqlite", "question": "all a", "gold": "SELECT a FROM t", "pred": "SELECT a FROM t"},
        {"db": str(db), "question": "x", "gold": "SELECT b FROM t", "pred": "SELECT b FROM nowhere"},
    ]
    file, out = db.with_name("mine.jsonl"), db.with_name("out.jsonl")
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert score.main([str(file), "--out", str(out), "--hourly-price", "3"]) == 0
    printed = capsys.readouterr().out
    assert "execution_accuracy   0.500" in printed
    assert "outcomes: correct 1, no such table 1" in printed
    assert "price 0.00" in printed
    verdicts = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [(v["db_id"], v["match"], v["db"]) for v in verdicts] == [
        ("shop", True, "shop.sqlite"),
        ("shop", False, str(db)),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.jsonl", '{"pred": "SELECT a FROM t"}\n{"pred": ["SELECT 1", "SELECT 2"]}\n'),
        ("p.jsonl", '"SELECT a FROM t"\n["SELECT 1", "SELECT 2"]\n'),
        ("p.json", '["SELECT a FROM t", "SELECT 1"]'),
        ("p.json", '{"0": "SELECT a FROM t\\t----- bird -----\\tshop", "1": "SELECT 1\\t----- bird -----\\tshop"}'),
        ("p.txt", "SELECT a FROM t\tshop\nSELECT 1\tshop\n"),
    ],
)
def test_predictions_in_the_order_of_a_question_file(db, capsys, name, text):
    golds = (
        {"question": "q", "gold": "SELECT a FROM t", "db": "shop.sqlite"},
        {"question": "r", "gold": "SELECT b FROM t"},
    )
    questions, file = db.with_name("test.jsonl"), db.with_name(name)
    questions.write_text("\n".join(json.dumps({"db": "shop.sqlite"} | gold) for gold in golds), encoding="utf-8")
    file.write_text(text, encoding="utf-8")
    assert score.main([str(file), "--data", str(questions)]) == 0
    assert "execution_accuracy   0.500" in capsys.readouterr().out
    file.write_text(text.split("\n")[0] if name != "p.json" else "[]", encoding="utf-8")
    assert score.main([str(file), "--data", str(questions)]) == 2
    assert "expected one for each of the 2 questions" in capsys.readouterr().err


def questions_and(db, name: str, text: str) -> list[str]:
    """Ten questions of which the third cannot be used; the arguments that score a predictions file with that text."""
    rows = [{"question": f"q{i}", "gold": f"SELECT a + {i} FROM t", "db": "shop.sqlite"} for i in range(10)]
    rows[2]["gold"] = "SELECT nothing FROM t"
    db.with_name("test.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    db.with_name(name).write_text(text, encoding="utf-8")
    return [str(db.with_name(name)), "--data", str(db.with_name("test.jsonl"))]


GOLDS = [f"SELECT a + {i} FROM t" for i in range(10)]


@pytest.mark.parametrize(
    ("name", "text", "accuracy"),
    [
        ("p.txt", "\n".join(GOLDS), "1.000"),
        ("p.txt", "\n".join(GOLDS[:2] + GOLDS[3:]) + "\n", "1.000"),  # only the usable ones
        ("p.txt", "\r\n".join(GOLDS), "1.000"),
        ("p.txt", "\n".join(["", *GOLDS[1:]]), "0.889"),  # an empty line is a failed query, not a missing one
        ("p.jsonl", "\ufeff" + "\n\n".join(map(json.dumps, GOLDS)), "1.000"),
        ("p.json", json.dumps({str(i): GOLDS[i] for i in (3, 1, 0, 2, 9, 8, 7, 6, 5, 4)}), "1.000"),
    ],
)
def test_predictions_stay_with_their_questions(db, capsys, name, text, accuracy):
    assert score.main(questions_and(db, name, text)) == 0
    assert f"execution_accuracy   {accuracy}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("p.txt", "\n".join([*GOLDS, "SELECT 1"]), "11 predictions; expected one for each of the 9 questions"),
        ("p.txt", "\n".join(GOLDS[:8]), "8 predictions"),
        (
            "p.json",
            json.dumps({str(i): "SELECT 1" for i in range(1, 11)}),
            "expected the numbers of the questions, from 0",
        ),
        (
            "p.jsonl",
            "\n".join(json.dumps({"pred": g, "question": "q0"}) for g in GOLDS),
            "question = 'q0'; expected 'q1'",
        ),
        ("p.jsonl", "\n".join(json.dumps({"pred": g, "db_id": "other"}) for g in GOLDS), "expected 'shop'"),
    ],
)
def test_predictions_of_other_questions_are_refused(db, capsys, name, text, words):
    assert score.main(questions_and(db, name, text)) == 2
    assert words in capsys.readouterr().err


def test_no_file_that_is_read_is_written_over(db, capsys):
    arguments = questions_and(db, "p.txt", "\n".join(GOLDS))
    verdicts, link = db.with_name("v.jsonl"), db.with_name("link.jsonl")
    assert score.main([*arguments, "--out", str(verdicts)]) == 0
    before = verdicts.read_bytes()
    link.hardlink_to(verdicts)
    for out in (verdicts, link, db, db.with_name("test.jsonl"), db.with_name("p.txt"), db.parent / "no" / "v.jsonl"):
        assert score.main([*arguments, "--compare", str(verdicts), "--out", str(out)]) == 2
        assert "--out" in capsys.readouterr().err
    assert verdicts.read_bytes() == before


def test_what_a_row_says_of_itself_does_not_count(db):
    row = {"db": "shop.sqlite", "gold": GOLDS[0], "pred": ["SELECT 1", "SELECT 1", GOLDS[0]], "vote_match": True}
    scored = score.score_row(row | {"error": "my note", "match": True}, db.parent)
    assert (scored["match"], scored["vote"], "error" in scored, "vote_match" in scored) == (False, 0, False, False)


def test_a_surrogate_in_a_name_is_shown_as_an_escape(db, capsys):
    file = db.with_name("p.jsonl")
    file.write_text(json.dumps({"db": "shop.sqlite", "db_id": "\ud800", "gold": GOLDS[0], "pred": GOLDS[0]}))
    assert score.main([str(file)]) == 0
    assert "\\ud800" in capsys.readouterr().out


def test_the_paired_test_of_ten_thousand_questions_is_quick_and_right():
    assert mcnemar_exact(480, 520) == pytest.approx(mcnemar_exact(520, 480))
    # Just above and below the switch to logarithms the normal approximation with its correction agrees.
    for b, c in ((470, 530), (480, 521), (2332, 2348), (5000, 5200)):
        z = (abs(b - c) - 1) / math.sqrt(b + c)
        assert mcnemar_exact(b, c) == pytest.approx(math.erfc(z / math.sqrt(2)), rel=2e-3)
    assert smallest_difference(10_000, 5_000) == 140 / 10_000  # 1.96 x sqrt(5,000) = 138.6, and the parity of 5,000


def test_two_files_are_compared_whatever_the_other_one_holds(db, capsys):
    rows = [{"db": "shop.sqlite", "gold": f"SELECT a + {i} FROM t", "pred": "SELECT 1"} for i in range(8)]
    right = [row | {"pred": row["gold"]} if i < 7 else row for i, row in enumerate(rows)]
    for name, content in (("bad.jsonl", rows), ("good.jsonl", right)):
        db.with_name(name).write_text("\n".join(map(json.dumps, content)), encoding="utf-8")
    bad, verdicts, good = (str(db.with_name(name)) for name in ("bad.jsonl", "verdicts.jsonl", "good.jsonl"))
    assert score.main([bad, "--out", verdicts]) == 0
    for other in (bad, verdicts):  # predictions, which are scored first, or verdicts
        assert score.main([good, "--compare", other]) == 0
        assert "+87.5 points (gained 7, lost 0 of 8 questions, exact McNemar p = 0.016)" in capsys.readouterr().out
    assert load_result(db.with_name("bad.jsonl")) is None
    db.with_name("few.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")
    assert score.main([good, "--compare", str(db.with_name("few.jsonl"))]) == 2
    assert "different questions" in capsys.readouterr().err
    assert score.main([good, "--compare", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
