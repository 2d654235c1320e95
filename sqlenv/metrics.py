"""Honest numbers about fractions: intervals, pass@k, and the paired test between two runs on the same questions."""

import math
import random
from collections import defaultdict


def wilson_interval(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a proportion (Wilson 1927); z = 1.96 gives 95 %. (0, 1) if n is 0.

    Example: (8, 10) -> (0.490, 0.943)
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes = {successes} of n = {n}; expected 0 <= successes <= n")
    if n == 0:
        return 0.0, 1.0
    p, shrink = successes / n, 1 + z * z / n
    centre = (p + z * z / (2 * n)) / shrink
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / shrink
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(
    values: list[float], groups: list[str], *, seed: int, samples: int = 1000
) -> tuple[float, float]:
    """95 % interval of the mean when whole groups (databases) are drawn again: questions of one database are alike.

    Example: all values equal 0.5 -> (0.5, 0.5)
    """
    if not values or len(values) != len(groups):
        raise ValueError(f"{len(values)} values with {len(groups)} groups; expected as many, at least one")
    by_group: dict[str, list[float]] = defaultdict(list)
    for value, group in zip(values, groups, strict=True):
        by_group[group].append(value)
    totals = [(sum(members), len(members)) for _, members in sorted(by_group.items())]
    rng, means = random.Random(seed), []
    for _ in range(samples):
        drawn = rng.choices(totals, k=len(totals))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    return means[int(0.025 * (samples - 1))], means[math.ceil(0.975 * (samples - 1))]


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that k of n samples, c of them right, hold a right one: 1 - C(n-c, k) / C(n, k) (arXiv:2107.03374, eq. 1).

    Example: (4, 1, 2) -> 0.5
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"n = {n}, c = {c}, k = {k}; expected 0 <= c <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p of the exact McNemar test; b, c: questions that only the first, only the second run got right.

    Example: (1, 5) -> 2 * (C(6,0) + C(6,1)) / 2^6 = 0.21875
    """
    n = b + c
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(b, c) + 1)) / 2**n)
