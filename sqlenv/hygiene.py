"""What is wrong with a set of questions, before anyone trains or reports on it.

    of a database   missing, empty, a Git LFS pointer, not SQLite or corrupt, a live -wal or -journal beside it, locked
    of a gold       fails; returns no rows; its result is not determined (stability.py)
    of a question   duplicate: the same database, gold and words as an earlier one

Running 7,000 golds takes seconds, so the outcome can be kept under the hash of everything that it depends on.
"""

import hashlib
import json
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from sqlenv.database import run_gold, run_sql
from sqlenv.example import Example
from sqlenv.stability import undetermined

RULES = 1  # of _check_golds: count this up when they change, so that no cached outcome is used
FAULTS = {  # of a database, by words of the error that run_sql raises for it
    "No such file": "missing",
    "found b''": "empty",
    "Git LFS": "is a Git LFS pointer",
    "-wal or -journal": "has a live -wal or -journal",
    "": "not SQLite or corrupt",
}
MAX_HASHED = 64_000_000  # bytes; a larger database (BIRD has 33 GB) is known by its size, time stamp and first 64 KiB


def check(file: Path, examples: list[Example], cache: Path | None, progress: Callable = iter) -> dict[str, list[int]]:
    """The rows of a question file with each defect; with a cache folder, golds are run only if something changed.

    A database's fault is looked for every time: a lock is not in the bytes that are hashed.
    Example: two equal questions whose gold fails -> {"gold fails (sql_error)": [0, 1], "duplicate": [1]}
    """
    faults = {database: database_fault(database) for database in dict.fromkeys(e.database for e in examples)}
    if cache is None:
        return _check_golds(examples, faults, progress)
    parts = [str(RULES), sqlite3.sqlite_version, _digest(file)]
    parts += [fault or _digest(database, MAX_HASHED) for database, fault in faults.items()]
    stored = Path(cache) / f"golds-{hashlib.sha256(' '.join(parts).encode()).hexdigest()}.json"
    with suppress(OSError, ValueError, TypeError, AttributeError):  # none yet, or damaged
        findings = json.loads(stored.read_bytes())
        if all(type(row) is int for rows in findings.values() for row in rows):
            return findings
    findings = _check_golds(examples, faults, progress)
    stored.parent.mkdir(parents=True, exist_ok=True)
    temporary = stored.with_suffix(f".{os.getpid()}")  # moved into place when complete: runs may share the folder
    temporary.write_text(json.dumps(findings), encoding="utf-8")
    os.replace(temporary, stored)
    return findings


def _digest(path: Path, limit: float = float("inf")) -> str:
    stat = path.stat()
    with path.open("rb") as file:
        if stat.st_size <= limit:
            return hashlib.file_digest(file, "sha256").hexdigest()
        return f"{stat.st_size} {stat.st_mtime_ns} {hashlib.sha256(file.read(65_536)).hexdigest()}"


def _check_golds(examples: list[Example], faults: dict[Path, str], progress: Callable) -> dict[str, list[int]]:
    findings, reasons, seen = defaultdict(list), {}, set()
    for e in progress(examples):
        gold = (e.database, e.gold)
        if gold not in reasons:  # Spider has most golds twice
            result = run_gold(*gold) if not faults[e.database] else None
            if result is None or result.status != "ok":
                reasons[gold] = [faults[e.database] or f"gold fails ({result.status})"]
            else:
                choice = undetermined(*gold)
                reasons[gold] = ["gold without rows"] * (not result.rows) + [f"undetermined, {choice}"] * bool(choice)
        question = (*gold, " ".join(e.question.casefold().split()))
        for reason in reasons[gold] + ["duplicate"] * (question in seen):
            findings[reason].append(e.row)
        seen.add(question)
    return findings


def database_fault(path: Path) -> str:
    """Why no question of a database can be used; "" if they can."""
    try:
        tables = run_sql(path, "SELECT 1 FROM sqlite_master WHERE type = 'table'").rows
        with path.open("rb") as file:
            wal = file.read(20)[18:] == b"\2\2"
        if not wal:  # who writes locks the file itself, and immutable=1 would ignore it
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=0)) as connection:
                connection.execute("SELECT 1 FROM sqlite_master")
    except ValueError as error:
        return next(f"database {fault}" for words, fault in FAULTS.items() if words in str(error))
    except sqlite3.Error as error:  # anything else than busy: a file system without locks
        return "database locked" * error.sqlite_errorname.startswith("SQLITE_BUSY")
    return "" if tables else "database empty"
