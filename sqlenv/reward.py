"""The verdict on one candidate, and the reward made of it: one artifact with two consumers.

`score_sql` is the function that evaluation reports and that training is paid by; both import this same object.
The candidate runs with 10 times the gold's operations (at least 25 M), so no honest query is cut off.
A query that fails matches nothing, not even an empty gold; official evaluators accept `;` and even DDL there.
"""

import math
import re
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sqlenv.compare import compare_rows, compare_rows_bird, has_top_level_order_by
from sqlenv.database import GOLD_MAX_OPS, SqlResult, candidate_budget, run_gold, run_sql

if TYPE_CHECKING:
    from sqlenv.datasets import Example

METRICS = ("spider", "bird")
_SQL_BLOCK = re.compile(r"```sql\b(.*?)```", re.DOTALL | re.IGNORECASE)
_SQL_FENCE = re.compile(r"```sql\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the candidate's rows equal the gold's under Spider's rule (match) and BIRD's (match_bird), and why."""

    match: bool
    match_bird: bool
    status: str  # of the candidate: ok | rejected | sql_error | budget | too_big
    gold_status: str  # of the gold; unless "ok", nothing matches
    sql: str
    result: SqlResult


def score_sql(database: str | Path, gold: str, pred: str) -> Verdict:
    """Run gold and candidate and compare their rows under both metrics.

    Args:
        database: path of a SQLite file; gold, pred: raw SQL. The gold runs once per file and query.
    Raises:
        ValueError: the database cannot be used (see run_sql). Bad SQL never raises.
    Example:
        gold "SELECT age FROM t WHERE age > 56", pred "select age from t where age>56" -> match, match_bird True
    """
    gold_result = run_gold(database, gold)
    result = run_sql(database, pred, max_ops=candidate_budget(gold_result))
    match = match_bird = False
    if gold_result.status == result.status == "ok":
        ordered = has_top_level_order_by(gold)
        match = compare_rows(gold_result.rows, result.rows, ordered=ordered)
        match_bird = compare_rows_bird(gold_result.rows, result.rows)
    return Verdict(match, match_bird, result.status, gold_result.status, pred, result)


def gold_is_stable(database: str | Path, gold: str) -> bool:
    """False if the gold's rows change when tables are scanned backwards (a tie cut by LIMIT, the order of a sum)."""
    forward, backward = run_gold(database, gold), run_sql(database, gold, max_ops=GOLD_MAX_OPS, reverse_scan=True)
    ordered = has_top_level_order_by(gold)
    return forward.status == backward.status and compare_rows(forward.rows, backward.rows, ordered=ordered)


def extract_sql(completion: str) -> str:
    """The content of the last ```sql block, else the whole text; stripped.

    Example: "So:\\n```sql\\nSELECT 1\\n```" -> "SELECT 1"
    """
    blocks = _SQL_BLOCK.findall(completion)
    return (blocks[-1] if blocks else completion).strip()


def score_completion(example: "Example", completion: str) -> Verdict:
    """score_sql of the SQL in a completion."""
    return score_sql(example.database, example.gold, extract_sql(completion))


def sql_reward(example: "Example", completion: str, result: Verdict, metric: str = "spider") -> dict[str, float]:
    """The unweighted parts of the reward, each 0.0 or 1.0.

    correct: rows match under `metric`. executes: does not match, but runs and reads a table (`SELECT 1` does not).
    format: exactly one ```sql block. exact: the SQL is the gold's text, to the character.
    """
    if metric not in METRICS:
        raise ValueError(f"metric = {metric!r}; expected one of {', '.join(METRICS)}")
    correct = result.match if metric == "spider" else result.match_bird
    executes = result.status == "ok" and bool(result.result.tables) and not correct
    one_block = len(_SQL_BLOCK.findall(completion)) == len(_SQL_FENCE.findall(completion)) == 1
    exact = extract_sql(completion) == example.gold.strip()
    parts = {"correct": correct, "executes": executes, "format": one_block, "exact": exact}
    return {name: float(value) for name, value in parts.items()}


def total_reward(parts: dict[str, float], weights: dict[str, float]) -> float:
    """Weighted sum; a part without a weight counts 1.0 (parts of a custom reward).

    Example: ({"correct": 1.0, "exact": 1.0}, {"exact": 0.0}) -> 1.0
    """
    return sum(weights.get(name, 1.0) * value for name, value in parts.items())


def check_reward(fn: Callable, name: str) -> None:
    """Call a reward function on a right, a wrong and a broken query, so that its mistakes show before training.

    Raises:
        ValueError: it raises, or returns anything but {part name: finite number}.
    """
    from sqlenv.datasets import Example

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shop.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript("CREATE TABLE item(name TEXT, price REAL); INSERT INTO item VALUES ('pen', 2.5)")
        example = Example(question="What is sold?", gold="SELECT name FROM item", db_id="shop", database=path)
        for sql in (example.gold, "SELECT price FROM item", "SELECT FROM"):
            completion = f"```sql\n{sql}\n```"
            try:
                parts = fn(example, completion, score_completion(example, completion))
            except Exception as error:  # any error of the user's function is reported under its name
                raise ValueError(
                    f"reward {name!r} raised {type(error).__name__}: {error}; on {completion!r}"
                ) from error
            if not isinstance(parts, dict) or not all(
                isinstance(key, str) and isinstance(value, (int, float)) and math.isfinite(value)
                for key, value in parts.items()
            ):
                raise ValueError(f"reward {name!r} returned {parts!r}; expected a dict of part names to finite numbers")
