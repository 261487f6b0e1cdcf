"""Rows of any length between a ring of tokens and one packed tensor.

Dims: A tokens of the ring, n rows, T tokens of the n rows together. A row may wrap around the end of the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_gather(arena: Tensor, start: Tensor, cu_seqlens: Tensor) -> Tensor:
    """packed[cu_i + j] = arena[(start_i + j) mod A], 0 <= j < cu_{i+1} - cu_i.

    arena [A], start [n] int64 in [0, A), cu_seqlens [n+1] int32 -> [T]. Rows may repeat and overlap.
    """
    return arena[_ring_index(arena, start, cu_seqlens)]


def ragged_scatter(arena: Tensor, start: Tensor, cu_seqlens: Tensor, packed: Tensor) -> None:
    """arena[(start_i + j) mod A] = packed[cu_i + j], in place; the rows must not overlap in the ring."""
    arena[_ring_index(arena, start, cu_seqlens)] = packed.to(arena.dtype)


def _ring_index(arena: Tensor, start: Tensor, cu_seqlens: Tensor) -> Tensor:
    if start.numel() + 1 != cu_seqlens.numel():
        raise ValueError(f"start must have one entry for each of {cu_seqlens.numel() - 1} rows, got {start.numel()}")
    lengths = cu_seqlens.diff().long()
    total = int(cu_seqlens[-1])
    shift = torch.repeat_interleave(start - cu_seqlens[:-1].long(), lengths, output_size=total)
    return (torch.arange(total, device=arena.device) + shift) % arena.numel()
