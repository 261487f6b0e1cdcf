"""Statistics of the GRPO loss: the columns that kernels fill, and the names and means made of them.

Dims: B age buckets, K = len(STATS), M = len(MAXIMA).
"""

from __future__ import annotations

import torch
from torch import Tensor

# sums over trained tokens or rollouts: microbatches and ranks add them
STATS = (
    "tokens",
    "rollouts",
    "ratio_sum",
    "clipped_low",
    "clipped_high",
    "dual_clipped",
    "log_ratio_clamped",
    "abs_log_ratio_sum",
    "abs_log_ratio_outliers",
    "kl_sum",
    "behavior_kl_sum",
    "entropy_sum",
    "seq_ratio_sum",
    "seq_ratio_sq_sum",
    "advantage_abs_sum",
)
# microbatches and ranks take the larger
MAXIMA = ("ratio_max", "abs_log_ratio_max")


def summarize_stats(stats: Tensor, maxima: Tensor) -> dict[str, float]:
    """Names and means of one row of stats [K] and maxima [M], or of all rows of [B, K] and [B, M] together.

    ess is the effective sample size of the rollouts as a fraction: (sum w)^2 / (n sum w^2), w the sequence ratios.
    Without tokens everything is 0. Copies to the CPU once.
    """
    if stats.shape[-1] != len(STATS) or stats.dim() > 2:
        raise ValueError(f"stats must be [{len(STATS)}] or [B, {len(STATS)}], got {list(stats.shape)}")
    if maxima.shape != (*stats.shape[:-1], len(MAXIMA)):
        raise ValueError(f"maxima must be {[*stats.shape[:-1], len(MAXIMA)]}, got {list(maxima.shape)}")
    if stats.dim() == 2:
        stats, maxima = stats.sum(0), maxima.amax(0)
    values = torch.cat([stats.double(), maxima.double()]).tolist()
    s = dict(zip(STATS + MAXIMA, values, strict=True))
    tokens, rollouts = max(s["tokens"], 1.0), max(s["rollouts"], 1.0)
    weight_sq = rollouts * s["seq_ratio_sq_sum"]
    return {
        "tokens": s["tokens"],
        "rollouts": s["rollouts"],
        "ratio_mean": s["ratio_sum"] / tokens,
        "ratio_max": s["ratio_max"],
        "clip_fraction": (s["clipped_low"] + s["clipped_high"]) / tokens,
        "clip_fraction_low": s["clipped_low"] / tokens,
        "clip_fraction_high": s["clipped_high"] / tokens,
        "dual_clip_fraction": s["dual_clipped"] / tokens,
        "log_ratio_clamp_fraction": s["log_ratio_clamped"] / tokens,
        "logprob_abs_diff_mean": s["abs_log_ratio_sum"] / tokens,
        "logprob_abs_diff_max": s["abs_log_ratio_max"],
        "logprob_outlier_count": s["abs_log_ratio_outliers"],
        "kl_mean": s["kl_sum"] / tokens,
        "behavior_kl_mean": s["behavior_kl_sum"] / tokens,
        "entropy_mean": s["entropy_sum"] / tokens,
        "ess": s["seq_ratio_sum"] ** 2 / weight_sq if weight_sq > 0 else 0.0,
        "advantage_abs_mean": s["advantage_abs_sum"] / rollouts,
    }
