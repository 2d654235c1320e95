"""From verdicts to figures: accuracies with intervals, tables, the paired test between two runs, and what it cost.

One answer is one dict: db_id, difficulty, question, gold, match (Spider's rule), match_bird, outcome (errors.py); and
where several samples were drawn, `hits` (is each right?) and, unless it is `match`, `vote_match` (is the vote right?).
"""

import hashlib
import json
from collections import Counter
from pathlib import Path

from sqlenv.metrics import (
    accuracy_by,
    bootstrap_interval,
    mcnemar_exact,
    pass_at_k,
    percentile,
    smallest_difference,
    wilson_interval,
    with_interval,
)

WORST = 5  # how many databases `describe` shows; the result holds all
FEW = 5  # fewer databases than this say nothing about databases: the bootstrap then draws questions


def measure(answers: list[dict]) -> dict:
    """Everything about the answers that is no cost.

    Returns n, databases; execution_accuracy, bird_accuracy and, where all answers hold k samples, pass@k and vote@k,
    each with `_low` and `_high` (Wilson, 95 %); mean@k, the accuracy of a single sample, and bootstrap_low and
    bootstrap_high of execution_accuracy, by a bootstrap that draws whole databases, since their questions are alike;
    outcomes; by_difficulty and by_database; one number a question, in order: `correct` and `votes` (0 or 1), `hits`
    (how many of the k = num_generations samples are right); and `questions`, a hash of what was asked: the paired test
    needs the same questions.
    Example: two answers, one right -> execution_accuracy 0.5, [0.0945, 0.9055]
    """
    correct, groups = [bool(a["match"]) for a in answers], [str(a.get("db_id")) for a in answers]
    result = {"n": len(answers), "databases": len(set(groups))} | with_interval("execution_accuracy", correct)
    units = groups if len(set(groups)) >= FEW else [str(i) for i in range(len(answers))]
    low, high = _resampled([float(c) for c in correct], units)
    result |= {"bootstrap_low": low, "bootstrap_high": high}
    result |= with_interval("bird_accuracy", [bool(a["match_bird"]) for a in answers])
    hits = [a.get("hits") or [a["match"]] for a in answers]
    if (k := max(map(len, hits), default=1)) > 1:
        shares = [sum(h) / len(h) for h in hits]
        low, high = _resampled(shares, units)
        result |= {f"mean@{k}": sum(shares) / len(shares), f"mean@{k}_low": low, f"mean@{k}_high": high}
        if all(len(h) == k for h in hits):
            result |= with_interval(f"pass@{k}", [pass_at_k(k, sum(h), k) for h in hits])
            votes = [bool(a.get("vote_match", a["match"])) for a in answers]
            result |= with_interval(f"vote@{k}", votes)
            result |= {"num_generations": k, "hits": [*map(sum, hits)], "votes": [*map(int, votes)]}
    result["outcomes"] = dict(Counter(a["outcome"] for a in answers).most_common())
    difficulties = [str(a.get("difficulty") or "") for a in answers]
    result["by_difficulty"] = accuracy_by([d or "(none)" for d in difficulties], correct) if any(difficulties) else {}
    result["by_database"] = accuracy_by(groups, correct)
    asked = json.dumps([[a.get("db_id"), a.get("gold")] for a in answers])
    return result | {"questions": hashlib.sha256(asked.encode()).hexdigest()[:16], "correct": [*map(int, correct)]}


def _resampled(values: list[float], units: list[str]) -> tuple[float, float]:
    """The bootstrap interval; Wilson's where all units are alike, since resampling them would give no width at all."""
    low, high = bootstrap_interval(values, units, seed=0) if values else (0.0, 1.0)
    return (low, high) if low < high else wilson_interval(round(sum(values)), len(values))


def cost(seconds: float, latencies: list[float], executions: int, hourly_price: float = 0.0, **others) -> dict:
    """The cost of an evaluation: seconds in all, p50 and p95 of the questions' own, executions, money (if priced).

    Example: 1,800 seconds at 2.0 an hour -> price 1.0
    """
    result = {**others, "sql_executions": executions, "seconds": round(seconds, 2)}
    if latencies:
        result |= {"latency_p50": percentile(latencies, 0.5), "latency_p95": percentile(latencies, 0.95)}
    return result | ({"price": seconds / 3600 * hourly_price} if hourly_price else {})


def describe(result: dict) -> str:
    """A measured result in a few lines: every accuracy with its interval, a vote beside the single attempts."""

    def interval(values: dict, name: str) -> str:
        return f"[{values[f'{name}_low']:.3f}, {values[f'{name}_high']:.3f}]"

    lines = [f"{result['n']} questions on {result['databases']} databases"]
    lines += [f"  NOTE: {result['note']}"] if result.get("note") else []
    for key in result:
        if f"{key}_low" in result:
            single = " (one sampled attempt)" if key.startswith("mean@") else ""
            lines.append(f"  {key:<20} {result[key]:.3f}  {interval(result, key)}{single}")
        if key == "execution_accuracy" and result["databases"] >= FEW:
            lines.append(f"  {'  over databases':<20}        {interval(result, 'bootstrap')} (bootstrap)")
    lines.append("  outcomes: " + ", ".join(f"{name} {count}" for name, count in result["outcomes"].items()))
    worst = sorted(result["by_database"].items(), key=lambda item: item[1]["accuracy"])[:WORST]
    for title, table in (("by difficulty", result["by_difficulty"].items()), ("worst databases", worst)):
        lines += [f"  {title}"] if table else []
        lines += [f"    {name:<18} {t['accuracy']:.3f}  {interval(t, 'accuracy')} n {t['n']}" for name, t in table]
    parts = [f"{result['num_tokens']:,} tokens decoded"] if "num_tokens" in result else []
    parts += [f"{result['parameter_passes']:.2e} parameter passes"] if "parameter_passes" in result else []
    parts += [f"{result['sql_executions']:,} SQL executions", f"{result['seconds']} s"]
    if "latency_p50" in result:
        parts.append(f"latency p50 {result['latency_p50']:.3g} s, p95 {result['latency_p95']:.3g} s")
    parts += [f"price {result['price']:.4f}"] if "price" in result else []
    return "\n".join([*lines, f"  cost: {', '.join(parts)}"])


def printable(text: str) -> str:
    """Text without lone surrogates, which a database or a file may hold and no terminal can show."""
    return text.encode("utf-8", "backslashreplace").decode()


def paired(before: dict, after: dict, of: str = "correct") -> tuple[float, float, str]:
    """(points of accuracy, p, both in words): the exact McNemar test of two results on the same questions.

    of: "correct" (greedy), "votes", or "hits": a question is then gained if more of its samples are right, and the test
    is the sign test, which McNemar's is too. Raises ValueError if the questions differ.
    Example: before right on 1 of 8 questions, after on those and 6 more -> 75 points, p = 2 / 2^6
    """
    key = "questions"
    if len(before[of]) != len(after[of]) or before.get(key, "") != after.get(key, before.get(key, "")):
        sizes = f"{len(before[of])} and {len(after[of])} questions"
        raise ValueError(f"the results are about different questions ({sizes}); expected the same, in the same order")
    pairs = [(int(b), int(a)) for b, a in zip(before[of], after[of], strict=True)]
    gained, lost, n = sum(b < a for b, a in pairs), sum(b > a for b, a in pairs), max(1, len(pairs))
    samples = before["num_generations"] if of == "hits" else 1
    points, p = 100 * sum(a - b for b, a in pairs) / n / samples, mcnemar_exact(gained, lost)
    test = "sign test" if of == "hits" else "McNemar"
    words = f"gained {gained}, lost {lost} of {len(pairs)} questions, exact {test} p = {p:.2g}"
    if p >= 0.05 and of != "hits":
        least = 100 * smallest_difference(n, gained + lost)
        words += f"; the least that could show is {least:.1f} points" if n >= 6 else "; too few to show anything"
    return points, p, words


def paired_lines(before: dict, after: dict, names: str) -> list[str]:
    """The paired tests of all that two results have in common, a line each; names: "B against A"."""
    k, lines = before.get("num_generations"), []
    sampled = {"hits": f"mean@{k}, ", "votes": f"vote@{k}, "} if k and k == after.get("num_generations") else {}
    for of, name in ({"correct": ""} | sampled).items():
        points, _, words = paired(before, after, of)
        lines.append(f"{name}{names}: {points:+.1f} points ({words})")
    return lines


def load_result(path: Path) -> dict | None:
    """A result to compare with: an evaluation's JSON, or the measure of sqlenv.score's verdicts; None if neither."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        return rows[0] if len(rows) == 1 and set(rows[0].get("correct", "no")) <= {0, 1} else measure(rows)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
