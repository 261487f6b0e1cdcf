"""avg@k and pass@k of one problem, from n samples of which c are correct."""

from __future__ import annotations

import math
from functools import lru_cache


def avg_at_k(samples: int, correct: int) -> float:
    """c / n: the chance that one sample is correct, estimated from all k = n of them. Raises as `pass_at_k` does."""
    return pass_at_k(samples, correct, 1)


@lru_cache(maxsize=1 << 16)
def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of k samples is correct, without bias (Chen et al. 2021, arXiv 2107.03374):

        pass@k = 1 - C(n - c, k) / C(n, k)

    The quotient is prod_{i < k} (1 - c / (n - i)), and, c and k exchanged, prod_{i < c} (1 - k / (n - i)). The shorter
    one is taken, as a sum of logarithms: binomials of thousands would overflow, and 1 - p would lose a small result.
    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    n, c = samples, correct
    if n < 1:
        raise ValueError(f"samples must be at least 1, got {n}")
    if not 0 <= c <= n:
        raise ValueError(f"correct must be in [0, {n}], the samples, got {c}")
    if not 1 <= k <= n:
        raise ValueError(f"k must be in [1, {n}], the samples, got {k}")
    if k > n - c:
        # whichever k are taken, a correct one is among them
        return 1.0
    if k == 1:
        return c / n
    short, long = min(c, k), max(c, k)
    return -math.expm1(math.fsum(math.log1p(-long / (n - i)) for i in range(short)))


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself: the k that a result reports. Raises ValueError below 1."""
    if most < 1:
        raise ValueError(f"most must be at least 1, got {most}")
    return [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
