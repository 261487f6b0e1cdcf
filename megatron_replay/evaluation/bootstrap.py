"""Percentile bootstrap intervals of a mean over problems, and of the paired difference of two runs.

Problems are drawn with replacement; the samples of a drawn problem come along as they are. A benchmark's problems are
the sample from what one wants to know of, and the values of n problems already differ by two things: how hard the
problems are, and which samples the model happened to draw (Var = Var_problems + Var_samples / k). Resampling within a
problem too would count the second one twice.
"""

from __future__ import annotations

import torch
from torch import Tensor

RESAMPLES = 10_000
LEVEL = 0.95
# drawn at once: positions of a problem in a resample, 8 bytes each
BLOCK = 1 << 22


def mean_interval(
    values: Tensor, *, generator: torch.Generator, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float]:
    """(low, high): the (1 - level) / 2 and (1 + level) / 2 quantiles of the mean of N values drawn from `values` [N].

    Float64 on the CPU; equal generators give equal intervals. With one problem both ends are its value: nothing is
    known of others. Raises ValueError for no values, values that are not finite, and numbers out of range.
    """
    x = values.detach().cpu().double()
    if x.dim() != 1 or x.numel() == 0:
        raise ValueError(f"values must be [N] with at least one problem, got {list(x.shape)}")
    if not bool(torch.isfinite(x).all()):
        raise ValueError(f"values must be finite, got {x[~torch.isfinite(x)][0].item()}")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    if not 0 < level < 1:
        raise ValueError(f"level must be in (0, 1), got {level}")
    n = x.numel()
    rows = max(1, BLOCK // n)
    means = []
    for at in range(0, resamples, rows):
        drawn = torch.randint(n, (min(rows, resamples - at), n), generator=generator)
        means.append(x[drawn].mean(1))
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    low, high = torch.quantile(torch.cat(means), ends).tolist()
    return low, high


def difference_interval(
    ours: Tensor, base: Tensor, *, generator: torch.Generator, resamples: int = RESAMPLES, level: float = LEVEL
) -> tuple[float, float]:
    """As `mean_interval`, of mean(ours - base) [N]: value i of both is of the same problem.

    A resample takes both runs' values of a problem, so what makes a problem hard for both cancels.
    """
    if ours.shape != base.shape:
        raise ValueError(f"base must have the {list(ours.shape)} of ours, got {list(base.shape)}")
    difference = ours.double() - base.double()
    return mean_interval(difference, generator=generator, resamples=resamples, level=level)
