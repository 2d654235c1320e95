"""The prompt of a question: chat messages made from the database and the question, never (but see LEAKS) from the gold.

    [system: the config's text, if any: the dialect, "answer in one ```sql block"]
    user:  <schema>
           evidence: <hint>          (only if the example has one)
           question: <question>

The schema comes first, so that the questions of one database share a long token prefix. Text like <|im_end|> in it or
in a question would be encoded as that control token. So every `<|` of the user message becomes `< |`: as readable, but
a name or value that really contains `<|` can then not be copied (no database of Spider has one in its schema).
"""

from functools import lru_cache
from pathlib import Path

from sqlenv.database import run_gold
from sqlenv.example import Example
from sqlenv.schema import read_schema, render_schema, trim_schema

LEAKS = "schema = gold: the prompt leaks the gold's tables and columns"  # print it with every figure made that way


def build_messages(
    example: Example, *, style: str = "compact", system: str = "", sample_values: int = 0, schema: str = "full"
) -> list[dict]:
    """Chat messages [{"role", "content"}] that ask for the example's SQL; a "full" `schema` never looks at the gold.

    `style` and `sample_values` are render_schema's; no `system` text, no system message. A "gold" `schema` LEAKS the
    answer, for an ablation: only what the gold reads is shown (all, if that is no table). Any other is a ValueError.
    Example: question "list every x", a database with `CREATE TABLE a (x INTEGER PRIMARY KEY)` ->
        [{"role": "user", "content": "table a ( x integer key )\\nquestion: list every x"}]
    """
    if schema not in ("full", "gold"):
        raise ValueError(f'schema = {schema!r}; expected "full" or "gold"')
    path = example.database
    reads = run_gold(path, example.gold).reads if schema == "gold" else frozenset()  # no reads: nothing is cut
    text = _schema_text(path, path.stat().st_mtime_ns if path.is_file() else 0, style, sample_values, reads)
    evidence = f"evidence: {example.evidence.strip()}\n" if example.evidence.strip() else ""
    content = neutralise(f"{text}\n{evidence}question: {example.question.strip()}")
    return [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": content}]


def target_completion(example: Example) -> str:
    """The answer that SFT teaches: the target, else the gold, in one block. "select 1" -> "```sql\\nselect 1\\n```"."""
    return f"```sql\n{example.target or example.gold}\n```"


def neutralise(text: str) -> str:
    """Text in which no ChatML control token can be recognised. `<|im_end|>` -> `< |im_end|>`."""
    return text.replace("<|", "< |")


@lru_cache(maxsize=256)  # questions come grouped by database; the time stamp notices a rebuilt file
def _schema_text(database: Path, mtime_ns: int, style: str, sample_values: int, reads: frozenset) -> str:
    return render_schema(trim_schema(read_schema(database), reads), style, sample_values)
