"""Memory of the ranks over the steps, and its slope by a fit that single jumps do not move."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median

Series = list[tuple[int, int]]  # (steps that are done, bytes)
FEWEST = 10  # samples that a slope is fitted to


def slope(series: Sequence[tuple[int, int]], skip: int) -> float | None:
    """Theil-Sen: the median of the slopes between any two samples, in bytes per step.

    The first `skip` steps of the process are left out. None where fewer than FEWEST samples remain.
    """
    kept = [(step, size) for step, size in series if step >= series[0][0] + skip]
    if len(kept) < FEWEST:
        return None
    return float(median((b - a) / (t - s) for (s, a), (t, b) in combinations(kept, 2) if t > s))


def median_slope(slopes: Sequence[float]) -> float | None:
    """Of several lives of a rank; None where none was long enough."""
    return median(slopes) if slopes else None
