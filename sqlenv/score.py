"""Score a file of predictions: python -m sqlenv.score PAIRS.jsonl --databases DIR --out VERDICTS.jsonl.

Each line of PAIRS is {"db_id", "gold", "pred"}; of a list of predictions the majority vote is scored, and "vote" says
which it was (null: none executed). The database is DIR/<db_id>/<db_id>.sqlite. VERDICTS repeats each row in order and
adds the verdict. A bad row gets an "error", counts as wrong, and stops nothing.
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
    row, verdict = {}, {"match": False, "match_bird": False, "status": "error", "gold_status": "error"}
    try:
        row = {"line": line.decode("utf-8", "replace").strip()}  # what is repeated if it is no object
        parsed = json.loads(line)
        if not isinstance(parsed, dict):
            raise ValueError(f"row = {parsed!r:.60}; expected an object")
        row = parsed
        for key in ("db_id", "gold", "pred"):
            values = row[key] if key == "pred" and isinstance(row.get(key), list) else [row.get(key)]
            if not values or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{key} = {row.get(key)!r:.60}; expected a string")
        verdict |= _verdict(row, databases)
    except (ValueError, RecursionError) as error:  # bad JSON is a ValueError, or too deep
        verdict["error"] = str(error)
    return row | verdict | {"sqlite_version": sqlite3.sqlite_version}


def _verdict(row: dict, databases: Path) -> dict:
    path = databases / row["db_id"] / f"{row['db_id']}.sqlite"
    preds = row["pred"] if isinstance(row["pred"], list) else [row["pred"]]
    scored = [score_sql(path, row["gold"], pred) for pred in preds]
    vote = majority_vote([one.result for one in scored], preds)
    best = scored[vote or 0]
    fields = {name: getattr(best, name) for name in ("match", "match_bird", "status", "gold_status")}
    return fields | {"reason": best.result.reason} | ({"vote": vote} if isinstance(row["pred"], list) else {})


def main(arguments: list[str] | None = None) -> None:
    """Score the file and print totals with 95 % Wilson intervals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", type=Path, help="predictions, one JSON object a line")
    parser.add_argument("--databases", type=Path, required=True, help="folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--out", type=Path, required=True, help="verdicts, one JSON object a line")
    options = parser.parse_args(arguments)
    if not options.pairs.is_file() or options.out.resolve() == options.pairs.resolve():
        parser.error(f"pairs = {options.pairs}; expected a file, other than --out")
    totals: Counter[str] = Counter()
    with options.pairs.open("rb") as pairs, options.out.open("w", encoding="utf-8", newline="\n") as out:
        for line in filter(bytes.strip, pairs):
            row = score_line(line, options.databases)
            totals.update(rows=1, spider=row["match"], bird=row["match_bird"], errors="error" in row)
            totals.update({f"status {row['status']}": 1, "bad golds": row["gold_status"] not in ("ok", "error")})
            out.write(json.dumps(row) + "\n")
    for metric in ("spider", "bird"):
        low, high = wilson_interval(totals[metric], totals["rows"])
        share = totals[metric] / max(1, totals["rows"])
        print(f"{metric:7s} {totals[metric]} of {totals['rows']} = {share:.4f} [{low:.4f}, {high:.4f}]")
    rest = sorted((name, count) for name, count in totals.items() if count and name not in ("spider", "bird", "rows"))
    print(", ".join(f"{name} {count}" for name, count in rest), f"(SQLite {sqlite3.sqlite_version})")


if __name__ == "__main__":
    main()
