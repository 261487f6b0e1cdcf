"""Losses of other projects, measured where they are installed.

Dims: T tokens, N rollouts of L tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .implementations import Implementation, Run, Settings
from .plain_loss import arguments, clipped_losses
from .problem import OPTIONS, Problem


def _liger_on_logits(problem: Problem, settings: Settings) -> Run:
    """Liger takes rows of [N, L + 1, V] and leaves out the last of each rollout."""
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    (logits,) = problem.operands
    target, behavior, advantage = _by_rollout(problem)
    n, length = target.shape
    whole = logits.new_zeros(n, length + 1, logits.shape[1]).requires_grad_()

    def restore() -> None:
        with torch.no_grad():
            whole[:, :-1].copy_(logits.view(n, length, -1))

    def call() -> tuple[Tensor, Tensor]:
        each, _, _ = triton_grpo_loss(
            whole,
            behavior,
            None,
            target,
            advantage,
            temperature=1.0,
            beta=0.0,
            eps_low=OPTIONS.clip_eps_low,
            eps_high=OPTIONS.clip_eps_high,
            inplace=True,
        )
        loss = each.sum() / problem.size.T
        return loss.detach(), torch.autograd.grad(loss, whole)[0]

    def collect(result: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor]]:
        loss, dwhole = result
        return loss, (dwhole[:, :-1].reshape(logits.shape),)

    return Run(call, restore, collect)


def _liger_on_head(problem: Problem, settings: Settings) -> Run:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    hidden, weight = (x.detach().requires_grad_() for x in problem.operands)
    target, behavior, advantage = _by_rollout(problem)
    mask = torch.ones_like(behavior)
    loss_function = LigerFusedLinearGRPOLoss(
        beta=0.0,
        epsilon_low=OPTIONS.clip_eps_low,
        epsilon_high=OPTIONS.clip_eps_high,
        loss_type="dapo",
        temperature=1.0,
        use_ref_model=False,
    )

    def call() -> tuple[Tensor, tuple[Tensor, ...]]:
        rows = hidden.view(*target.shape, -1)
        loss, _ = loss_function(rows, weight, target, mask, advantage, old_per_token_logps=behavior)
        return loss.detach(), torch.autograd.grad(loss, (hidden, weight))

    return Run(call)


def _verl_on_head(problem: Problem, settings: Settings) -> Run:
    """verl's kernel ends at log-probs and entropy; the loss on top of it is plain torch."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    hidden, weight = (x.detach().requires_grad_() for x in problem.operands)
    target, *rest = arguments(problem)

    def call() -> tuple[Tensor, tuple[Tensor, ...]]:
        logprob, _ = linear_cross_entropy(hidden, weight, target, 1.0, "none", None)
        loss = clipped_losses(logprob.float(), *rest).sum()
        return loss.detach(), torch.autograd.grad(loss, (hidden, weight))

    return Run(call)


def _by_rollout(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """target [N, L], behavior log-probs [N, L], advantage [N]"""
    shape = (-1, problem.size.rollout_tokens)
    return problem.target.view(shape), problem.inputs.behavior_logprobs.view(shape), problem.inputs.advantage


FOREIGN = (
    Implementation(
        "Liger-Kernel GRPO loss", "logits", ("cuda",), _liger_on_logits, "liger_kernel.transformers.grpo_loss"
    ),
    Implementation(
        "Liger-Kernel fused linear GRPO", "head", ("cuda",), _liger_on_head, "liger_kernel.chunked_loss.grpo_loss"
    ),
    Implementation(
        "verl linear cross entropy", "head", ("cuda",), _verl_on_head, "verl.utils.kernel.linear_cross_entropy"
    ),
)
