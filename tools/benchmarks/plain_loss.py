"""The GRPO loss as it is usually written in torch, for autograd: the baseline, and in float64 the truth."""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import OPTIONS, Problem


def token_losses(logits: Tensor, target: Tensor, behavior_logprobs: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """`clipped_losses` of log_softmax(logits [T, Vp])[target]; the other arguments are [T].

    Float32 at least, without a float32 copy of the logits: log_softmax converts as it reads.
    """
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    logprob = logits.log_softmax(1, dtype=dtype).gather(1, target[:, None])[:, 0]
    return clipped_losses(logprob, behavior_logprobs, a, weight)


def clipped_losses(logprob: Tensor, behavior_logprobs: Tensor, a: Tensor, weight: Tensor) -> Tensor:
    """[T]: -weight min(r a, clamp(r, 1 - clip_eps_low, 1 + clip_eps_high) a), r = exp(logprob - behavior)."""
    ratio = (logprob - behavior_logprobs).exp()
    clipped = ratio.clamp(1 - OPTIONS.clip_eps_low, 1 + OPTIONS.clip_eps_high)
    return -torch.min(ratio * a, clipped * a) * weight


def arguments(problem: Problem, at: slice = slice(None), dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """target, behavior_logprobs, a and weight of `token_losses` for some tokens of a problem."""
    inputs = problem.inputs
    a, weight = problem.per_token(inputs.advantage), problem.per_token(inputs.loss_weight)
    return problem.target[at], *(x[at].to(dtype) for x in (inputs.behavior_logprobs, a, weight))
