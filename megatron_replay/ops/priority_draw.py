"""Which stored rollouts are drawn: weights, random keys, the largest of them.

Dims: C stored rollouts, n rollouts asked for, m <= n rollouts drawn.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_replay.ops import backend as backends

ReplayPriority = Literal["abs-advantage", "group-std", "uniform"]
MAX_WORD = 2**32 - 1  # step and repeat are words of the counter
BLOCK = 2**20  # keys held at a time by a draw with replacement


def replay_weights(advantage: Tensor, group_std: Tensor, priority: str, alpha: float, eps: float) -> Tensor:
    """[C] float64: (|A| + eps)^alpha, or the group's std, or 1. advantage, group_std [C]."""
    if priority == "abs-advantage":
        return (advantage.double().abs() + eps) ** alpha
    if priority == "group-std":
        return group_std.double()
    if priority == "uniform":
        return torch.ones_like(advantage, dtype=torch.float64)
    raise ValueError(f"priority must be one of {', '.join(get_args(ReplayPriority))}, got {priority!r}")


def draw_keys(
    weight: Tensor, uid: Tensor, *, seed: int, step: int, repeat: int = 0, backend: str | None = None
) -> Tensor:
    """key_i = log w_i - log(-log u_i), u_i = philox(seed, replay stream; uid_i, step, repeat) in (0, 1).

    The n largest keys are an exact draw of n rollouts without replacement, one after another with probability
    proportional to w (Gumbel-top-k). A key depends on its rollout and the step alone, so every rank, layout and device
    finds the same. weight [C] float, uid [C] int64 -> [C] float64; a weight that is 0, negative, NaN or infinite has
    key -inf and is never drawn. Raises ValueError for wrong shapes, dtypes, or a step or repeat outside 32 bits.
    Source: Efraimidis and Spirakis, Inf. Process. Lett. 97 (2006); Kool et al., arXiv 1903.06059.
    """
    if weight.dim() != 1 or weight.shape != uid.shape:
        raise ValueError(f"weight must be [C] like uid {list(uid.shape)}, got {list(weight.shape)}")
    if uid.dtype != torch.int64:
        raise ValueError(f"uid must be int64, got {uid.dtype}")
    for name, word in (("step", step), ("repeat", repeat)):
        if not 0 <= word <= MAX_WORD:
            raise ValueError(f"{name} must be in [0, 2^32), got {word}")
    chosen = backends.resolve("priority_draw", backend, weight.device)
    return backends.load("priority_draw", chosen).draw_keys(weight, uid, seed=seed, step=step, repeat=repeat)


def largest(keys: Tensor, uid: Tensor, n: int) -> Tensor:
    """Positions [m] of the n largest finite keys, by (key descending, uid ascending); m < n where fewer are finite."""
    by_uid = uid.argsort(stable=True)
    order = by_uid[keys[by_uid].argsort(descending=True, stable=True)]
    return order[: min(n, int(torch.isfinite(keys).sum()))]


def draw_with_replacement(
    weight: Tensor, uid: Tensor, n: int, *, seed: int, step: int, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """n independent draws: draw j is the rollout with the largest key of repeat j (Gumbel-max, exact).

    Returns the winners' positions [n] and keys [n]; both are empty with no weight above 0. Memory: BLOCK keys, or C.
    """
    if n == 0 or not bool(((weight > 0) & torch.isfinite(weight)).any()):
        return uid.new_empty(0), weight.new_empty(0, dtype=torch.float64)
    by_uid = uid.argsort(stable=True)  # max takes the first of equal keys: the smallest uid
    weight, uid = weight[by_uid], uid[by_uid]
    rows = max(1, BLOCK // uid.numel())
    positions, keys = [], []
    for first in range(0, n, rows):
        block = torch.stack(
            [
                draw_keys(weight, uid, seed=seed, step=step, repeat=repeat, backend=backend)
                for repeat in range(first, min(first + rows, n))
            ]
        )  # [rows, C]
        key, at = block.max(1)
        positions.append(by_uid[at])
        keys.append(key)
    return torch.cat(positions), torch.cat(keys)
