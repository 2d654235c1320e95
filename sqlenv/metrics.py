"""Honest numbers about fractions: intervals, pass@k, and the paired test between two runs on the same questions."""

import math
import random
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion (1927), 95 % by default. Example: (8, 10) -> (0.490, 0.943)."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes = {successes} of n = {n}; expected 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: list[float], groups: list[str], seed: int, samples: int = 1000) -> tuple[float, float]:
    """95 % interval of a mean, drawing whole groups (databases): their questions are alike. All 0.5 -> (0.5, 0.5)."""
    if not values or len(values) != len(groups):
        raise ValueError(f"{len(values)} values with {len(groups)} groups; expected as many, at least one")
    counts, sums = Counter(groups), Counter()
    for value, group in zip(values, groups, strict=True):
        sums[group] += value
    names, rng, means = sorted(counts), random.Random(seed), []
    for _ in range(samples):
        drawn = rng.choices(names, k=len(names))
        means.append(sum(map(sums.get, drawn)) / sum(map(counts.get, drawn)))
    means.sort()
    return means[int(0.025 * (samples - 1))], means[math.ceil(0.975 * (samples - 1))]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one (arXiv:2107.03374, eq. 1). (4, 1, 2) -> 0.5."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n = {n}, c = {c}, k = {k}; expected 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p of the exact McNemar test; b, c: questions that one run alone got right. (1, 5) -> 2 * 7 / 2^6."""
    n = b + c
    if n <= 1000:
        return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(b, c) + 1)) / 2**n)
    whole = math.lgamma(n + 1) - n * math.log(2)  # logarithms: these binomials have thousands of digits
    logs = (whole - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(min(b, c) + 1))
    return min(1.0, 2 * math.fsum(map(math.exp, logs)))


def smallest_difference(n: int, discordant: int) -> float:
    """The smallest difference in accuracy that n questions can show (McNemar, p < 0.05) if two runs differ on so many.

    Six is the least: 2 / 2^6 = 0.031. Example: 500 questions, 20 of them answered differently -> 10 / 500 (15 to 5)
    """
    leads = range(discordant % 2, discordant + 1, 2)
    place = bisect_left(leads, True, key=lambda x: mcnemar_exact((discordant - x) // 2, (discordant + x) // 2) < 0.05)
    return (leads[place] if place < len(leads) else 6) / n


def with_interval(name: str, values: list) -> dict[str, float]:
    """A share with its 95 % Wilson interval. Example: [1, 0] -> {x: 0.5, x_low: 0.0945, x_high: 0.9055}"""
    low, high = wilson_interval(sum(values), len(values))
    return {name: sum(values) / max(1, len(values)), f"{name}_low": low, f"{name}_high": high}


def accuracy_by(labels: Iterable[str], values: Iterable[bool]) -> dict[str, dict]:
    """Share, interval and number of each label's values, in sorted order. Example: "aab", 1, 0, 1 -> a .5, b 1.0"""
    groups: dict[str, list[bool]] = defaultdict(list)
    for label, value in zip(labels, values, strict=True):
        groups[label].append(value)
    return {label: {"n": len(groups[label])} | with_interval("accuracy", groups[label]) for label in sorted(groups)}


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed. Example: [1, 2, 3, 4], 0.5 -> 2"""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
