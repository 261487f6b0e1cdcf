"""GrpoLossInputs: what the loss needs of packed rollouts, beside the policy's log-probs, and its checks.

Dims: T tokens (packed), N rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_replay.ops.checks import require

if TYPE_CHECKING:
    from megatron_replay.ops.grpo_loss import GrpoLossOptions


@dataclass(frozen=True)
class GrpoLossInputs:
    """What a T-vector holds where loss_mask is False never matters, nor an N-vector at a rollout without a trained
    token. Tokens past cu_seqlens[-1] are padding."""

    behavior_logprobs: Tensor  # [T]
    advantage: Tensor  # [N]
    cu_seqlens: Tensor  # [N+1] int32
    loss_mask: Tensor  # [T] bool
    loss_weight: Tensor  # [N], of one trained token: `rollout_loss_weights`
    reference_logprobs: Tensor | None = None  # [T]
    importance_weight: Tensor | None = None  # [N]
    age: Tensor | None = None  # [N] int64, steps
    age_buckets: int = 1  # rows of the statistics

    def check(self, policy_logprobs: Tensor, entropy: Tensor | None, options: GrpoLossOptions) -> None:
        """Raise ValueError, beginning with the field, unless these fit policy_logprobs [T] and the options."""
        like = policy_logprobs
        t = like.numel()
        n = self.advantage.numel()
        _check("policy_logprobs", policy_logprobs, (t,), like)
        _check("behavior_logprobs", self.behavior_logprobs, (t,), like)
        _check("advantage", self.advantage, (n,), like)
        _check("cu_seqlens", self.cu_seqlens, (n + 1,), like, torch.int32)
        _check("loss_mask", self.loss_mask, (t,), like, torch.bool)
        _check("loss_weight", self.loss_weight, (n,), like)
        for name, x, size, dtype in (
            ("entropy", entropy, t, None),
            ("reference_logprobs", self.reference_logprobs, t, None),
            ("importance_weight", self.importance_weight, n, None),
            ("age", self.age, n, torch.int64),
        ):
            if x is not None:
                _check(name, x, (size,), like, dtype)
        require(self.age_buckets >= 1, "age_buckets", self.age_buckets, "must be at least 1")
        if self.reference_logprobs is None and options.kl_beta > 0:
            raise ValueError(f"reference_logprobs must be given with kl_beta {options.kl_beta}, got None")
        if entropy is None and options.entropy_weight != 0:
            raise ValueError(f"entropy must be given with entropy_weight {options.entropy_weight}, got None")
        if self.cu_seqlens.device.type == "cpu":
            self._check_bounds()

    def tokens(self, at: slice) -> GrpoLossInputs:
        """The same rollouts with the tokens of `at` alone: a rollout may lie there in part, or not at all."""
        reference = self.reference_logprobs
        return replace(
            self,
            behavior_logprobs=self.behavior_logprobs[at],
            loss_mask=self.loss_mask[at],
            cu_seqlens=(self.cu_seqlens - at.start).clamp(0, at.stop - at.start),
            reference_logprobs=None if reference is None else reference[at],
        )

    def to(self, device: torch.device) -> GrpoLossInputs:
        held = ((f.name, getattr(self, f.name)) for f in fields(self))
        moved: dict[str, Any] = {name: x.to(device) for name, x in held if isinstance(x, Tensor)}
        return replace(self, **moved)

    def _check_bounds(self) -> None:
        """On the CPU only: on a GPU the look would cost a synchronisation."""
        t = self.loss_mask.numel()
        first, last = int(self.cu_seqlens[0]), int(self.cu_seqlens[-1])
        if first != 0 or last > t or bool((self.cu_seqlens.diff() < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to at most {t}, got {self.cu_seqlens.tolist()}")
        if bool(self.loss_mask[last:].any()):
            raise ValueError(f"loss_mask must be False past cu_seqlens[-1] = {last}, got True")


def _check(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor, dtype: torch.dtype | None = None) -> None:
    """Shape, device and dtype (any floating point where None)."""
    if x is None:
        raise ValueError(f"{name} must be a tensor {list(shape)}, got None")
    if x.shape != shape or x.device != like.device:
        raise ValueError(f"{name} must be {list(shape)} on {like.device}, got {list(x.shape)} on {x.device}")
    if x.dtype != dtype if dtype is not None else not x.is_floating_point():
        raise ValueError(f"{name} must be {dtype or 'floating point'}, got {x.dtype}")
