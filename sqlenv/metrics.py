"""Honest numbers about fractions: intervals, pass@k, and the paired test between two runs on the same questions."""

import math
import random
from collections import Counter


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
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(b, c) + 1)) / 2**n)
