"""What went wrong with a query: one class for every verdict, so that the failures of an evaluation can be counted.

    correct
    gold fails                        nothing can match
    rejected, budget, too big         ended by the sandbox (sqlenv/database.py)
    no such column, no such table, ambiguous column, misuse of aggregate, syntax error, other error
    order only, duplicates only, columns only, missing rows, extra rows, other rows

The last line is of wrong rows, classed by the first that holds: the same bag in another order; the same set with other
counts; some columns too many or too few, the rest right; a part of the gold's rows; the gold's rows and more.
"""

from collections import Counter

from sqlenv.compare import canonical_rows, compare_rows, is_selection
from sqlenv.database import run_gold
from sqlenv.reward import Verdict

MESSAGES = {  # how SQLite's messages begin, or end
    "no such column": "no such column",
    "no such table": "no such table",
    "ambiguous column": "ambiguous column",
    "misuse of": "misuse of aggregate",
    "syntax error": "syntax error",
    "incomplete input": "syntax error",
    "unrecognized token": "syntax error",
}


def error_class(database, gold: str, verdict: Verdict) -> str:
    """The class of a verdict on a database and gold, by Spider's rule. Example: rows [(2,), (1,)] for (1), (2) ordered
    by the gold -> "order only"
    """
    if verdict.match:
        return "correct"
    if verdict.gold_status != "ok":
        return "gold fails"
    if verdict.status == "sql_error":
        return next((name for text, name in MESSAGES.items() if text in verdict.result.reason), "other error")
    if verdict.status != "ok":
        return verdict.status.replace("_", " ")
    gold_rows, pred_rows = canonical_rows(run_gold(database, gold).rows), canonical_rows(verdict.result.rows)
    if compare_rows(gold_rows, pred_rows, ordered=False):
        return "order only"
    if compare_rows(list(dict.fromkeys(gold_rows)), list(dict.fromkeys(pred_rows)), ordered=False):
        return "duplicates only"
    if is_selection(gold_rows, pred_rows) or is_selection(pred_rows, gold_rows):
        return "columns only"
    gold_bag, pred_bag = Counter(gold_rows), Counter(pred_rows)
    if pred_bag <= gold_bag:
        return "missing rows"
    return "extra rows" if gold_bag <= pred_bag else "other rows"
