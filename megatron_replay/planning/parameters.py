"""The parameters that one rank of a layout holds, from the table between Megatron and Hugging Face."""

from __future__ import annotations

import math
import re

from megatron_replay.weight_sync.hf_mapping import EMBEDDING, HEAD, find_rule, megatron_names, megatron_shape
from megatron_replay.weight_sync.model_shape import ModelShape

Shapes = dict[str, tuple[int, ...]]


def rank_parameters(shape: ModelShape, padded_vocab: int, tensor: int, pipeline: int, stage: int) -> Shapes:
    """Megatron name (layers counted over the whole model) -> shape of this stage's shard, the same on all its ranks.

    With tied embeddings the last of several stages holds a copy of the embedding as `output_layer.weight`.
    """
    names = [name for name in megatron_names(shape) if _stage(name, shape, pipeline) == stage]
    if shape.tied_embeddings and stage == pipeline - 1 > 0:
        names.append(HEAD.megatron)
    return {name: shard_shape(name, shape, padded_vocab, tensor) for name in names}


def shard_shape(name: str, shape: ModelShape, padded_vocab: int, tensor: int) -> tuple[int, ...]:
    """The shape of one parameter on each of `tensor` ranks."""
    rule, _ = find_rule(name, shape)
    full = list(megatron_shape(name, shape, padded_vocab))
    if rule.shard_dim is not None:
        full[rule.shard_dim] //= tensor
    return tuple(full)


def numel(shapes: Shapes) -> int:
    return sum(math.prod(size) for size in shapes.values())


def _stage(name: str, shape: ModelShape, pipeline: int) -> int:
    if name == EMBEDDING.megatron:
        return 0
    layer = re.search(r"decoder\.layers\.(\d+)\.", name)
    return int(layer[1]) // (shape.num_layers // pipeline) if layer else pipeline - 1
