"""One question about one database: what every source is read into, and all that prompt, reward and metric look at."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Example:
    """One question about one database. `difficulty` is the source's label; synthetic questions put their family."""

    question: str
    gold: str  # the SQL whose rows are right
    db_id: str
    database: Path  # the SQLite file
    evidence: str = ""  # a hint that belongs to the question (BIRD)
    difficulty: str = ""
    target: str = ""  # the SQL text that SFT teaches; the gold if empty
    row: int = 0  # its place in the question file
