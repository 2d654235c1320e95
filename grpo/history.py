"""A run directory, read back: what its files hold, as far as they are there. A killed run is a run, too."""

import io
import json
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from grpo.config import Config, load_config

FLAT = "frac_reward_zero_std"
FILES = ["summary.json", "eval-test-before.json", "eval-test-after.json", "metrics.jsonl", "samples.jsonl"]
GROUPS, BYTES = 600, 6_000_000  # of samples.jsonl, at most: in the reader, all runs together


@dataclass(frozen=True)
class RunData:
    """What a run directory holds, as far as it is there."""

    name: str  # the last two parts of its path: runs/quickstart
    config: Config  # the defaults where config.toml cannot be read
    config_text: str
    rows: list[dict]  # of metrics.jsonl: numbers, or None
    tests: list[dict]  # before, after
    summary: dict
    groups: list[dict]  # of samples.jsonl, those that the reader shows
    logged_steps: int  # so many steps have groups there
    notes: list[str]  # what is missing or torn


def read_run(folder: Path, share: int = 1) -> RunData:
    """Read a run directory; ValueError if it is none. share: so many runs divide the reader's limits."""
    if not any((folder / name).is_file() for name in ("config.toml", "metrics.jsonl")):
        raise ValueError(f"{folder} is no run; expected a folder with config.toml or metrics.jsonl, as train.py makes")
    files = (folder / name for name in (*FILES[:4], "config.toml"))
    *texts, log, config_text = (file.read_bytes() if file.is_file() else b"" for file in files)
    summary, *tests = map(parse, texts)
    lines = [parse(line) for line in log.split(b"\n") if line]
    rows = [{k: v if isinstance(v, int | float) else None for k, v in line.items()} for line in lines]
    rows = [row for row in rows if row.get("step") is not None]
    groups, logged_steps, torn = read_groups(folder / FILES[4], GROUPS // share, BYTES // share)
    missing = [name for name, found in zip(FILES, (summary, *tests, rows, groups), strict=True) if not found]
    notes = [f"missing, empty or torn: {', '.join(missing)}"] if missing else []
    counts = {"metrics.jsonl": len(lines) - len(rows), "samples.jsonl": torn}
    notes += [f"{name}: {count} torn or foreign line(s) left out" for name, count in counts.items() if count]
    try:
        config = load_config(folder / "config.toml")
    except (ValueError, OSError) as error:
        config, notes = Config(), [*notes, f"no config, so its defaults: {error}"]
    name, text = "/".join(folder.resolve().parts[-2:]), config_text.decode(errors="replace")
    return RunData(name, config, text, rows, tests, summary, groups, logged_steps, notes)


def parse(text: bytes) -> dict:
    """A JSON object, NaN and infinity as None (a browser reads neither); {} if it is torn or something else."""
    try:
        value = json.loads(text.decode(errors="replace"), parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_groups(file: Path, most_groups: int, most_bytes: int) -> tuple[list[dict], int, int]:
    """(groups of every step, or of every 2nd, 4th, ... where that is too much; steps in the file; torn lines)."""
    kept, steps, every, torn = [], set(), 1, 0
    with file.open("rb") if file.is_file() else io.BytesIO() as lines:  # the whole of it may not fit in memory
        for line in lines:
            group = parse(line)
            if not isinstance(group.get("step"), int) or not isinstance(group.get("completions"), list):
                torn += 1
                continue
            steps.add(group["step"])
            kept += [(group, len(line))] if (group["step"] - 1) % every == 0 else []
            while len(kept) > most_groups or sum(size for _, size in kept) > most_bytes:
                every *= 2
                fewer = [(group, size) for group, size in kept if (group["step"] - 1) % every == 0]
                kept = fewer if len(fewer) < len(kept) else kept[:-1]  # one step alone can be too much
    return [group for group, _ in kept], len(steps), torn


def dead_stretches(run: RunData) -> list[list[int]]:
    """The steps of every stretch in which, by the limit of [watch], nearly all groups were flat."""
    flat = {row["step"]: row[FLAT] or 0 for row in run.rows if FLAT in row}
    stretches = groupby(flat, lambda step: flat[step] >= run.config.watch.flat_groups)
    return [list(steps) for dead, steps in stretches if dead]
