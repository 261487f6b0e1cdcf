"""ShardedWeights: one rank's part of the policy's weights, as the trainer hands it to whoever sends or saves them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from megatron_replay.weight_sync.model_shape import ModelShape


@dataclass(frozen=True)
class ShardedWeights:
    """The parameters of one rank under Megatron's names, layer numbers counted over the whole model.

    `replica` holds the ranks that together hold the model once, pipeline stage by stage and within a stage in
    tensor-parallel order; None: this rank alone does. The tensors are the live ones: read them between updates.
    """

    shape: ModelShape
    padded_vocab: int
    parameters: Mapping[str, Tensor]
    tensor_rank: int = 0
    tensor_size: int = 1
    replica: dist.ProcessGroup | None = None
    data_rank: int = 0  # which of the equal replicas this one is
