"""Step 24: one answer from several samples, and how much a measured fraction can be trusted.

Built here: sqlenv/voting.py, majority_vote(results, sqls); evaluate.py `vote_is_right`, `ask`; sqlenv/metrics.py,
wilson_interval, bootstrap_interval, pass_at_k, mcnemar_exact.
Rule: candidates with equal rows vote together, failures do not vote. pass@k = 1 - C(n-c, k) / C(n, k).
Wilson: (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n). McNemar: p = 2 P(Binomial(b+c, 1/2) <= min(b, c)).
Command: pytest tests/test_24_votes.py
"""

import itertools
import json
import math
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tiny_run import run_tiny

import evaluate
from sqlenv import majority_vote
from sqlenv.database import SqlResult
from sqlenv.example import Example
from sqlenv.metrics import bootstrap_interval, mcnemar_exact, pass_at_k, wilson_interval
from sqlenv.reward import Verdict


def vote(*candidates: tuple[list[tuple] | str, str]) -> int | None:
    """Each candidate is (rows, SQL), or (status, SQL) if it failed."""
    results = [
        SqlResult(rows, [], 0, "failed", 0, frozenset())
        if isinstance(rows, str)
        else SqlResult("ok", rows, len(rows[0]) if rows else 1, "", 0, frozenset())
        for rows, _ in candidates
    ]
    return majority_vote(results, [sql for _, sql in candidates])


A, B, EMPTY = ([(1,)], "SELECT a"), ([(2,)], "SELECT b"), ([], "SELECT c")
FAILED = ("sql_error", "SELECT")
UP, DOWN = [(1,), (2,)], [(2,), (1,)]


@pytest.mark.parametrize(
    ("candidates", "winner"),
    [
        ([A], 0),
        ([A, B, B], 1),
        ([B, A, A, B], 0),  # two against two: the lowest index
        ([FAILED, FAILED, FAILED, A], 3),
        ([FAILED, ("budget", "SELECT"), ("too_big", "SELECT"), ("rejected", "DROP")], None),
        ([], None),
        ([EMPTY, A], 1),  # an empty result loses a tie
        ([EMPTY, EMPTY, A], 0),  # and wins a majority
        ([EMPTY, FAILED], 0),
        ([A, (UP, "SELECT a"), (DOWN, "SELECT a")], 1),  # without an order, the rows are a bag
        ([A, (UP, "SELECT a ORDER BY a"), (DOWN, "SELECT a ORDER BY a DESC")], 0),  # with one, a list
        ([(DOWN, "SELECT a ORDER BY a DESC"), (UP, "SELECT a"), (DOWN, "SELECT a")], 1),
        ([(UP, "SELECT a FROM (SELECT a ORDER BY b)"), A, (DOWN, "SELECT a")], 0),  # not its own order
        ([B, ([(0.1 + 0.2,)], "SELECT a"), ([(0.3,)], "SELECT b")], 1),
        ([B, ([(2,), (10,)], "SELECT a ORDER BY a"), ([(10,), (2,)], "SELECT a")], 1),  # sorted as numbers, not text
        ([B, ([(1,), ("x",)], "SELECT a"), ([("x",), (1.0,)], "SELECT b")], 1),
        ([B, ([(1,)], "SELECT a"), ([("1",)], "SELECT b"), ([(1.0,)], "SELECT c")], 1),  # 1 = 1.0, not '1'
        ([B, ([(1, "b"), (1.0, "a")], "SELECT a"), ([(1, "a"), (1, "b")], "SELECT b")], 1),
        ([A, ([(2,)] * 2, "SELECT b"), B, ([(2,)] * 2, "SELECT b")], 1),  # duplicates count
        ([B, ([(None, b"x")], "SELECT a"), ([(None, b"x")], "SELECT b")], 1),
    ],
)
def test_the_commonest_result_wins(candidates, winner):
    assert vote(*candidates) == winner


def test_results_and_queries_come_in_pairs():
    with pytest.raises(ValueError, match="0 results for 1 queries"):
        majority_vote([], ["SELECT 1"])


def test_wilson_interval_of_eight_out_of_ten():
    # z^2 = 3.8416; centre (0.8 + 0.19208) / 1.38416 = 0.71674; half 1.96 sqrt(0.016 + 0.009604) / 1.38416 = 0.22658
    assert wilson_interval(8, 10) == pytest.approx((0.49016, 0.94332), abs=1e-5)


def test_wilson_interval_stays_inside_zero_and_one_and_is_symmetric():
    assert wilson_interval(0, 0) == (0.0, 1.0)
    for n in (1, 7, 1034):
        for successes in range(0, n + 1, max(1, n // 7)):
            low, high = wilson_interval(successes, n)
            assert 0 <= low <= successes / n <= high <= 1
            assert wilson_interval(n - successes, n) == pytest.approx((1 - high, 1 - low))
    assert wilson_interval(0, 10)[1] == pytest.approx(3.8416 / 13.8416)  # z^2 / (n + z^2)
    with pytest.raises(ValueError, match="successes = 11 of n = 10"):
        wilson_interval(11, 10)


def test_pass_at_k_counts_the_subsets_that_hold_a_right_sample():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the right one
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            subsets = list(itertools.combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    for bad in ((4, 1, 5), (4, 5, 1), (4, 1, 0)):
        with pytest.raises(ValueError, match="expected 0 <= c <= n and 1 <= k <= n"):
            pass_at_k(*bad)


def test_mcnemar_is_the_two_sided_sign_test():
    assert mcnemar_exact(1, 5) == 2 * (1 + 6) / 64
    assert mcnemar_exact(5, 1) == mcnemar_exact(1, 5)
    assert mcnemar_exact(0, 0) == mcnemar_exact(3, 3) == 1.0
    assert mcnemar_exact(0, 6) == 2 / 64
    for b, c in ((2, 7), (0, 4)):  # every one of the 2^n ways in which the differing questions could have fallen
        ways = [sum(way) for way in itertools.product((0, 1), repeat=b + c)]
        assert mcnemar_exact(b, c) == sum(min(w, b + c - w) <= min(b, c) for w in ways) / len(ways)


def test_bootstrap_draws_databases_and_not_questions():
    assert bootstrap_interval([0.5] * 6, list("aabbcc"), seed=0) == (0.5, 0.5)
    # Ten questions, all right in one database and all wrong in the other: two draws give 0, 0.5 or 1.
    assert bootstrap_interval([1.0] * 5 + [0.0] * 5, ["a"] * 5 + ["b"] * 5, seed=0) == (0.0, 1.0)
    # One database: there is nothing else to draw.
    assert bootstrap_interval([1.0, 0.0], ["a", "a"], seed=0) == (0.5, 0.5)


def test_bootstrap_of_single_questions_is_as_wide_as_theory_says_and_repeatable():
    rng = random.Random(0)
    values = [float(rng.random() < 0.3) for _ in range(400)]
    mean = sum(values) / 400
    low, high = bootstrap_interval(values, [str(i) for i in range(400)], seed=1, samples=2000)
    half = 1.96 * math.sqrt(mean * (1 - mean) / 400)
    assert (low, high) == pytest.approx((mean - half, mean + half), abs=0.01)
    assert bootstrap_interval(values, [str(i) for i in range(400)], seed=1, samples=2000) == (low, high)
    with pytest.raises(ValueError, match="2 values with 1 groups"):
        bootstrap_interval([1.0, 2.0], ["a"], seed=0)


# --- in evaluations ---


def test_a_database_with_many_questions_is_asked_by_itself():
    def cut(names: str, size: int) -> str:
        examples = [Example("", "", name, Path()) for name in names]
        return " ".join("".join(e.db_id for e in examples[batch]) for batch in evaluate.batches(examples, size))

    assert cut("aaaaaaaaabc", 4) == "aaaa aaaa a bc"
    assert cut("bcaaaaaaaaad", 32) == "bc aaaaaaaaa d"
    assert cut("bcaaaaaaaaad", 40) == "bcaaaaaaaaad"  # nine are less than a quarter of a batch
    assert cut("aaaaaaabbb", 4) == "aaaa aaab bb"  # seven are few, however small the batch
    assert cut("ab", 1) == "a b"


def test_a_vote_is_right_only_if_the_commonest_rows_are():
    def verdict(rows, match):
        result = SqlResult("ok", rows, 1, "", 0, frozenset())
        return Verdict(match, match, "ok", "ok", "SELECT a FROM t", result)

    right, wrong = verdict([(1,)], True), verdict([(2,)], False)
    assert evaluate.vote_is_right([right, right, wrong])
    assert not evaluate.vote_is_right([wrong, right, wrong])


def test_the_cost_counts_the_samples_of_the_vote_too(tmp_path):
    run, out = run_tiny(tmp_path, "eval.num_generations=2"), tmp_path / "greedy.json"
    arguments = ["--checkpoint", str(run), "--set", "eval.num_generations=0", "--out", str(out)]
    assert evaluate.main(arguments) == 0
    greedy, both = (json.loads(p.read_text(encoding="utf-8")) for p in (out, run / "eval-test-after.json"))
    assert both["num_tokens"] > greedy["num_tokens"] > 0
    assert {"mean@2", "pass@2", "vote@2"} <= both.keys()
    assert json.loads((run / "summary.json").read_text(encoding="utf-8"))["after"]["vote@2"] == both["vote@2"]
    assert (greedy["sql_executions"], both["sql_executions"]) == (8, 8 + 2 * 8)


def test_one_question_about_a_database_is_answered_by_a_vote(tmp_path, monkeypatch, capsys):
    run, path = run_tiny(tmp_path, "grpo.max_steps=0", "eval.num_generations=2"), tmp_path / "mine.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE singer (age INTEGER); INSERT INTO singer VALUES (31), (29);")
    ask = ["--checkpoint", str(run), "--ask", "how old?", "--db", str(path)]
    assert evaluate.main(ask) == 0
    assert "none of 2 queries could be run" in capsys.readouterr().out  # a model of a few thousand random numbers
    queries = [
        "SELECT max(age) FROM singer",
        "SELECT age FROM singer",
        "```sql\nSELECT age FROM singer ORDER BY 1\n```",
    ]
    monkeypatch.setattr(evaluate, "rollout", lambda *_, **__: (None, [[*queries, "SELECT no FROM singer"]]))
    assert evaluate.main(ask) == 0
    printed = capsys.readouterr().out
    assert "no such column: no       SELECT no FROM singer" in printed
    assert "SELECT age FROM singer\n2 of 4 queries returned these rows:\n31\n29" in printed
    assert evaluate.main(ask[:-2]) == 2
    assert "--ask QUESTION and --db FILE.sqlite together" in capsys.readouterr().err
