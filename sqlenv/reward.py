"""The verdict on a candidate, and the reward made of it: evaluation reports what training is paid for, `score_sql`.

A query that fails matches nothing, not even an empty gold: the official evaluators accept `;` and even DDL there (H1).
A gold that fails is matched by nothing. A candidate may use 10 times the gold's operations: no honest query needs more.
"""

import math
import re
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from sqlenv.compare import compare_rows, compare_rows_bird, has_top_level_order_by
from sqlenv.database import SqlResult, candidate_budget, run_gold, run_sql
from sqlenv.example import Example
from sqlenv.workers import in_order

_SQL_BLOCK = re.compile(r"```sql\b(.*?)```", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Do the rows equal the gold's, under Spider's rule (match) and BIRD's; and how gold and candidate ended."""

    match: bool
    match_bird: bool
    status: str  # of the candidate, see SqlResult
    gold_status: str  # unless "ok", nothing matches
    sql: str
    result: SqlResult


def score_sql(database: str | Path, gold: str, pred: str) -> Verdict:
    """Run gold and candidate (raw SQL) on a SQLite file and compare their rows under both metrics.

    Raises ValueError if the database cannot be used (see run_sql); bad SQL never raises.
    Example: gold "SELECT age FROM t WHERE age > 56", pred "select age from t where age>56" -> match and match_bird
    """
    gold_result = run_gold(database, gold)
    result = run_sql(database, pred, max_ops=candidate_budget(gold_result))
    both_ran = gold_result.status == result.status == "ok"
    match = both_ran and compare_rows(gold_result.rows, result.rows, ordered=has_top_level_order_by(gold))
    match_bird = both_ran and compare_rows_bird(gold_result.rows, result.rows)
    return Verdict(match, match_bird, result.status, gold_result.status, pred, result)


def extract_sql(completion: str) -> str:
    """The last ```sql block, else the whole text; stripped. Example: "So: ```sql\\nSELECT 1\\n```" -> "SELECT 1"."""
    blocks = _SQL_BLOCK.findall(completion)
    return (blocks[-1] if blocks else completion).strip()


def score_completion(example: Example, completion: str) -> Verdict:
    """score_sql of the SQL in a completion."""
    return score_sql(example.database, example.gold, extract_sql(completion))


def score_completions(examples: list[Example], texts: list[list[str]], workers: int = 0) -> list[list[Verdict]]:
    """Q x G verdicts on G completions of each of Q questions, in `workers` processes if there are at least 2."""
    repeated = [example for example, group in zip(examples, texts, strict=True) for _ in group]
    verdicts = in_order(score_completion, repeated, [text for group in texts for text in group], workers=workers)
    return [[next(verdicts) for _ in group] for group in texts]


def sql_reward(example: Example, completion: str, result: Verdict, metric: str = "spider") -> dict[str, float]:
    """The unweighted parts of the reward, each 0.0 or 1.0.

    correct: rows match under `metric`. executes: they do not, but it runs and reads a table (`SELECT 1` does not).
    format: exactly one ```sql block. exact: the SQL is the gold's text, to the character.
    """
    if metric not in ("spider", "bird"):
        raise ValueError(f"metric = {metric!r}; expected 'spider' or 'bird'")
    correct = result.match if metric == "spider" else result.match_bird
    one_block = len(_SQL_BLOCK.findall(completion)) == len(re.findall(r"(?i)```sql\b", completion)) == 1
    executes = result.status == "ok" and bool(result.result.tables) and not correct
    exact = extract_sql(completion) == example.gold.strip()
    return {"correct": float(correct), "executes": float(executes), "format": float(one_block), "exact": float(exact)}


def reward_parts(fn: Callable, name: str, example: Example, completion: str, verdict: Verdict) -> dict[str, float]:
    """The parts that a reward function gives; ValueError with its name if it raises or gives anything else."""
    try:
        parts = fn(example, completion, verdict)
        ok = isinstance(parts, dict) and all(isinstance(k, str) and math.isfinite(v) for k, v in parts.items())
    except Exception as error:  # whatever it is, it is reported under the function's name
        raise ValueError(f"reward {name!r} on {completion!r}: {type(error).__name__}: {error}") from error
    if not ok or not parts:
        raise ValueError(f"reward {name!r} returned {parts!r}; expected {{part name: finite number}}")
    return parts


def total_reward(parts: dict[str, float], weights: dict[str, float]) -> float:
    """Weighted sum; unknown parts count 1.0. Example: ({"correct": 1.0, "style": 0.5}, {"correct": 2.0}) -> 2.5."""
    return sum(weights.get(name, 1.0) * value for name, value in parts.items())


def check_reward(fn: Callable, name: str) -> list[str]:
    """Try a reward function on a right, a wrong and a broken query, before training; the names of its parts.

    Raises ValueError with its name if it raises, or returns anything but {part name: finite number}.
    """
    names: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shop.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            connection.executescript("CREATE TABLE item(name TEXT, price REAL); INSERT INTO item VALUES ('pen', 2.5)")
        example = Example(question="What is sold?", gold="SELECT name FROM item", db_id="shop", database=path)
        for sql in (example.gold, "SELECT price FROM item", "SELECT FROM"):
            completion = f"```sql\n{sql}\n```"
            names |= reward_parts(fn, name, example, completion, score_completion(example, completion))
    return sorted(names)
