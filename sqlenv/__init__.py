"""The SQL environment: run a candidate query in a sandbox, compare its rows with the gold's, vote, report.

Standard library only. `score_sql` is the one artifact that training (reward) and evaluation (metric) share.
"""

import importlib
from typing import Any

from sqlenv.compare import compare_rows
from sqlenv.database import run_sql
from sqlenv.reward import score_sql
from sqlenv.voting import majority_vote

__all__ = ["Example", "compare_rows", "majority_vote", "run_sql", "score_sql"]


def __getattr__(name: str) -> Any:
    """`sqlenv.Example` is imported on first use, so that `python -m sqlenv.datasets` runs one copy of its module."""
    if name != "Example":
        raise AttributeError(f"module 'sqlenv' has no attribute {name!r}")
    return importlib.import_module("sqlenv.datasets").Example
