"""Do two results hold the same rows? Spider's rule (execution accuracy, --keep_distinct) and BIRD's.

Spider: bags of rows are equal (duplicates count), under some permutation of the columns; row order matters iff the
gold has a top-level ORDER BY; two empty results are equal. BIRD: sets of rows are equal, columns in place.
Values: Python equality (1 == 1.0, '1' != 1, NULL == NULL).

Departures from the official Spider evaluator, each pinned by tests/test_11_compare.py:
  F1  it rejects (1, 10) against (1.0, 10), because it sorts a row by text first; we accept.
  D3  it treats `order by` anywhere in the gold's text as an order; we parse, so a string literal or a subquery is none.
  F9  non-integral floats are equal at 9 significant digits: AVG and SUM depend on the order of the scan.
  It enumerates k^k column choices for k equal columns; our search is pruned and its work bounded.
"""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from sqlenv.database import tokens

MAX_SEARCH_CELLS = 2_000_000  # cells that a column search may look at, about a second; past it: no match


def compare_rows(gold_rows: list[tuple], pred_rows: list[tuple], *, ordered: bool) -> bool:
    """True if the rows are equal as bags (as lists if `ordered`) under some permutation of columns.

    Example:
        [(1, 'a'), (2, 'b')] and [('b', 2.0), ('a', 1)] -> True, but False if ordered
    """
    if gold_rows == pred_rows:
        return True
    if len(gold_rows) != len(pred_rows) or len(gold_rows[0]) != len(pred_rows[0]):
        return False
    gold, pred = canonical_rows(gold_rows), canonical_rows(pred_rows)
    if gold == pred or (not ordered and Counter(gold) == Counter(pred)):
        return True
    gold_columns, pred_columns = list(zip(*gold, strict=True)), list(zip(*pred, strict=True))
    if ordered:  # position by position, so each column is matched on its own
        return Counter(gold_columns) == Counter(pred_columns)
    return _columns_match(gold_columns, pred_columns)


def compare_rows_bird(gold_rows: list[tuple], pred_rows: list[tuple]) -> bool:
    """BIRD's execution accuracy: equal sets of rows; duplicates, order and column names do not matter.

    Example: [(1,), (1,)] and [(1,)] -> True
    """
    return set(gold_rows) == set(pred_rows)


@lru_cache(maxsize=16_384)
def has_top_level_order_by(sql: str) -> bool:
    """True if the statement itself is ordered: an ORDER BY outside parentheses, strings and comments.

    Example: "SELECT a FROM (SELECT a FROM t ORDER BY a)" -> False
    """
    depth, previous = 0, ""
    for kind, text in tokens(sql):
        word = text.upper() if kind == "word" else ""
        if kind == "symbol":
            depth += {"(": 1, ")": -1}.get(text, 0)
        elif depth == 0 and previous == "ORDER" and word == "BY":
            return True
        previous = word
    return False


def canonical_rows(rows: list[tuple]) -> list[tuple]:
    """Rows in which equal values are identical: 2.0 -> 2, 0.30000000000000004 -> 0.3."""
    return [tuple(map(_canonical, row)) if float in map(type, row) else row for row in rows]


def _canonical(value: object) -> object:
    if type(value) is not float:
        return value
    if not value.is_integer():
        value = float(f"{value:.9g}")
    return int(value) if value.is_integer() else value


def _columns_match(gold: list[tuple], pred: list[tuple]) -> bool:
    """Is there a permutation of the pred columns under which both tables are the same bag of rows?

    Columns are placed one by one. `labels` numbers the distinct prefixes of rows; a placement is kept only if both
    tables have equally many rows of every prefix. Candidates for a column are the pred columns with its signature
    (its values, each with the multiset of values in its row); of identical candidates only one is tried.
    """
    if Counter(map(_bag, gold)) != Counter(map(_bag, pred)):
        return False
    gold_signs, pred_signs = _signatures(gold), _signatures(pred)
    if Counter(gold_signs) != Counter(pred_signs):
        return False
    order = sorted(range(len(gold)), key=lambda i: (gold_signs.count(gold_signs[i]), i))  # the surest first
    budget = MAX_SEARCH_CELLS + 4 * len(gold) * len(gold[0])  # a search without a wrong turn needs 2 per cell

    def place(position: int, free: frozenset[int], gold_labels: list[int], pred_labels: list[int]) -> bool:
        nonlocal budget
        if position == len(order):
            return True
        column, tried = order[position], set()
        for candidate in sorted(free):
            if pred_signs[candidate] != gold_signs[column] or pred[candidate] in tried or budget <= 0:
                continue
            tried.add(pred[candidate])
            budget -= 2 * len(gold_labels)
            names: dict[tuple, int] = {}
            left = [names.setdefault(key, len(names)) for key in zip(gold_labels, gold[column], strict=True)]
            right = [names.setdefault(key, len(names)) for key in zip(pred_labels, pred[candidate], strict=True)]
            if Counter(left) == Counter(right) and place(position + 1, free - {candidate}, left, right):
                return True
        return False

    start = [0] * len(gold[0])
    return place(0, frozenset(range(len(pred))), start, start)


def _bag(values: Iterable) -> frozenset:
    """A hashable multiset."""
    return frozenset(Counter(values).items())


def _signatures(columns: list[tuple]) -> list[frozenset]:
    """One signature per column, which no permutation of rows and columns changes."""
    rows = list(map(_bag, zip(*columns, strict=True)))
    return [_bag(zip(column, rows, strict=True)) for column in columns]
