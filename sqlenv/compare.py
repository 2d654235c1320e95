"""Do two results hold the same rows? Spider's rule (execution accuracy, --keep_distinct) and BIRD's.

Spider: bags of rows are equal (duplicates count), under some permutation of the columns; row order matters iff the
gold has a top-level ORDER BY; two empty results are equal. BIRD: sets of rows are equal, columns in place.
Values: Python equality (1 == 1.0, '1' != 1, NULL == NULL).

Departures from the official Spider evaluator, each pinned by tests/test_11_compare.py:
  F1  it rejects (1, 10) against (1.0, 10), because it sorts a row by text first; we accept.
  D3  it treats `order by` anywhere in the gold's text as an order; we parse, so a string literal or a subquery is none.
  F9  non-integral floats are equal at 9 significant digits: AVG and SUM depend on the order of the scan.
  It tries k^k choices for k equal columns; our search is pruned and its work bounded.
"""

from collections import Counter
from functools import lru_cache

from sqlenv.database import tokens

MAX_SEARCH_CELLS = 4_000_000  # cells that a column search may look at, about two seconds; past it: no match


def compare_rows(gold_rows: list[tuple], pred_rows: list[tuple], *, ordered: bool) -> bool:
    """True if the rows are equal as bags (as lists if `ordered`) under some permutation of columns.

    Example: [(1, 'a'), (2, 'b')] and [('b', 2.0), ('a', 1)] -> True, but False if ordered
    """
    if gold_rows == pred_rows:
        return True
    if len(gold_rows) != len(pred_rows) or len(gold_rows[0]) != len(pred_rows[0]):
        return False
    gold, pred = canonical_rows(gold_rows), canonical_rows(pred_rows)
    if ordered:  # position by position, so each column is matched on its own
        return Counter(zip(*gold, strict=True)) == Counter(zip(*pred, strict=True))
    return Counter(gold) == Counter(pred) or _columns_match(gold, pred)


def compare_rows_bird(gold_rows: list[tuple], pred_rows: list[tuple]) -> bool:
    """BIRD's rule: equal sets of rows, columns in place, floats exact. Example: [(1,), (1,)] and [(1,)] -> True."""
    return set(gold_rows) == set(pred_rows)


@lru_cache(maxsize=16_384)
def has_top_level_order_by(sql: str) -> bool:
    """True if the statement itself is ordered: an ORDER BY outside parentheses, strings and comments.

    Example: "SELECT a FROM (SELECT a FROM t ORDER BY a)" -> False
    """
    depth, previous = 0, ""
    for _, text in tokens(sql):  # a quoted "order" comes with its quotes
        depth += (text == "(") - (text == ")")
        if depth == 0 and previous == "ORDER" and text.upper() == "BY":
            return True
        previous = text.upper()
    return False


def canonical_rows(rows: list[tuple]) -> list[tuple]:
    """Rows in which equal values are identical: 2.0 -> 2, 0.30000000000000004 -> 0.3."""
    return [tuple(map(_canonical, row)) if float in map(type, row) else row for row in rows]


def _canonical(value: object) -> object:
    if type(value) is float and not value.is_integer():
        value = float(f"{value:.9g}")
    return int(value) if type(value) is float and value.is_integer() else value


def is_selection(narrow_rows: list[tuple], wide_rows: list[tuple]) -> bool:
    """Are the narrow rows what some columns of the wide rows say? The error "columns only" of sqlenv/errors.py.

    Example: [("Oslo",)] and [(1, "Oslo")] -> True
    """
    if not narrow_rows or len(narrow_rows) != len(wide_rows) or len(narrow_rows[0]) > len(wide_rows[0]):
        return False
    return _columns_match(canonical_rows(narrow_rows), canonical_rows(wide_rows))


def _columns_match(gold_rows: list[tuple], pred_rows: list[tuple]) -> bool:
    """Is there a choice of pred columns, one for each of gold's, under which both are the same bag of rows?

    Columns are placed one by one, each on one with the same bag of values; of identical ones only one is tried. A label
    per row says how the row begins; at first, what it holds in any order. Labels must stay equal as bags.
    """
    gold, pred = list(zip(*gold_rows, strict=True)), list(zip(*pred_rows, strict=True))
    gold_bags, pred_bags = ([frozenset(Counter(column).items()) for column in columns] for columns in (gold, pred))
    if Counter(gold_bags) - Counter(pred_bags):
        return False
    order = sorted(range(len(gold)), key=lambda i: gold_bags.count(gold_bags[i]))  # the surest first
    budget = MAX_SEARCH_CELLS + 4 * len(gold) * len(gold_rows)

    def place(position: int, free: list[int], gold_labels: list[tuple], pred_labels: list[tuple]) -> bool:
        nonlocal budget
        if Counter(gold_labels) != Counter(pred_labels):
            return False
        if position == len(order):
            return True
        numbers = {label: number for number, label in enumerate(gold_labels)}
        gold_labels, pred_labels = [numbers[label] for label in gold_labels], [numbers[label] for label in pred_labels]
        column, tried = order[position], set()
        for candidate in free:
            if pred_bags[candidate] == gold_bags[column] and pred[candidate] not in tried and budget > 0:
                tried.add(pred[candidate])
                budget -= 2 * len(gold_rows)
                left = list(zip(gold_labels, gold[column], strict=True))
                right = list(zip(pred_labels, pred[candidate], strict=True))
                if place(position + 1, [other for other in free if other != candidate], left, right):
                    return True
        return False

    same = len(gold) == len(pred)
    bags = ([tuple(sorted(map(hash, row))) if same else () for row in rows] for rows in (gold_rows, pred_rows))
    return place(0, list(range(len(pred))), *bags)
