"""Rows of any length between a ring of tokens and one packed tensor.

Dims: A tokens of the ring, n rows, T tokens of the n rows together. A row may wrap around the end of the ring.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ragged_gather(arena: Tensor, start: Tensor, length: Tensor, cu_seqlens: Tensor) -> Tensor:
    """packed[cu_i + j] = arena[(start_i + j) mod A], 0 <= j < length_i = cu_{i+1} - cu_i.

    arena [A], start [n] int64 in [0, A), length [n] int64, cu_seqlens [n+1] int32, the sums of length -> [T]. Rows
    may repeat and overlap. Raises ValueError for row counts or token counts that do not agree.
    """
    return arena[_ring_index(arena, start, length, cu_seqlens)]


def ragged_scatter(arena: Tensor, start: Tensor, length: Tensor, cu_seqlens: Tensor, packed: Tensor) -> None:
    """arena[(start_i + j) mod A] = packed[cu_i + j], in place; the rows must not overlap in the ring.

    Arguments and errors as of `ragged_gather`; packed [T] is cast to the arena's dtype.
    """
    arena[_ring_index(arena, start, length, cu_seqlens)] = packed.to(arena.dtype)


def _ring_index(arena: Tensor, start: Tensor, length: Tensor, cu_seqlens: Tensor) -> Tensor:
    for name, x in (("start", start), ("length", length)):
        if x.numel() + 1 != cu_seqlens.numel():
            raise ValueError(f"{name} must have one entry for each of {cu_seqlens.numel() - 1} rows, got {x.numel()}")
    total = int(cu_seqlens[-1])
    if (tokens := int(length.sum())) != total:
        raise ValueError(f"length must sum to the {total} tokens of cu_seqlens, got {tokens}")
    shift = torch.repeat_interleave(start - cu_seqlens[:-1].long(), length, output_size=total)
    return (torch.arange(total, device=arena.device) + shift) % arena.numel()
