"""Score a file of predictions, without a model: accuracies, votes, errors, cost, and the comparison of two files.

    python -m sqlenv.score PREDICTIONS --databases DIR --out VERDICTS.jsonl      databases: DIR/<db_id>/<db_id>.sqlite
    python -m sqlenv.score PREDICTIONS --data SOURCE --compare OTHER_VERDICTS.jsonl

PREDICTIONS is JSON lines of {"db_id", "gold", "pred"}; with "db", the path of a SQLite file (from the predictions'
folder), no --databases are needed. "pred" is raw SQL, or a list, whose majority vote is the answer: "vote" is its
place in the list (null: none executed). "hits" says which queries are right. With --data, a dataset that
sqlenv/datasets.py loads, the golds come from there, and PREDICTIONS may also be a text file with one query a line
(what follows a tab is dropped; an empty line is an empty query), or a JSON list of queries in the order of the
questions, or BIRD's JSON object, whose keys are their numbers.
VERDICTS repeats each row in order and adds the verdict. A bad row gets an "error", counts as wrong, and stops nothing.
"""

import argparse
import json
import sqlite3
import sys
import time
from functools import partial
from pathlib import Path

from sqlenv.database import run_gold
from sqlenv.datasets import load_examples, question_files, read_questions
from sqlenv.errors import error_class
from sqlenv.report import cost, describe, load_result, measure, paired_lines, printable
from sqlenv.reward import score_sql
from sqlenv.voting import majority_vote
from sqlenv.workers import in_order

OURS = {"match", "match_bird", "vote", "vote_match", "hits", "outcome", "error", "seconds"}  # not taken from a file


def score_row(row: object, databases: Path) -> dict:
    """The row with match, match_bird, status, gold_status, outcome, reason, hits, seconds; vote if "pred" is a list.

    databases: the folder of db_ids, or what "db" is relative to. Never raises: a bad row has an "error".
    """
    given = {k: v for k, v in row.items() if k not in OURS} if isinstance(row, dict) else {"line": row}
    listed, started = isinstance(given.get("pred"), list), time.perf_counter()
    preds = given["pred"] if listed else [given.get("pred")]
    verdict = {"match": False, "match_bird": False, "status": "error", "gold_status": "error", "outcome": "bad row"}
    verdict["hits"] = [False] * max(1, len(preds))
    try:
        if not isinstance(row, dict):
            raise ValueError(f"row = {row!r:.60}; expected a JSON object")
        place = "db" if "db" in row else "db_id"
        for key, values in ((place, [row.get(place)]), ("gold", [row.get("gold")]), ("pred", preds)):
            if not values or not all(isinstance(value, str) for value in values):
                raise ValueError(f"{key} = {row.get(key)!r:.60}; expected a string")
        path = databases / row["db"] if "db" in row else databases / row["db_id"] / f"{row['db_id']}.sqlite"
        scored = [score_sql(path, row["gold"], pred) for pred in preds]
        vote = majority_vote([one.result for one in scored], preds)
        answer = scored[vote or 0]
        fields = ("match", "match_bird", "status", "gold_status")
        gold_reason = run_gold(path, row["gold"]).reason
        verdict |= {name: getattr(answer, name) for name in fields} | {"reason": gold_reason or answer.result.reason}
        verdict |= {"outcome": error_class(path, row["gold"], answer), "hits": [one.match for one in scored]}
        verdict |= {"vote": vote} if listed else {}
        if "db" in row:
            verdict["db_id"] = row.get("db_id") or path.stem
    except ValueError as error:
        verdict["error"] = str(error)
    verdict |= {"seconds": time.perf_counter() - started, "sqlite_version": sqlite3.sqlite_version}
    return given | verdict


def read_predictions(path: Path) -> list:
    """The rows of a predictions file: JSON lines, a JSON list or object, or text with one query a line.

    A line that is no JSON stays a string. Example: the text "SELECT 1\\tshop" -> ["SELECT 1"]
    """
    text = path.read_bytes().decode("utf-8-sig", "replace")
    if path.suffix == ".json":
        try:
            rows = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; expected one JSON list or object (or name it .jsonl)") from None
        if isinstance(rows, dict):
            if sorted(rows, key=lambda key: (len(key), key)) != [*map(str, range(len(rows)))]:
                raise ValueError(f"{path}: keys {list(rows)[:3]}...; expected the numbers of the questions, from 0")
            rows = [rows[str(number)] for number in range(len(rows))]
        return [row.split("\t")[0] if isinstance(row, str) else row for row in rows]
    lines = text.removesuffix("\n").split("\n")
    if path.suffix == ".jsonl":
        return [_json_line(line) for line in lines if line.strip()]
    return [line.rstrip("\r").split("\t")[0] for line in lines]


def _json_line(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # too deep
        return line.strip()


def join(predictions: list, source: str, split: str) -> list[dict]:
    """Predictions in the order of a dataset's questions -> complete rows.

    There may be one for each question of the file, or for each that can be used. Raises ValueError if there are others,
    or if a row names another question or database than the one in its place.
    """
    examples, files = load_examples(source, split), question_files(source)
    by_place = len(predictions) == len(read_questions(files.get(split, files.get("train"))))
    if not by_place and len(predictions) != len(examples):
        wanted = f"one for each of the {len(examples)} questions of {source} ({split})"
        raise ValueError(f"{len(predictions)} predictions; expected {wanted}, or for each of the question file")
    rows = []
    for number, example in enumerate(examples):
        pred = predictions[example.row if by_place else number]
        if isinstance(pred, dict):
            for key in ("db_id", "question"):
                wanted = getattr(example, key)
                if str(pred.get(key, wanted)).strip() != wanted:
                    raise ValueError(f"prediction {number + 1}: {key} = {pred[key]!r}; expected {wanted!r}")
            pred = pred.get("pred")
        row = {"db_id": example.db_id, "question": example.question, "gold": example.gold, "pred": pred}
        rows.append(row | {"db": str(example.database.resolve()), "difficulty": example.difficulty})
    return rows


def score_file(path: Path, options: argparse.Namespace) -> list[dict]:
    """The verdicts on a file of predictions, in order."""
    rows = read_predictions(path)
    if options.data:
        rows = join(rows, options.data, options.split)
    folder = options.databases or path.parent
    return list(in_order(partial(score_row, databases=folder), rows, workers=options.workers))


def same_file(a: Path, b: Path) -> bool:
    """Whether two paths lead to one existing file, links included."""
    return a.exists() and a.samefile(b)


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 if no row could be scored; a mistake in what the user gave is one line on stderr, and 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("predictions", type=Path, help="JSON lines; with --data also text or JSON")
    parser.add_argument("--databases", type=Path, help="folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--data", help="a dataset, or question file, with golds and databases (sqlenv/datasets.py)")
    parser.add_argument("--split", default="test", help="which of its sets")
    parser.add_argument("--out", type=Path, help="verdicts, one JSON object a line")
    parser.add_argument("--compare", type=Path, help="verdicts or a result of another run on the same questions")
    parser.add_argument("--workers", type=int, default=0, help="processes that run queries; 0 or 1: this one")
    parser.add_argument("--hourly-price", type=float, default=0.0, help="of the machine, for the cost line")
    options = parser.parse_args(arguments)
    try:
        read = [Path(p) for p in (options.predictions, options.compare, options.data) if p and Path(p).is_file()]
        if options.predictions not in read:
            raise ValueError(f"predictions = {options.predictions}; expected a file")
        if options.out and (options.out.suffix in (".sqlite", ".db") or any(same_file(options.out, p) for p in read)):
            raise ValueError(f"--out {options.out}; expected a new file, none that is read")
        if options.out and not options.out.parent.is_dir():
            raise ValueError(f"--out {options.out}: no such folder")
        if options.databases and not options.databases.is_dir():
            raise ValueError(f"databases = {options.databases}; expected a folder of <db_id>/<db_id>.sqlite")
        other = None
        if options.compare:
            other = load_result(options.compare) or measure(score_file(options.compare, options))
        started = time.perf_counter()
        rows = score_file(options.predictions, options)
        seconds = time.perf_counter() - started
        if options.out:
            shown = ({key: value for key, value in row.items() if key != "seconds"} for row in rows)
            text = "".join(json.dumps(row) + "\n" for row in shown)
            options.out.write_text(text, encoding="utf-8", newline="\n")
        executions = sum(len(row["hits"]) for row in rows if "error" not in row)
        latencies = [row["seconds"] for row in rows]
        result = measure(rows) | cost(seconds, latencies, executions, options.hourly_price)
        print(printable(describe(result)))
        for what, found in {
            "bad rows": [row["error"] for row in rows if "error" in row],
            "failing golds": [row["reason"] for row in rows if row["gold_status"] not in ("ok", "error")],
        }.items():
            if found:
                print(printable(f"  {len(found)} {what} count as wrong; the first: {found[0]}"))
        if other:
            print("\n".join(paired_lines(other, result, f"against {options.compare}")))
        print(f"SQLite {sqlite3.sqlite_version}")
        return int(bool(rows) and all("error" in row for row in rows))  # 1: no row could be scored
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
