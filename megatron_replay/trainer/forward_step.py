"""What Megatron's pipeline schedule calls for each microbatch: GPTModel forward, then the chunked GRPO head.

The last stage never builds the logits of a pack: GPTModel hands its hidden states to an output processor,
which keeps the rows that predict a trained token and runs linear_grpo_loss on them.

Dims: T tokens of a pack, R its trained rows, n its rollouts, H hidden, Vp vocabulary shard, A age buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.linear_grpo_loss import chunk_tokens_within, linear_grpo_loss, linear_token_logprob
from megatron_replay.trainer.attention import PackedSequences
from megatron_replay.trainer.model import head_weight
from megatron_replay.trainer.packing import PackedMicrobatch
from megatron_replay.trainer.parallel import ParallelGroups


@dataclass(frozen=True)
class HeadOptions:
    """Constants of the LM head and the loss."""

    loss: GrpoLossOptions
    vocab_size: int  # true size, without padding
    temperature: float
    logits_memory_bytes: int  # of one chunk of logits on a rank
    age_buckets: int  # 2 tell fresh rollouts from replayed ones; more tell the ages of those too
    logits_dtype: torch.dtype | None = None  # None: that of the weight
    backend: str | None = None


@dataclass
class LossReport:
    """Sums over the microbatches of one update, on the last stage."""

    loss: Tensor | None = None
    stats: Tensor | None = None  # [A, K]
    maxima: Tensor | None = None  # [A, M]

    def add(self, loss: Tensor, stats: Tensor, maxima: Tensor) -> None:
        if self.loss is None or self.stats is None or self.maxima is None:
            self.loss, self.stats, self.maxima = loss.clone(), stats, maxima
        else:
            self.loss = self.loss + loss
            self.stats = self.stats + stats
            self.maxima = torch.maximum(self.maxima, maxima)


@dataclass
class TrainForwardStep:
    """forward_step_func of an update. The data iterator yields (PackedMicrobatch, GrpoLossInputs)."""

    groups: ParallelGroups
    head: HeadOptions
    report: LossReport = field(default_factory=LossReport)

    def __call__(
        self, data: Iterator[tuple[PackedMicrobatch, GrpoLossInputs]], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        pack, inputs = next(data)
        put = _to(self.groups.device)

        def grpo_head(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            weight = head_weight(output_layer, output_weight)
            out = linear_grpo_loss(
                _trained_hidden(hidden_states, put(pack.rows), output_layer, self.groups),
                weight,
                put(pack.targets),
                inputs.to(self.groups.device),
                self.head.loss,
                **_vocabulary(self.head, weight, self.groups),
            )
            self.report.add(out.loss.detach(), out.stats, out.maxima)
            return out.loss

        def loss_func(loss: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            # the weights are already divided by the global counts, so the schedule has nothing to divide
            return loss, torch.ones((), dtype=torch.int, device=loss.device), {}

        return _run(model, pack, grpo_head, self.groups), loss_func


@dataclass
class LogprobForwardStep:
    """forward_step_func of a forward-only pass: float32 log-probs [R] of each pack's targets."""

    groups: ParallelGroups
    head: HeadOptions

    def __call__(self, data: Iterator[PackedMicrobatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        pack = next(data)
        put = _to(self.groups.device)

        def logprob_head(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            weight = head_weight(output_layer, output_weight)
            return linear_token_logprob(
                _trained_hidden(hidden_states, put(pack.rows), output_layer, self.groups),
                weight,
                put(pack.targets),
                **_vocabulary(self.head, weight, self.groups),
            ).logprob

        def collect(logprobs: Tensor, non_loss_data: bool = True) -> Tensor:
            return logprobs

        return _run(model, pack, logprob_head, self.groups), collect


def _run(model: torch.nn.Module, pack: PackedMicrobatch, head: Callable[..., Tensor], groups: ParallelGroups) -> Tensor:
    put = _to(groups.device)
    position_ids = put(pack.position_ids)
    # attention in one kernel has no use for the members, so they stay where they are
    packed = PackedSequences.build(
        put(pack.cu_seqlens),
        position_ids.squeeze(0),
        pack.max_seqlen,
        pack.members,
        dtype=get_model_config(model).params_dtype,
    )
    out: Tensor = model(put(pack.input_ids), position_ids, None, packed_seq_params=packed, output_processor=head)
    return out


def _trained_hidden(hidden_states: Tensor, rows: Tensor, output_layer: Any, groups: ParallelGroups) -> Tensor:
    """Hidden states [T or T/TP, 1, H] -> [R, H] on every tensor-parallel rank.

    Each rank's head returns the gradient of its vocabulary shard; the mappings sum those in the backward pass.
    """
    if output_layer.sequence_parallel:
        whole: Tensor = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True, group=groups.tensor
        )
        return whole.squeeze(1)[rows]
    own: Tensor = copy_to_tensor_model_parallel_region(hidden_states.squeeze(1)[rows], group=groups.tensor)
    return own


def _vocabulary(head: HeadOptions, weight: Tensor, groups: ParallelGroups) -> dict[str, Any]:
    return {
        "vocab_start": groups.tensor_rank * weight.size(0),
        "vocab_size": head.vocab_size,
        "temperature": head.temperature,
        "tp_group": groups.tensor if groups.tensor_size > 1 else None,
        "chunk_tokens": chunk_tokens_within(head.logits_memory_bytes, weight, head.logits_dtype),
        "logits_dtype": head.logits_dtype,
        "backend": head.backend,
    }


def _to(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda x: x.to(device, non_blocking=True)
