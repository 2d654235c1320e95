"""Score a file of predictions: python -m sqlenv.score PAIRS.jsonl --databases DIR --out VERDICTS.jsonl.

Each line of PAIRS is {"db_id", "gold", "pred"}; the database is DIR/<db_id>/<db_id>.sqlite. If "pred" is a list, its
majority vote is scored: "vote" says which one that is (null: none executed), "attempts" what share of the list matches.
VERDICTS repeats each row in order and adds the verdict. A bad row gets an "error", counts as wrong, and stops nothing.
"""

import argparse
import json
import sqlite3
from collections import Counter
from pathlib import Path

from sqlenv.metrics import wilson_interval
from sqlenv.reward import score_sql
from sqlenv.voting import majority_vote


def score_line(line: bytes, databases: Path) -> dict:
    """The row of one JSON line with "match", "match_bird", "status", "gold_status", "reason" and "sqlite_version"."""
    row = {"line": line.decode("utf-8", "replace").strip()}  # what is repeated if it is no object
    verdict = {"match": False, "match_bird": False, "status": "error", "gold_status": "error"}
    try:
        parsed = json.loads(line)
        if not isinstance(parsed, dict):
            raise ValueError(f"row = {parsed!r:.60}; expected an object")
        row, listed = parsed, isinstance(parsed.get("pred"), list)
        preds = row["pred"] if listed else [row.get("pred")]
        if listed:
            verdict["attempts"] = 0.0
        for key, values in (("db_id", [row.get("db_id")]), ("gold", [row.get("gold")]), ("pred", preds)):
            if not values or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{key} = {row.get(key)!r:.60}; expected a string")
        scored = [score_sql(databases / row["db_id"] / f"{row['db_id']}.sqlite", row["gold"], pred) for pred in preds]
        vote = majority_vote([one.result for one in scored], preds)
        answer = scored[vote or 0]
        fields = ("match", "match_bird", "status", "gold_status")
        verdict |= {name: getattr(answer, name) for name in fields} | {"reason": answer.result.reason}
        if listed:
            verdict |= {"vote": vote, "attempts": sum(one.match for one in scored) / len(scored)}
    except (ValueError, RecursionError) as error:  # bad JSON is a ValueError, or too deep
        verdict["error"] = str(error)
    return row | verdict | {"sqlite_version": sqlite3.sqlite_version}


def main(arguments: list[str] | None = None) -> None:
    """Score the file and print totals with 95 % Wilson intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="predictions, one JSON object a line")
    parser.add_argument("--databases", type=Path, required=True, help="folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--out", type=Path, required=True, help="verdicts, one JSON object a line")
    options = parser.parse_args(arguments)
    if not options.pairs.is_file() or options.out.resolve() == options.pairs.resolve():
        raise SystemExit(f"error: predictions = {options.pairs}; expected a file, other than --out")
    if not options.databases.is_dir():
        raise SystemExit(f"error: databases = {options.databases}; expected a folder of <db_id>/<db_id>.sqlite")
    totals, attempts, first_error = Counter(), [], ""
    with options.pairs.open("rb") as pairs, options.out.open("w", encoding="utf-8", newline="\n") as out:
        for line in filter(bytes.strip, pairs):
            row = score_line(line, options.databases)
            totals.update(rows=1, spider=int(row["match"]), bird=int(row["match_bird"]), errors=int("error" in row))
            totals.update({f"status {row['status']}": 1, "bad golds": int(row["gold_status"] not in ("ok", "error"))})
            first_error = first_error or row.get("error", "")
            if isinstance(row.get("pred"), list):
                attempts.append(row["attempts"])
            out.write(json.dumps(row) + "\n")
    for metric in ("spider", "bird"):
        low, high = wilson_interval(totals[metric], totals["rows"])
        share = totals[metric] / max(1, totals["rows"])
        print(f"{metric:7s} {totals[metric]} of {totals['rows']} = {share:.4f} [{low:.4f}, {high:.4f}]")
    if attempts:
        print(f"single attempts (mean of the lists)  {sum(attempts) / len(attempts):.4f}")
    if first_error:
        print(f"first error: {first_error}")
    rest = sorted((name, count) for name, count in totals.items() if count and name not in ("spider", "bird", "rows"))
    print(", ".join(f"{name} {count}" for name, count in rest), f"(SQLite {sqlite3.sqlite_version})")


if __name__ == "__main__":
    main()
