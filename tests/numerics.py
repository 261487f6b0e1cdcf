"""The tolerance rule, and the loss operators written a second time: plain float64 torch under autograd.

Nothing here shares code with megatron_replay.ops; the loss goes rollout by rollout and token by token.
Dims: T tokens, N rollouts, V vocabulary, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs


def assert_no_worse_than_torch(actual: Tensor, truth64: Tensor, torch_same_dtype: Tensor, eps: float = 1e-6) -> None:
    """`actual` is at most as far from the float64 truth as torch in the same dtype is, plus eps (max norm).

    eps counts in units of the largest true value where that is above 1: a float32 of 10 is not known to 1e-6.
    """
    actual, truth64, torch_same_dtype = actual.detach(), truth64.detach(), torch_same_dtype.detach()
    assert actual.shape == truth64.shape == torch_same_dtype.shape
    assert truth64.dtype == torch.float64
    assert bool(torch.isfinite(truth64).all()), "the truth is not finite"
    if actual.numel() == 0:
        return
    ours = float((actual.double() - truth64).abs().max())
    theirs = float((torch_same_dtype.double() - truth64).abs().max())
    eps *= max(1.0, float(truth64.abs().max()))
    assert ours <= theirs + eps, f"error {ours:.3e}, torch {theirs:.3e} + {eps:.1e}"


def assert_not_trivial(x: Tensor, least: float = 1e-3) -> None:
    """A comparison of two tensors of zeros proves nothing."""
    largest = float(x.detach().abs().max())
    assert largest > least, f"largest value {largest:.1e}"


def token_logprob64(logits: Tensor, target: Tensor, vocab_size: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-prob [T] and entropy [T] by log_softmax in the logits' own dtype, padded columns cut off."""
    log_p = (logits[:, :vocab_size] / temperature).log_softmax(1)
    return log_p.gather(1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)


@dataclass
class LossCase:
    """Arguments of grpo_loss by name."""

    policy_logprobs: Tensor
    behavior_logprobs: Tensor
    advantage: Tensor
    cu_seqlens: Tensor
    loss_mask: Tensor
    loss_weight: Tensor
    options: GrpoLossOptions
    entropy: Tensor | None = None
    reference_logprobs: Tensor | None = None
    importance_weight: Tensor | None = None
    age: Tensor | None = None
    age_buckets: int = 1

    def arguments(self) -> dict:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def call(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of grpo_loss and grpo_loss_terms."""
        return loss_call(**(self.arguments() | changes))

    def double(self) -> LossCase:
        floating = {
            k: v.double() for k, v in self.arguments().items() if isinstance(v, Tensor) and v.is_floating_point()
        }
        return replace(self, **floating)

    def to(self, device: torch.device) -> LossCase:
        return replace(self, **{k: v.to(device) for k, v in self.arguments().items() if isinstance(v, Tensor)})

    @property
    def bounds(self) -> list[tuple[int, int]]:
        return list(pairwise(self.cu_seqlens.tolist()))


def loss_call(**flat: Any) -> dict[str, Any]:
    """Flat fields -> arguments: what belongs to GrpoLossInputs goes into one."""
    names = {f.name for f in fields(GrpoLossInputs)}
    rest = {k: v for k, v in flat.items() if k not in names}
    return {**rest, "inputs": GrpoLossInputs(**{k: v for k, v in flat.items() if k in names})}


def random_case(
    options: GrpoLossOptions, lengths: tuple[int, ...] = (7, 0, 1, 13, 29, 5), spread: float = 0.4
) -> LossCase:
    """Random rollouts: some prompt tokens masked, an empty one, one of one token, advantages of both signs and 0."""
    total, n = sum(lengths), len(lengths)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    mask = torch.rand(total) > 0.2
    for start, length in zip(cu_seqlens.tolist(), lengths, strict=False):
        mask[start : start + min(length, 1)] = True
    policy = -torch.rand(total) * 3
    advantage = torch.randn(n) + torch.tensor([1.0, -1.0]).repeat(n)[:n]
    return LossCase(
        policy_logprobs=policy,
        behavior_logprobs=policy + spread * torch.randn(total),
        advantage=advantage,
        cu_seqlens=cu_seqlens,
        loss_mask=mask,
        loss_weight=torch.rand(n) + 0.5,
        options=options,
        entropy=torch.rand(total) * 2,
        reference_logprobs=policy + 0.3 * torch.randn(total),
        importance_weight=torch.rand(n) + 0.5,
        age=torch.arange(n),
        age_buckets=3,
    )


def naive_loss(case: LossCase) -> Tensor:
    """The loss by two loops, differentiable by autograd in policy_logprobs and entropy."""
    o, limit = case.options, case.options.log_ratio_clamp
    low, high = 1 - o.clip_eps_low, 1 + o.clip_eps_high
    loss = case.policy_logprobs.new_zeros(())
    for i, (start, end) in enumerate(case.bounds):
        tokens = [t for t in range(start, end) if case.loss_mask[t]]
        advantage, weight = case.advantage[i], case.loss_weight[i]
        iw = 1.0 if case.importance_weight is None else case.importance_weight[i]
        log_ratios = [case.policy_logprobs[t] - case.behavior_logprobs[t] for t in tokens]
        for t, log_ratio in zip(tokens, log_ratios, strict=True):
            if o.ratio_level == "sequence":
                log_ratio = sum(log_ratios) / len(tokens)
            ratio = torch.exp(torch.clamp(log_ratio, -limit, limit))
            if o.objective == "cispo":
                objective = ratio.detach().clamp(low, high) * advantage * case.policy_logprobs[t]
            else:
                objective = torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
                if o.dual_clip is not None and advantage < 0:
                    objective = torch.maximum(objective, o.dual_clip * advantage)
            loss = loss - weight * iw * objective
            if o.kl_beta > 0:
                u = torch.clamp(case.reference_logprobs[t] - case.policy_logprobs[t], -limit, limit)
                kl = {"k1": -u, "k2": u * u / 2, "k3": torch.exp(u) - u - 1}[o.kl_estimator]
                loss = loss + weight * o.kl_beta * kl
            if o.entropy_weight != 0:
                loss = loss - weight * o.entropy_weight * case.entropy[t]
    return loss


def torch_loss(case: LossCase) -> Tensor:
    """The default loss (token ratio, clip, no KL) as it is usually written, for the tolerance rule."""
    o = case.options
    rollout = torch.repeat_interleave(case.cu_seqlens.diff().long())
    a, w = case.advantage[rollout], (case.loss_weight * case.importance_weight)[rollout]
    ratio = (case.policy_logprobs - case.behavior_logprobs).exp()
    each = -torch.min(ratio * a, ratio.clamp(1 - o.clip_eps_low, 1 + o.clip_eps_high) * a)
    return (each * w * case.loss_mask).sum()
