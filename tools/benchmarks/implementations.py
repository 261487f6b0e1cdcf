"""The implementations that are compared: this project's, and plain torch. Those of other projects: `foreign`.

Dims: T tokens, V vocabulary, Vp its columns on one rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_replay.ops.grpo_loss import grpo_loss_terms
from megatron_replay.ops.linear_grpo_loss import chunk_tokens_within, linear_grpo_loss
from megatron_replay.ops.token_logprob import VocabShard

from .plain_loss import arguments, token_losses
from .problem import OPTIONS, Level, Problem


@dataclass(frozen=True)
class Settings:
    logits_memory: int  # bytes of one chunk of logits in linear_grpo_loss


def nothing() -> None:
    """The `restore` of a run that leaves its inputs as they were."""


def as_it_is(result: Any) -> Any:
    """The `collect` of a run that returns (loss, gradients) itself."""
    return result


@dataclass(frozen=True)
class Run:
    """`call` is what is measured. `restore` comes before each call, `collect` after; neither is measured."""

    call: Callable[[], Any]
    restore: Callable[[], None] = nothing
    collect: Callable[[Any], tuple[Tensor, tuple[Tensor, ...]]] = as_it_is  # -> loss, gradients of the operands


@dataclass(frozen=True)
class Implementation:
    name: str
    level: Level
    devices: tuple[str, ...]
    prepare: Callable[[Problem, Settings], Run]
    needs: str | None = None  # a module that may be missing


def vocab_shard(problem: Problem, backend: str) -> VocabShard:
    """The columns of a problem as a vocabulary of their own."""
    return VocabShard.of(
        problem.size.columns,
        problem.target,
        vocab_start=0,
        vocab_size=None,
        temperature=1.0,
        tp_group=None,
        backend=backend,
    )


def _ours_on_logits(backend: str) -> Callable[[Problem, Settings], Run]:
    """token_logprob and grpo_loss as linear_grpo_loss joins them: dlogits stand where the logits stood."""

    def prepare(problem: Problem, settings: Settings) -> Run:
        (logits,) = problem.operands
        target, inputs = problem.target, problem.inputs
        buffer = torch.empty_like(logits)
        shard = vocab_shard(problem, backend)

        def call() -> tuple[Tensor, tuple[Tensor]]:
            result = shard.forward(buffer, target)
            terms = grpo_loss_terms(result.logprob, inputs, OPTIONS, backend=backend)
            dlogits = shard.backward(buffer, target, result, terms.dlogprob, terms.dentropy, out=buffer)
            return terms.loss, (dlogits,)

        return Run(call, restore=lambda: buffer.copy_(logits))

    return prepare


def _torch_on_logits(compiled: bool) -> Callable[[Problem, Settings], Run]:
    def prepare(problem: Problem, settings: Settings) -> Run:
        leaf = problem.operands[0].detach().requires_grad_()
        rest = arguments(problem)
        losses = _maybe_compiled(token_losses, compiled)

        def call() -> tuple[Tensor, tuple[Tensor, ...]]:
            loss = losses(leaf, *rest).sum()
            return loss.detach(), torch.autograd.grad(loss, (leaf,))

        return Run(call)

    return prepare


def _linear(backend: str) -> Callable[[Problem, Settings], Run]:
    def prepare(problem: Problem, settings: Settings) -> Run:
        hidden, weight = (x.detach().requires_grad_() for x in problem.operands)
        chunk_tokens = chunk_tokens_within(settings.logits_memory, weight)

        def call() -> tuple[Tensor, tuple[Tensor, ...]]:
            loss = linear_grpo_loss(
                hidden, weight, problem.target, problem.inputs, OPTIONS, chunk_tokens=chunk_tokens, backend=backend
            ).loss
            return loss.detach(), torch.autograd.grad(loss, (hidden, weight))

        return Run(call)

    return prepare


def _dense(compiled: bool) -> Callable[[Problem, Settings], Run]:
    def prepare(problem: Problem, settings: Settings) -> Run:
        hidden, weight = (x.detach().requires_grad_() for x in problem.operands)
        rest = arguments(problem)

        def losses(hidden: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
            return token_losses(hidden @ weight.T, *rest)

        losses = _maybe_compiled(losses, compiled)

        def call() -> tuple[Tensor, tuple[Tensor, ...]]:
            loss = losses(hidden, weight, *rest).sum()
            return loss.detach(), torch.autograd.grad(loss, (hidden, weight))

        return Run(call)

    return prepare


def _maybe_compiled(function: Callable[..., Tensor], compiled: bool) -> Callable[..., Tensor]:
    if not compiled:
        return function
    # each shape is compiled for itself, as static as it is
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


IMPLEMENTATIONS = (
    Implementation("megatron_replay triton", "logits", ("cuda",), _ours_on_logits("triton")),
    Implementation("megatron_replay reference", "logits", ("cuda",), _ours_on_logits("reference")),
    Implementation("torch eager", "logits", ("cuda",), _torch_on_logits(compiled=False)),
    Implementation("torch compiled", "logits", ("cuda",), _torch_on_logits(compiled=True)),
    Implementation("linear_grpo_loss triton", "head", ("cuda",), _linear("triton")),
    Implementation("linear_grpo_loss reference", "head", ("cpu", "cuda"), _linear("reference")),
    Implementation("dense torch", "head", ("cpu", "cuda"), _dense(compiled=False)),
    Implementation("dense torch compiled", "head", ("cuda",), _dense(compiled=True)),
)
