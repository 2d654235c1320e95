"""Which questions can teach: the pass-rate filter before RL, and the gate that says whether RL has anything to do.

A group whose completions all succeed, or all fail, carries no gradient. So K completions of every training question
are sampled from the starting policy, and with p = successes / K the questions fall into five classes:

    none  p = 0      low  0 < p <= low      kept  low < p < high      high  high <= p < 1      all  p = 1

With high above 1 the questions that are always answered are kept, too: what not to do, and configs/mastered.toml does.

Measured once: the successes go to a file that a later run of the same questions can read instead of sampling.
"""

import json
from collections import Counter
from pathlib import Path

from model.config import read_json, write_text

CLASSES = ("none", "low", "kept", "high", "all")


def pass_rate_class(successes: int, k: int, low: float, high: float) -> str:
    """The class of a question. Example: of 8, low 0.2, high 0.8: 0 none, 1 low, 2 to 6 kept, 7 high, 8 all"""
    rate = successes / k
    if low < rate < high:
        return "kept"
    if successes in (0, k):
        return "all" if successes else "none"
    return "low" if rate <= low else "high"


def class_counts(successes: list[int], k: int, low: float, high: float) -> dict[str, int]:
    """How many questions each class has; they sum to n. Example: 0, 4, 8 of 8 -> none 1, kept 1, all 1, others 0"""
    counts = Counter(pass_rate_class(s, k, low, high) for s in successes)
    return {name: counts[name] for name in CLASSES}


def write_pass_rates(file: Path, keys: list[str], successes: list[int], k: int, low: float, high: float) -> None:
    """Keep what was measured: the five counts, and the successes of every question under its key."""
    saved = {"num_generations": k, "low": low, "high": high, "counts": class_counts(successes, k, low, high)}
    write_text(file, json.dumps(saved | {"successes": dict(zip(keys, successes, strict=True))}) + "\n")


def read_pass_rates(file: Path, keys: list[str], k: int) -> list[int]:
    """The successes of the questions, in their order; ValueError if the file was made with another K or lacks some."""
    saved = read_json(file)
    measured = saved.get("successes", {})
    missing = sum(key not in measured for key in keys)
    if missing or saved.get("num_generations") != k:
        found = f"num_generations {saved.get('num_generations')}, {missing} of {len(keys)} questions missing"
        raise ValueError(f'{file}: {found}; expected {k} and all of them, or filter.file = "" to measure again')
    return [measured[key] for key in keys]


def gate(greedy: float, half_width: float, pass_at_k: float, k: int) -> str:
    """What GRPO can hope for, in words, from validation before RL: it makes likely what sampling finds already.

    half_width: of the interval of greedy accuracy. Where it was tried, pass@k minus greedy predicted the gain best.
    Example: greedy 0.1 +- 0.04, pass@8 0.72 -> "room: +62.0 points between greedy 0.100 and pass@8 0.720"
    """
    figures = f"{100 * (pass_at_k - greedy):+.1f} points between greedy {greedy:.3f} and pass@{k} {pass_at_k:.3f}"
    if pass_at_k < 0.05:
        return f"no signal: {figures}; hardly any group will hold a success: supervise first, or ask easier questions"
    if pass_at_k - greedy <= half_width:
        return f"no room: {figures}, inside the interval of greedy accuracy: harder questions, or more supervision"
    return f"room: {figures}"
