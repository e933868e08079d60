"""How far a median of few rounds can be trusted."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

CONFIDENCE = 0.95


def paired_ratios(others: Iterable[float], own: Iterable[float]) -> list[float]:
    """Divide another's times by one's own, round by round: speeds relative to the other's in the same rounds."""
    return [other / mine for other, mine in zip(others, own)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Bound the median of what ``values`` are drawn from, at 95 % confidence and for any distribution.

    The k-th smallest and the k-th largest value, with the largest k for which at most k − 1 of n fair coins show
    heads in 2.5 % of cases: the interval that belongs to the sign test (Conover, Practical Nonparametric Statistics,
    3rd edition, section 3.2). Fewer than 6 values have no such k: then the smallest and the largest.
    """
    ordered, count = sorted(values), len(values)
    k, tail = 0, 1 / 2**count
    while tail <= (1 - CONFIDENCE) / 2:
        k += 1
        tail += math.comb(count, k) / 2**count
    k = max(k, 1)
    return ordered[k - 1], ordered[count - k]
