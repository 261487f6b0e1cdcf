"""Which stored rollouts are drawn: log-weights, random keys, the largest of them.

Dims: C slots of a ring, N rollouts, n rollouts asked for, m <= n rollouts drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_replay.ops import backend as backends
from megatron_replay.ops.checks import require_choice, require_vector

ReplayPriority = Literal["abs-advantage", "group-std", "uniform"]
MAX_WORD = 2**32 - 1  # step and repeat are words of the random number's counter


@dataclass(frozen=True)
class DrawWindow:
    """The live part of a ring of slots: rollout i, oldest first, is in slot (head + i) mod C, 0 <= i < size."""

    log_weight: Tensor  # [C] float64
    uid: Tensor  # [C] int64
    head: int
    size: int

    def __post_init__(self) -> None:
        slots = self.log_weight.numel()
        require_vector("log_weight", self.log_weight, torch.float64, slots, self.uid.device)
        require_vector("uid", self.uid, torch.int64, slots, self.uid.device)
        if not 0 <= self.size <= slots or not 0 <= self.head < max(1, slots):
            raise ValueError(f"size and head must be within the {slots} slots, got {self.size} and {self.head}")

    def slots(self) -> Tensor:
        """[size] int64, oldest first."""
        at = torch.arange(self.head, self.head + self.size, device=self.uid.device)
        return at % max(1, self.uid.numel())


def log_weights(
    advantage: Tensor, group_std: Tensor, priority: str, alpha: float, eps: float, *, backend: str | None = None
) -> Tensor:
    """log w_i with w_i = (|A_i| + eps)^alpha, the group's std, or 1; -inf where that is 0, infinite or NaN.

    advantage, group_std [N] float32 -> [N] float64. Raises ValueError for another priority, dtype or shape.
    """
    require_choice("priority", priority, get_args(ReplayPriority))
    for name, x in (("advantage", advantage), ("group_std", group_std)):
        if x.dtype != torch.float32 or x.shape != (advantage.numel(),) or x.device != advantage.device:
            raise ValueError(
                f"{name} must be float32 [{advantage.numel()}] on {advantage.device}, "
                f"got {x.dtype} {list(x.shape)} on {x.device}"
            )
    implementation = _implementation(backend, advantage.device)
    weights: Tensor = implementation.log_weights(advantage, group_std, priority, alpha, eps)
    return weights


def priority_draw(
    window: DrawWindow, n: int, *, seed: int, step: int, with_replacement: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """The slots [m] int64 of n drawn rollouts, and their keys [m] float64, by (key descending, uid ascending).

        key_i = log w_i - log(-log u_i),   u_i = philox(seed, replay stream; uid_i, step, repeat) in (0, 1)

    Without replacement (repeat = 0) the n largest keys are an exact draw of n rollouts, one after another with
    probability proportional to w (Gumbel-top-k). With replacement draw j is the rollout with the largest key of repeat
    j, in the order of j. A key depends on its rollout and the step alone: every rank and layout finds the same, and the
    compiled backends find the same bits on every device; the reference, with torch's logarithm, within its rounding.
    A log-weight that is not finite is never drawn; m < n where fewer can be drawn (with replacement: m = n, or 0).

    Raises ValueError for n below 0 or a step outside 32 bits.
    Source: Efraimidis and Spirakis, Inf. Process. Lett. 97 (2006); Kool et al., arXiv 1903.06059.
    """
    if n < 0:
        raise ValueError(f"n must be at least 0, got {n}")
    if not 0 <= step <= MAX_WORD:
        raise ValueError(f"step must be in [0, 2^32), got {step}")
    implementation = _implementation(backend, window.uid.device)
    if window.size == 0 or n == 0:
        return window.uid.new_empty(0), window.log_weight.new_empty(0)
    drawn: tuple[Tensor, Tensor]
    if with_replacement:
        drawn = implementation.repeated_draw(window, n, seed=seed, step=step)
    else:
        drawn = implementation.priority_draw(window, min(n, window.size), seed=seed, step=step)
    return drawn


def largest(keys: Tensor, uid: Tensor, n: int) -> Tensor:
    """Positions [m] of the n largest finite keys, by (key descending, uid ascending); m < n where fewer are finite."""
    by_uid = uid.argsort(stable=True)
    order = by_uid[keys[by_uid].argsort(descending=True, stable=True)]
    return order[: min(n, int(torch.isfinite(keys).sum()))]


def _implementation(backend: str | None, device: torch.device) -> Any:
    return backends.load("priority_draw", backends.resolve("priority_draw", backend, device))
