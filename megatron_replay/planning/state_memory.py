"""Bytes that stay on a rank from step to step: weights, gradients, optimizer state, and the buffer.

n parameters of a rank, e bytes of their dtype, D data-parallel ranks, C slots, A tokens of a shard's arena.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megatron_replay.planning.parameters import Shapes
from megatron_replay.rollout import STORED_TOKEN_DTYPES
from megatron_replay.rollout_ring import WORDS
from megatron_replay.weight_sync.hf_mapping import EMBEDDING, HEAD

GRADIENT_BYTES = 4  # gradients are summed in float32
PARAMETER_ALIGNMENT = 64  # elements, in the buffers of Megatron's distributed optimizer
BUCKET_ALIGNMENT = 128


@dataclass(frozen=True)
class StateBytes:
    weights: int
    gradients: int
    optimizer: int


def state_bytes(
    shapes: Shapes, dtype: torch.dtype, *, distributed: bool, data: int, shares_embedding: bool
) -> StateBytes:
    """weights e n, gradients 4 n, Adam's moments 8 n, and 4 n of master weights where e < 4.

    With the distributed optimizer moments and master weights are divided by D, and n is that of Megatron's buffers,
    whose parameters and ends are aligned. `shares_embedding`: tied, on two stages, which gives it a
    part of the buffer alone.
    """
    n = _buffer_elements(shapes, data, shares_embedding) if distributed else sum(map(math.prod, shapes.values()))
    kept = 8 + (4 if dtype.itemsize < 4 else 0)
    return StateBytes(n * dtype.itemsize, n * GRADIENT_BYTES, kept * n // (data if distributed else 1))


def buffer_bytes(capacity: int, arena_tokens: int) -> tuple[int, int]:
    """(on the training device, on the host) of a shard: 9 A + 16 C, and a record of 64 C."""
    token = sum(dtype.itemsize for dtype in STORED_TOKEN_DTYPES.values())
    # log-weight and uid, which a draw reads of every slot
    slot = torch.float64.itemsize + torch.int64.itemsize
    return arena_tokens * token + capacity * slot, capacity * WORDS * torch.int64.itemsize


def _buffer_elements(shapes: Shapes, data: int, shares_embedding: bool) -> int:
    """Elements of the distributed optimizer's buffer, one bucket, and one more for a shared embedding."""
    buckets = {False: 0, True: 0}
    for name, size in shapes.items():
        alone = shares_embedding and name in (EMBEDDING.megatron, HEAD.megatron)
        buckets[alone] += _up(math.prod(size), PARAMETER_ALIGNMENT)
    return sum(_up(n, math.lcm(data, BUCKET_ALIGNMENT)) for n in buckets.values())


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
