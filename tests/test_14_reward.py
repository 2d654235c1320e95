"""Step 14: the verdict on a completion, and the reward made of it.

Built here: sqlenv/reward.py, score_sql(database, gold, pred) -> Verdict, extract_sql, sql_reward, total_reward,
check_reward.
Rule: correct 1 if the rows match; executes 1 if they do not, but the query runs and reads a table; format 1 for exactly
one ```sql block; exact 1 for the gold's text. The reward is their weighted sum. What fails matches nothing.
Command: pytest tests/test_14_reward.py
Needed by: step 15, the rollout; step 23, the whole loop.
"""

from pathlib import Path

import pytest

import sqlenv
from sqlenv import score_sql
from sqlenv.datasets import Example
from sqlenv.reward import check_reward, extract_sql, score_completion, sql_reward, total_reward

GOLD = "SELECT age FROM head WHERE age > 56"
EMPTY_GOLD = "SELECT age FROM head WHERE age > 99"
BAD_GOLD = "SELECT nothing FROM head"


@pytest.fixture(scope="module")
def db(databases) -> Path:
    return databases / "heads" / "heads.sqlite"


def example(db: Path, gold: str = GOLD) -> Example:
    return Example(question="Which heads are over 56?", gold=gold, db_id="heads", database=db)


@pytest.mark.parametrize(
    ("gold", "pred", "match", "match_bird", "status"),
    [
        (GOLD, GOLD, True, True, "ok"),
        (GOLD, "select AGE from head where age>56", True, True, "ok"),
        (GOLD, "SELECT age FROM head WHERE age  >  56 ; -- the end", True, True, "ok"),
        (GOLD, "SELECT DISTINCT age FROM head WHERE age > 56", False, True, "ok"),  # BIRD's sets forget duplicates
        (GOLD, "SELECT age FROM head", False, False, "ok"),
        (GOLD, "SELECT age FROM heads", False, False, "sql_error"),
        ("SELECT count(*) FROM head", "SELECT 4", True, True, "ok"),  # H4: a lucky number matches
        ("SELECT count(DISTINCT age) FROM head", "SELECT count(age) FROM head", False, False, "ok"),  # H2
        ("SELECT name FROM head ORDER BY name", "SELECT name FROM head ORDER BY name DESC", False, True, "ok"),
        ("SELECT name FROM head", "SELECT name FROM head; DROP TABLE head", False, False, "rejected"),  # H3
        (EMPTY_GOLD, "SELECT name, age FROM head WHERE 0", True, True, "ok"),  # two empties
        (EMPTY_GOLD, "SELECT name FROM head", False, False, "ok"),
    ],
)
def test_a_candidate_gets_both_verdicts(db, gold, pred, match, match_bird, status):
    verdict = score_sql(db, gold, pred)
    assert (verdict.match, verdict.match_bird, verdict.status) == (match, match_bird, status)
    assert (verdict.gold_status, verdict.sql) == ("ok", pred)


def test_the_order_of_rows_counts_where_the_gold_asks_for_it(db):
    names, up, down = (f"SELECT name FROM head{order}" for order in ("", " ORDER BY name", " ORDER BY name DESC"))
    assert not score_sql(db, up, down).match
    assert score_sql(db, names, down).match  # an order that nobody asked for does no harm


# H1: the official evaluator answers 1 for the first four against an empty gold.
NOT_QUERIES = [";", "-- nothing", "CREATE TABLE IF NOT EXISTS junk(a)", "DELETE FROM head", "", "SELECT FROM", "No.",
               "EXPLAIN SELECT age FROM head", "PRAGMA table_info(head)", "SELECT age FROM head; SELECT 1"]  # fmt: skip


@pytest.mark.parametrize("gold", [GOLD, EMPTY_GOLD, BAD_GOLD])
@pytest.mark.parametrize("pred", NOT_QUERIES)
def test_what_is_not_a_query_earns_nothing_even_against_an_empty_gold(db, gold, pred):
    verdict = score_sql(db, gold, pred)
    assert not verdict.match
    assert not verdict.match_bird
    parts = sql_reward(example(db, gold), pred, verdict)
    assert parts == {"correct": 0.0, "executes": 0.0, "format": 0.0, "exact": 0.0}


def test_a_gold_that_fails_is_reported_and_matched_by_nothing(db):
    for pred in (BAD_GOLD, "SELECT age FROM head WHERE 0", GOLD):
        verdict = score_sql(db, BAD_GOLD, pred)
        assert (verdict.match, verdict.match_bird, verdict.gold_status) == (False, False, "sql_error")


def parts_of(db: Path, completion: str, gold: str = GOLD, metric: str = "spider") -> dict[str, float]:
    return sql_reward(example(db, gold), completion, score_completion(example(db, gold), completion), metric)


@pytest.mark.parametrize(
    ("completion", "expected"),  # (correct, executes, format, exact)
    [
        (f"```sql\n{GOLD}\n```", (1, 0, 1, 1)),
        (f"So:\n```SQL\n{GOLD};\n```\nDone.", (1, 0, 1, 0)),
        (GOLD, (1, 0, 0, 1)),  # no block: the whole text
        (f"  {GOLD}\n", (1, 0, 0, 1)),
        ("```sql\nSELECT age FROM head\n```", (0, 1, 1, 0)),
        ("```sql\nSELECT 1\n```", (0, 0, 1, 0)),  # reads no table
        ("```sql\nSELECT name FROM sqlite_master\n```", (0, 0, 1, 0)),  # nor does this
        ("```sql\nWITH head AS (SELECT 1) SELECT count(*) FROM head\n```", (0, 0, 1, 0)),  # only its name
        ('```sql\nSELECT "agge" FROM head\n```', (0, 1, 1, 0)),  # a typo that SQLite takes for a string
        ("```sql\nSELECT agge FROM head\n```", (0, 0, 1, 0)),
        ("```sql\nEXPLAIN SELECT age FROM head\n```", (0, 0, 1, 0)),
        ("```sql\n```", (0, 0, 1, 0)),
        ("``` sql\nSELECT age FROM head\n```", (0, 0, 0, 0)),
        (f"```sql\nSELECT 1\n```\n```sql\n{GOLD}\n```", (1, 0, 0, 1)),  # two blocks: the last one runs
        (f"```sql\n{GOLD}\n```\n```sql\nSELECT 1\n```", (0, 0, 0, 0)),
        (f"```sql\n{GOLD}\n```\n```sql\nSELECT", (1, 0, 0, 1)),  # the second was cut off
        (f"```sql\n{GOLD}", (0, 0, 0, 0)),  # the only one was cut off
        (f"```python\nprint(1)\n```\n```sql\n{GOLD}\n```", (1, 0, 1, 1)),
        ("", (0, 0, 0, 0)),
    ],
)
def test_the_parts_of_the_reward(db, completion, expected):
    assert parts_of(db, completion) == dict(zip(("correct", "executes", "format", "exact"), expected, strict=True))


def test_the_metric_decides_what_is_correct(db):
    completion = "SELECT DISTINCT age FROM head WHERE age > 56"
    assert (parts_of(db, completion)["correct"], parts_of(db, completion)["executes"]) == (0, 1)
    assert (
        parts_of(db, completion, metric="bird")["correct"],
        parts_of(db, completion, metric="bird")["executes"],
    ) == (1, 0)
    with pytest.raises(ValueError, match="metric = 'exact'; expected 'spider' or 'bird'"):
        parts_of(db, completion, metric="exact")


def test_the_total_weighs_the_parts():
    # 1.0 * 0 + 0.1 * 1 + 0.2 * 1 + 0 * 1 = 0.3; a part that has no weight counts in full: 0.3 + 0.5 = 0.8
    parts = {"correct": 0.0, "executes": 1.0, "format": 1.0, "exact": 1.0}
    weights = {"correct": 1.0, "executes": 0.1, "format": 0.2, "exact": 0.0}
    assert total_reward(parts, weights) == pytest.approx(0.3)
    assert total_reward(parts | {"style": 0.5}, weights) == pytest.approx(0.8)
    assert total_reward({"correct": 1.0, "style": 0.5}, {"correct": 2.0}) == 2.5


def test_the_last_block_is_extracted():
    assert extract_sql("So: ```sql\nSELECT 1\n```") == "SELECT 1"
    assert extract_sql("```sql SELECT 1``` or ```sql\n SELECT 2 ```") == "SELECT 2"
    assert extract_sql("```sqlite\nSELECT 1\n```") == "```sqlite\nSELECT 1\n```"


def test_the_package_exports_the_very_function_that_pays_and_measures():
    assert sqlenv.score_sql is score_sql
    assert score_completion.__globals__["score_sql"] is score_sql
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = sqlenv.nothing


def test_a_reward_function_is_tried_before_training():
    check_reward(sql_reward, "sql_reward")
    check_reward(lambda example, completion, result: {"short": 1 / len(completion)}, "mine.py:short")
    for bad, message in {
        lambda e, c, r: 1.0: r"reward 'mine.py:fn' returned 1.0; expected \{part name: finite number\}",
        lambda e, c, r: {"x": float("nan")}: "returned {'x': nan}",
        lambda e, c, r: {"x": "high"}: "TypeError",
        lambda e, c, r: {1: 1.0}: "returned",
        lambda e, c, r: {"x": 1 / len(r.result.rows)}: "ZeroDivisionError",  # only the broken query has no rows
        lambda e, c: {}: "TypeError",
    }.items():
        with pytest.raises(ValueError, match=message):
            check_reward(bad, "mine.py:fn")
