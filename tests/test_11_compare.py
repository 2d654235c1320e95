"""Step 11: do two results hold the same rows?

Built here: sqlenv/compare.py, compare_rows(gold_rows, pred_rows, *, ordered), compare_rows_bird,
has_top_level_order_by.
Rule: equal bags of rows (lists, if the gold is ordered) under some permutation of the columns; Python equality of
values, non-integral floats at 9 significant digits. BIRD: equal sets of rows, columns in place.
Pinned to 6,440 verdicts of the official evaluators on real and on mutated predictions, where that table is at hand.
Command: pytest tests/test_11_compare.py
Needed by: step 14, the reward; step 24, the vote.
"""

import itertools
import json
import random
import time
from collections import Counter
from pathlib import Path

import pytest

from sqlenv import compare
from sqlenv.compare import compare_rows, compare_rows_bird, has_top_level_order_by
from sqlenv.reward import score_sql

# (gold, pred, equal as bags, equal as lists, equal as BIRD's sets)
CASES = {
    "the same rows": ([(1, "a"), (2, "b")], [(1, "a"), (2, "b")], True, True, True),
    "another row order": ([(1, "a"), (2, "b")], [(2, "b"), (1, "a")], True, False, True),
    "swapped columns": ([(1, "a"), (2, "b")], [("a", 1), ("b", 2)], True, True, False),
    "swapped columns, another order": ([(1, "a"), (2, "b")], [("b", 2), ("a", 1)], True, False, False),
    "columns permuted row by row": ([(1, 2), (3, 4)], [(2, 1), (3, 4)], False, False, False),
    "columns sorted independently": ([("al", 100), ("bo", 250)], [("al", 250), ("bo", 100)], False, False, False),
    "a missing duplicate": ([(1,), (1,)], [(1,)], False, False, True),
    "the same set, other counts": ([(1,), (1,), (2,)], [(1,), (2,), (2,)], False, False, True),
    "an extra column": ([(1,)], [(1, 1)], False, False, False),
    "two empties": ([], [], True, True, True),
    "an empty and a row": ([], [(None,)], False, False, False),
    "a row and an empty": ([(0,)], [], False, False, False),
    "int and float": ([(1,)], [(1.0,)], True, True, True),
    "text and number": ([(1,)], [("1",)], False, False, False),
    "text and blob": ([("a",)], [(b"a",)], False, False, False),
    "case of text": ([("a",)], [("A",)], False, False, False),
    "blanks in text": ([("a",)], [("a ",)], False, False, False),
    "two NULLs": ([(None, 1)], [(None, 1)], True, True, True),
    "NULL and zero": ([(None,)], [(0,)], False, False, False),
    "NULL and empty text": ([(None,)], [("",)], False, False, False),
    "the last bits of a sum": ([(0.3,)], [(0.1 + 0.2,)], True, True, False),
    "a mean that just misses an integer": ([(3.0,)], [(2.9999999999999996,)], True, True, False),
    "the ninth digit": ([(0.123456789,)], [(0.123456788,)], False, False, False),
    "the tenth digit": ([(0.1234567891,)], [(0.1234567892,)], True, True, False),
    "rounded to two digits": ([(58.744924,)], [(58.74,)], False, False, False),
    "large integers": ([(12345678901,)], [(12345678902,)], False, False, False),
    "large integral floats": ([(12345678901.0,)], [(12345678902.0,)], False, False, False),
    "infinities": ([(float("inf"), float("-inf"))], [(float("inf"), float("-inf"))], True, True, True),
    "F1: int and float beside a number": ([(1, 10)], [(1.0, 10)], True, True, True),  # official Spider: False
    "a symmetric table": ([(0, 1), (1, 0)], [(1, 0), (0, 1)], True, True, True),  # the columns can be swapped
}


@pytest.mark.parametrize(("gold", "pred", "bag", "listed", "bird"), CASES.values(), ids=CASES)
def test_each_case_has_its_verdict_both_ways_round(gold, pred, bag, listed, bird):
    for left, right in ((gold, pred), (pred, gold)):
        assert compare_rows(left, right, ordered=False) is bag
        assert compare_rows(left, right, ordered=True) is listed
        assert compare_rows_bird(left, right) is bird


def loop_spec(gold: list[tuple], pred: list[tuple], ordered: bool) -> bool:
    """The rule as it reads: try every permutation of the columns."""
    if len(gold) != len(pred) or (gold and len(gold[0]) != len(pred[0])):
        return False
    for columns in itertools.permutations(range(len(pred[0]) if pred else 0)):
        permuted = [tuple(row[i] for i in columns) for row in pred]
        if gold == permuted if ordered else Counter(gold) == Counter(permuted):
            return True
    return False


def test_small_random_tables_agree_with_trying_every_permutation():
    rng, matches = random.Random(0), Counter()
    for _ in range(2000):
        columns, rows = rng.randint(1, 5), rng.randint(0, 4)
        gold = [tuple(rng.choice([0, 1, None, "a"][: rng.randint(2, 4)]) for _ in range(columns)) for _ in range(rows)]
        order = rng.sample(range(columns), columns)
        pred = [tuple(row[i] for i in order) for row in rng.sample(gold, rows)]
        if pred and rng.random() < 0.6:  # change one cell, or swap two cells of a column
            table = [list(row) for row in pred]
            i, j, column = rng.randrange(rows), rng.randrange(rows), rng.randrange(columns)
            table[i][column], table[j][column] = table[j][column], rng.choice([table[i][column], 1])
            pred = [tuple(row) for row in table]
        for ordered in (False, True):
            expected = loop_spec(gold, pred, ordered)
            matches[ordered, expected] += 1
            assert compare_rows(gold, pred, ordered=ordered) is expected, (gold, pred, ordered)
    assert min(matches.values()) > 200  # both answers were tested, in both modes


def shuffled(rows: list[tuple], seed: int) -> list[tuple]:
    """The rows and the columns in another order."""
    rng = random.Random(seed)
    columns = rng.sample(range(len(rows[0])), len(rows[0]))
    return [tuple(row[i] for i in columns) for row in rng.sample(rows, len(rows))]


def cycles(*lengths: int) -> list[tuple]:
    """Edges (rows) and vertices (columns) of disjoint cycles: every row and every column holds two 1s."""
    starts = list(itertools.accumulate(lengths, initial=0))
    edges = [(s + i, s + (i + 1) % n) for s, n in zip(starts, lengths, strict=False) for i in range(n)]
    return [tuple(int(column in edge) for column in range(starts[-1])) for edge in edges]


CELLS = list(itertools.product(range(4), range(4)))  # the rook's graph: many symmetries, no two equal columns
ROOK = [tuple(int(a != b and (a[0] == b[0] or a[1] == b[1])) for b in CELLS) for a in CELLS]
HARD = {
    "26 equal columns": ([(None,) * 26] * 3, [(None,) * 26] * 3, True),
    "26 equal columns, one cell off": ([(0,) * 26, (1,) * 26], [(0,) * 26, (1,) * 25 + (0,)], False),
    "26 columns, two values": ([(0, 1) * 13, (1, 0) * 13], [(1,) * 13 + (0,) * 13, (0,) * 13 + (1,) * 13], True),
    "a diagonal": ([tuple(int(i == j) for j in range(40)) for i in range(40)], None, True),
    "a cycle": (cycles(30), None, True),
    "the rook's graph": (ROOK, None, True),
    "one cycle of 30 and two of 15": (cycles(30), cycles(15, 15), False),
    # Trying each of four equal columns would repeat every dead end 4^n times.
    "equal columns": (shuffled([tuple(x for x in row for _ in range(4)) for row in cycles(5, 7)], 2), None, True),
    "5,000 rows of 12 columns": ([tuple((i * (j + 3)) % 97 for j in range(12)) for i in range(5_000)], None, True),
}


@pytest.mark.parametrize(("gold", "pred", "expected"), HARD.values(), ids=HARD)
def test_the_column_search_is_short_where_enumeration_would_not_end(gold, pred, expected):
    start = time.process_time()
    assert compare_rows(gold, shuffled(pred or gold, 1), ordered=False) is expected
    assert time.process_time() - start < 5  # milliseconds for the small ones; the machine may be busy


def test_a_search_that_takes_too_much_work_gives_up_and_says_no(monkeypatch):
    # The columns of the gold are shuffled, so a wrong choice shows only when a cycle closes, 2^n choices later.
    monkeypatch.setattr(compare, "MAX_SEARCH_CELLS", 100_000)
    start = time.process_time()
    assert compare_rows(shuffled(cycles(100), 2), shuffled(cycles(50, 50), 1), ordered=False) is False
    assert time.process_time() - start < 5


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n  /* x */ by a limit 1", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1;", True),
        ("WITH c AS (SELECT a FROM t) SELECT a FROM c ORDER BY a", True),
        ("SELECT ')' , a FROM t ORDER BY a", True),
        ("SELECT a FROM t", False),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT a FROM t WHERE b IN (SELECT b FROM u ORDER BY c LIMIT 1)", False),
        ("SELECT row_number() OVER (ORDER BY a) FROM t", False),
        ("SELECT a FROM t WHERE b <> 'order by'", False),  # D3: the official evaluator finds an order here
        ("SELECT a FROM t WHERE b = 'it''s order by'", False),
        ('SELECT "order by", `order by`, [order by] FROM t', False),
        ('SELECT a AS "order" FROM by', False),
        ("SELECT a FROM t -- order by a", False),
        ("SELECT a /* order by a */ FROM t", False),
        ("SELECT a FROM t /* order by a", False),
        ("SELECT border, bypass FROM t", False),
        ("", False),
    ],
)
def test_only_an_order_by_of_the_statement_itself_counts(sql, expected):
    assert has_top_level_order_by(sql) is expected


# --- the official verdicts ---


def verdicts(shared: Path, name: str) -> tuple[int, list[dict]]:
    """Number of rows, and the rows in which one of the two metrics departs from the official verdict."""
    rows = [json.loads(line) for line in (shared / "verdicts" / name).read_text(encoding="utf-8").splitlines()]
    departures = []
    for row in rows:
        path = shared / "spider" / "database" / row["db_id"] / f"{row['db_id']}.sqlite"
        verdict = score_sql(path, row["gold"], row["pred"])
        assert verdict.gold_status == "ok"
        assert "pred_status" not in row or (verdict.status == "ok") == (row["pred_status"] == "ok"), row
        if (verdict.match, verdict.match_bird) != (bool(row["official_keep_distinct"]), bool(row["bird_set"])):
            departures.append(row | {"match": verdict.match, "match_bird": verdict.match_bird})
    return len(rows), departures


def test_every_verdict_on_real_predictions_is_the_official_one(shared):
    assert verdicts(shared, "predictions.jsonl") == (3217, [])


def test_verdicts_on_mutated_golds_depart_only_in_the_documented_ways(shared):
    count, departures = verdicts(shared, "mutations.jsonl")
    assert count == 3223
    kinds = Counter()
    for row in departures:
        # We say "equal", the official evaluator says "different", and BIRD's rule agrees with both.
        assert (row["match"], row["official_keep_distinct"], row["match_bird"], row["bird_set"]) == (True, 0, True, 1)
        if row["mutation"] == "float_first":
            kinds["F1: 1.0 beside a number is sorted as text"] += 1
            assert "*1.0," in row["pred"]
        else:
            kinds["D3: an ORDER BY inside a subquery"] += 1
            assert "order by" in row["gold"].lower()
            assert not has_top_level_order_by(row["gold"])
    assert kinds == {"F1: 1.0 beside a number is sorted as text": 4, "D3: an ORDER BY inside a subquery": 1}
