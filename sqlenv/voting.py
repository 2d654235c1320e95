"""Majority vote over returned rows (self-consistency): run several samples, answer with one of the commonest rows."""

from collections import defaultdict

from sqlenv.compare import canonical_rows, has_top_level_order_by
from sqlenv.database import SqlResult


def majority_vote(results: list[SqlResult], sqls: list[str]) -> int | None:
    """Index of the candidate to answer with, or None if none executed. Neither gold nor question is looked at.

    Candidates with equal rows vote together: rows in place if the candidate's own SQL is ordered, sorted otherwise
    (NULL, numbers, text, blobs, as SQLite does); columns in place. Failures do not vote; empty results vote but lose
    ties; other ties go to the lowest index.
    Raises ValueError for other numbers of results and queries. Example: rows [(1,)], [(2,)], [(2,)] -> 1
    """
    if len(results) != len(sqls):
        raise ValueError(f"{len(results)} results for {len(sqls)} queries; expected as many")
    voters: dict[tuple, list[int]] = defaultdict(list)
    for index, (result, sql) in enumerate(zip(results, sqls, strict=True)):
        if result.status == "ok":
            rows = canonical_rows(result.rows)
            voters[tuple(rows if has_top_level_order_by(sql) else sorted(rows, key=_sqlite_order))].append(index)
    if not voters:
        return None
    return max(voters.items(), key=lambda item: (len(item[1]), bool(item[0]), -item[1][0]))[1][0]


def _sqlite_order(row: tuple) -> list[tuple]:
    ranks = {type(None): 0, str: 2, bytes: 3}
    return [(ranks.get(type(value), 1), 0 if value is None else value) for value in row]
