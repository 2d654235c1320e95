"""Is the result of a gold determined by the data, or partly SQLite's choice?

Three things are SQLite's choice, and another version or index may choose otherwise: which rows a LIMIT keeps where
nothing orders them, which of the tied rows it keeps, in which order tied rows come. A right query can then fail, and no
training helps. Found by running the gold again: with tables scanned backwards, and, as SQLite ignores that under ORDER
BY, with ties broken by the result's own columns, up and down. Rows that tie and are equal in every column are no
choice; float sums that differ in the last bits are equal at 9 digits, as in compare.py.
Missed: an OFFSET to the exact middle of a tie; in a subquery, ties between rows with an equal first column.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from sqlenv.compare import canonical_rows
from sqlenv.database import GOLD_MAX_OPS, TOKEN, run_gold, run_sql

SCAN, CUT, ORDER = "rows depend on the scan order", "a tie is cut by LIMIT", "the order of ties is free"


def undetermined(database: str | Path, gold: str) -> str:
    """Why the gold's result is not determined: SCAN, CUT or ORDER; "" if it is, or if the gold fails.

    One extra run, and two for each ORDER BY at the top level or with a LIMIT. Raises ValueError as run_sql does.
    Example: y = 2014 and 2015, three rows each: "SELECT y FROM g GROUP BY y ORDER BY count(*) DESC LIMIT 1" -> CUT
    """
    first = run_gold(database, gold)
    if first.status != "ok":
        return ""
    rows, free_order = canonical_rows(first.rows), False
    for end, top, limited in _order_bys(gold):
        for way in ("", " DESC"):
            tie_break = "".join(f", {column + 1}{way}" for column in range(first.num_columns if top else 1))
            other = run_sql(database, gold[:end] + tie_break + gold[end:], max_ops=GOLD_MAX_OPS)
            changed = other.status == "ok" and canonical_rows(other.rows) != rows  # it may be too long to run
            if changed and Counter(canonical_rows(other.rows)) != Counter(rows):
                return CUT if limited else SCAN  # unlimited, they all come: another plan took other values
            free_order |= changed and top
    other = run_sql(database, gold, max_ops=GOLD_MAX_OPS, reverse_scan=True)
    moved = Counter(canonical_rows(other.rows)) != Counter(rows)
    return SCAN if moved else ORDER if free_order else ""


def _order_bys(sql: str) -> Iterator[tuple[int, bool, bool]]:
    """(where its terms end, is it at the top level, has it a LIMIT) of every ORDER BY of a statement or a subquery."""
    ordered, depth, end, previous = set(), 0, 0, ""  # `ordered`: the depths at which an ORDER BY has not ended
    for match in TOKEN.finditer(sql):
        if match.lastgroup == "skip":
            continue
        text = match.group().upper()
        if text in ("LIMIT", ")", ";") and depth in ordered:
            ordered.discard(depth)
            if depth == 0 or text == "LIMIT":  # others belong to a window or an aggregate, or have no effect
                yield end, depth == 0, text == "LIMIT"
        depth += (text == "(") - (text == ")")
        if (previous, text) == ("ORDER", "BY"):
            ordered.add(depth)
        previous, end = text, match.end()
    if 0 in ordered:
        yield end, True, False
