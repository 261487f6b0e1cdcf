"""FrozenPolicy: a policy that is sampled from and never trained, so it has neither gradients nor optimizer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from megatron_replay.trainer.model import global_parameters
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.trainer.parallel import ParallelGroups
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sharded_weights import ShardedWeights


@dataclass(frozen=True)
class FrozenPolicy:
    """The model of this rank as engines take weights from it. A bfloat16 model is wrapped as the trainer's is."""

    model: torch.nn.Module
    groups: ParallelGroups

    @classmethod
    def of(cls, model: GPTModel, groups: ParallelGroups) -> FrozenPolicy:
        wrapped = Float16Module(model.config, model) if model.config.bf16 else model
        return cls(wrapped.requires_grad_(False).eval(), groups)

    def sharded_weights(self, shape: ModelShape) -> ShardedWeights:
        return sharded_weights(unwrap(self.model), self.groups, shape)


def sharded_weights(model: GPTModel, groups: ParallelGroups, shape: ModelShape) -> ShardedWeights:
    """What this rank holds of the weights; the tensors are the model's own."""
    return ShardedWeights(
        shape=shape,
        padded_vocab=model.vocab_size,
        parameters={name: parameter.detach() for name, parameter in global_parameters(model)},
        tensor_rank=groups.tensor_rank,
        tensor_size=groups.tensor_size,
        replica=groups.replica,
        data_rank=groups.data_rank,
    )
