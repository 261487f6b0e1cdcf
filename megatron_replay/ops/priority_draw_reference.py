"""The priority draw in plain torch: the definition. Equations: `priority_draw.priority_draw`.

Dims: C slots of a ring, N rollouts, n rollouts asked for, m <= n rollouts drawn.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.ops.philox import STREAM_REPLAY_DRAW, uniform
from megatron_replay.ops.priority_draw import DrawWindow, largest

BLOCK = 2**20  # keys held at a time by a draw with replacement


def log_weights(advantage: Tensor, group_std: Tensor, priority: str, alpha: float, eps: float) -> Tensor:
    if priority == "uniform":
        return torch.zeros_like(advantage, dtype=torch.float64)
    by_std = priority == "group-std"
    base = group_std.double() if by_std else advantage.double().abs() + eps
    usable = (base > 0) & torch.isfinite(base)
    return torch.where(usable, (1.0 if by_std else alpha) * torch.where(usable, base, 1).log(), -torch.inf)


def draw_keys(log_weight: Tensor, uid: Tensor, *, seed: int, step: int, repeat: int = 0) -> Tensor:
    """key [N] float64 of log_weight [N], uid [N]; -inf where the log-weight is not finite."""
    gumbel = -(-uniform(seed, STREAM_REPLAY_DRAW, uid, step, repeat).log()).log()
    return torch.where(torch.isfinite(log_weight), log_weight + gumbel, -torch.inf)


def priority_draw(window: DrawWindow, n: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    slots = window.slots()
    uid = window.uid[slots]
    keys = draw_keys(window.log_weight[slots], uid, seed=seed, step=step)
    won = largest(keys, uid, n)
    return slots[won], keys[won]


def repeated_draw(window: DrawWindow, n: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Memory: BLOCK keys, or C."""
    slots = window.slots()
    slots = slots[window.uid[slots].argsort(stable=True)]  # max takes the first of equal keys: the smallest uid
    log_weight, uid = window.log_weight[slots], window.uid[slots]
    if not bool(torch.isfinite(log_weight).any()):
        return slots[:0], log_weight[:0]
    rows = max(1, BLOCK // uid.numel())
    drawn, keys = [], []
    for first in range(0, n, rows):
        repeats = range(first, min(first + rows, n))
        block = torch.stack([draw_keys(log_weight, uid, seed=seed, step=step, repeat=j) for j in repeats])  # [rows, C]
        key, at = block.max(1)
        drawn.append(slots[at])
        keys.append(key)
    return torch.cat(drawn), torch.cat(keys)
