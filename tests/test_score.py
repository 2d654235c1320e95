"""python -m sqlenv.score: the verdicts on a file of predictions, whatever its rows hold.

Run: pytest tests/test_score.py
"""

import json
import sqlite3

from sqlenv import score, score_sql

GOLD = "SELECT age FROM head WHERE age > 56"
BAD_GOLD = "SELECT nothing FROM head"


def test_it_is_the_scorer_that_training_pays_by():
    assert score.score_sql is score_sql


def test_a_file_of_predictions_is_scored_in_order_whatever_its_rows_hold(databases, tmp_path, capsys):
    rows = [
        {"db_id": "heads", "gold": GOLD, "pred": "SELECT age FROM head WHERE age>56", "id": 7},
        {"db_id": "heads", "gold": GOLD, "pred": "SELECT DISTINCT age FROM head WHERE age > 56"},
        {"db_id": "heads", "gold": GOLD, "pred": ["SELECT", "SELECT 1", GOLD, "SELECT 67 UNION ALL SELECT 67"]},
        {"db_id": "heads", "gold": GOLD, "pred": ["SELECT", "DROP TABLE head"]},
        {"db_id": "heads", "gold": BAD_GOLD, "pred": GOLD},
        {"db_id": "absent", "gold": GOLD, "pred": GOLD},
        {"db_id": "heads", "gold": GOLD},
        {"db_id": "heads", "gold": GOLD, "pred": []},
        {"db_id": "heads", "gold": None, "pred": GOLD},
        {"db_id": "heads", "gold": GOLD, "pred": "SELECT '\ud800'"},
    ]
    lines = [json.dumps(row).encode() for row in rows]
    lines += [b"{not json", b"\xff\xfe", b"[1]", b"[" * 100_000, b"  ", lines[0]]
    pairs, out = tmp_path / "pairs.jsonl", tmp_path / "verdicts.jsonl"
    pairs.write_bytes(b"\n".join(lines))
    score.main([str(pairs), "--databases", str(databases), "--out", str(out)])
    verdicts = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row.items() <= verdict.items() for row, verdict in zip(rows, verdicts, strict=False)] == [True] * len(rows)
    fields = [(v["match"], v["match_bird"], v["status"], v["gold_status"]) for v in verdicts]
    error = (False, False, "error", "error")
    assert fields == [
        (True, True, "ok", "ok"),
        (False, True, "ok", "ok"),
        (True, True, "ok", "ok"),
        (False, False, "sql_error", "ok"),
        (False, False, "ok", "sql_error"),
        *[error] * 4,
        (False, False, "rejected", "ok"),
        *[error] * 4,
        (True, True, "ok", "ok"),
    ]
    assert [verdict.get("vote", "-") for verdict in verdicts[:5]] == ["-", "-", 2, None, "-"]
    assert verdicts[6]["error"] == "pred = None; expected a string"
    assert "absent.sqlite" in verdicts[5]["error"]
    assert verdicts[10]["line"] == "{not json"
    assert {verdict["sqlite_version"] for verdict in verdicts} == {sqlite3.sqlite_version}
    printed = capsys.readouterr().out
    assert "execution_accuracy   0.200  [0.070, 0.452]" in printed  # 3 of 15
    assert "bird_accuracy        0.267" in printed
    # lists of four and of two: no pass@k. Shares 1, 0, 2 of 4, 0 of 2, ten zeros, 1 -> 2.5 / 15
    assert "mean@4               0.167" in printed
    assert "pass@" not in printed
    assert "bad row 8, correct 3, duplicates only 1, syntax error 1, gold fails 1, rejected 1" in printed
    assert "8 bad rows count as wrong; the first: " in printed


def test_a_vote_comes_with_its_single_attempts(databases, tmp_path, capsys):
    wrong = "SELECT name FROM head"
    rows = [
        {"db_id": "heads", "gold": GOLD, "pred": [GOLD, wrong, GOLD, "SELECT"]},  # half are right, so is the vote
        {"db_id": "heads", "gold": GOLD, "pred": [GOLD, wrong, wrong, wrong]},  # a quarter, but the vote is wrong
        {"db_id": "heads", "gold": GOLD, "pred": GOLD, "hits": "none of ours"},  # no list: no vote
        {"db_id": "absent", "gold": GOLD, "pred": [GOLD] * 4, "hits": 9},
    ]
    scored = [score.score_row(row, databases) for row in rows]
    assert [(row["match"], row.get("vote", "-"), row["hits"]) for row in scored] == [
        (True, 0, [True, False, True, False]),
        (False, 1, [True, False, False, False]),
        (True, "-", [True]),
        (False, "-", [False] * 4),
    ]
    pairs = tmp_path / "pairs.jsonl"
    for part, mean, vote in (([0, 1, 3], "mean@4               0.250", "vote@4               0.333"), ([2], "", "")):
        pairs.write_text("\n".join(json.dumps(rows[i]) for i in part), encoding="utf-8")
        assert score.main([str(pairs), "--databases", str(databases)]) == 0
        printed = capsys.readouterr().out
        assert mean in printed  # (2 + 1 + 0) / 12
        assert vote in printed
        assert ("@" in printed) == bool(mean)


def test_predictions_are_not_overwritten_by_their_verdicts(tmp_path, capsys):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("{}", encoding="utf-8")
    for arguments in ([str(pairs), "--out", str(pairs)], [str(tmp_path / "no.jsonl"), "--out", str(tmp_path / "o")]):
        assert score.main([*arguments, "--databases", "."]) == 2
        assert ("none that is read" if arguments[0] == str(pairs) else "expected a file") in capsys.readouterr().err
    assert score.main([str(pairs), "--out", str(tmp_path / "o"), "--databases", str(tmp_path / "nowhere")]) == 2
    assert "expected a folder of" in capsys.readouterr().err
    assert pairs.read_text(encoding="utf-8") == "{}"
