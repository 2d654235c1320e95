"""How many verdicts a second: the official evaluators against sqlenv's score_sql, in one process.

git clone https://github.com/taoyds/test-suite-sql-eval && pip install sqlparse tqdm
python benchmarks/official.py --official test-suite-sql-eval --pairs pairs.jsonl --databases spider/database

The pairs: a JSON object {"db_id", "gold", "pred"} a line. The contestants take turns of 100 rows, so that
what else the machine does is shared fairly; seconds are of CPU time. A few heavy queries rule the mean, so the median
row is told too. Spider: `eval_exec_match` with keep_distinct. BIRD: its rule in plain sqlite3, as its evaluator does it
(both queries on one connection, equal sets of rows); the official script adds a process and a time limit per row.
score_sql gives both verdicts at once. It runs a gold once, the official ones run it for every row: "cold" forgets it.
The official code has no limits: use pairs whose queries end, and a copy of the databases, for it opens them to write.
"""

import argparse
import importlib
import json
import sqlite3
import sys
import time
from contextlib import closing
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sqlenv import database
from sqlenv.reward import score_sql

TURN = 100  # rows


def bird_verdict(path: str, pred: str, gold: str) -> int:
    """BIRD's execution accuracy of one prediction: equal sets of rows; 0 if a query fails."""
    with closing(sqlite3.connect(path)) as connection:
        try:
            return int(set(connection.execute(pred).fetchall()) == set(connection.execute(gold).fetchall()))
        except (sqlite3.Error, sqlite3.Warning, ValueError):
            return 0


def contestants(official: str) -> dict:
    """Name -> function of (path, gold, pred) that gives the verdicts under (Spider's rule, BIRD's)."""
    sys.path.insert(0, official)
    eval_exec_match = importlib.import_module("exec_eval").eval_exec_match

    def spider(path: str, gold: str, pred: str) -> tuple[int]:
        return (eval_exec_match(path, pred, gold, False, True, False),)

    def both(path: str, gold: str, pred: str) -> tuple[int, int]:
        return *spider(path, gold, pred), bird_verdict(path, pred, gold)

    def ours(path: str, gold: str, pred: str) -> tuple[int, int]:
        verdict = score_sql(path, gold, pred)
        return int(verdict.match), int(verdict.match_bird)

    def cold(path: str, gold: str, pred: str) -> tuple[int, int]:
        database._run_gold.cache_clear()
        return ours(path, gold, pred)

    return {"official, Spider": spider, "official, Spider and BIRD": both, "score_sql": ours, "score_sql, cold": cold}


def main() -> None:
    """Score all pairs with each contestant in turns; print rows per second, ratios and agreement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--official", required=True, help="a clone of github.com/taoyds/test-suite-sql-eval")
    parser.add_argument("--pairs", required=True, help="a JSONL file of {db_id, gold, pred}")
    parser.add_argument("--databases", type=Path, required=True, help="folder of <db_id>/<db_id>.sqlite")
    args = parser.parse_args()

    lines = map(json.loads, Path(args.pairs).read_text("utf-8").splitlines())
    rows = [(f"{args.databases / x['db_id'] / x['db_id']}.sqlite", x["gold"], x["pred"]) for x in lines]
    functions = contestants(args.official)
    seconds, verdicts = ({name: [] for name in functions} for _ in range(2))
    for start in range(0, len(rows), TURN):
        for name, function in functions.items():
            for row in rows[start : start + TURN]:
                begin = time.process_time()
                verdicts[name].append(function(*row))
                seconds[name].append(time.process_time() - begin)

    first, second, *_ = seconds.values()
    for name, spent in seconds.items():
        ratios = f"{sum(first) / sum(spent):5.2f} times the first, {sum(second) / sum(spent):5.2f} times the second"
        row = f"median row {1000 * median(spent):.2f} ms, {median(first) / median(spent):.2f} times as fast"
        print(f"{name:26} {len(rows) / sum(spent):6.0f} rows/s: {ratios}; {row}")
    theirs, ours = verdicts["official, Spider and BIRD"], verdicts["score_sql"]
    for rule, metric in enumerate(("Spider", "BIRD")):
        same = sum(left[rule] == right[rule] for left, right in zip(theirs, ours, strict=True))
        print(f"{metric} verdicts that agree: {same} of {len(rows)}")


if __name__ == "__main__":
    main()
