"""The SQL environment: run a candidate query in a sandbox, compare its rows with the gold's, vote, report.

Standard library only. `score_sql` is the one artifact that training (reward) and evaluation (metric) share.
"""

from sqlenv.compare import compare_rows
from sqlenv.database import run_sql
from sqlenv.reward import score_sql
from sqlenv.voting import majority_vote

__all__ = ["compare_rows", "majority_vote", "run_sql", "score_sql"]
