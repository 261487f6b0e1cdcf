"""The ragged gather in plain torch: the definition. Equations: `ragged_gather.ragged_gather`.

Dims: A tokens of a ring, n rows, T tokens of the n rows together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take_records(records: Tensor, slots: Tensor, start: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    count = records.shape[0]
    if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= count):
        raise ValueError(f"slots must be in [0, {count}), got {int(slots.min())} to {int(slots.max())}")
    taken = records[slots]
    cu = torch.cat([slots.new_zeros(1), taken[:, length].cumsum(0)])
    if int(cu[-1]) > torch.iinfo(torch.int32).max:
        raise OverflowError(f"cu_seqlens: {int(cu[-1])} tokens do not fit int32")
    return taken, taken[:, start].contiguous(), cu.int()


def ragged_gather(rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    at = _ring_index(rings[0], start, cu_seqlens, packed[0].numel())
    for ring, target in zip(rings, packed, strict=True):
        target.copy_(ring[at])


def ragged_scatter(rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    at = _ring_index(rings[0], start, cu_seqlens, packed[0].numel())
    for ring, source in zip(rings, packed, strict=True):
        ring[at] = source.to(ring.dtype)


def _ring_index(ring: Tensor, start: Tensor, cu_seqlens: Tensor, total: int) -> Tensor:
    """[T] int64: where each packed token stands in the ring."""
    length, tokens = cu_seqlens.diff().long(), ring.numel()
    first, last = int(cu_seqlens[0]), int(cu_seqlens[-1])
    if first != 0 or last != total or bool(((length < 0) | (length > tokens)).any()):
        raise ValueError(
            f"cu_seqlens must rise from 0 to the {total} packed tokens, by at most the ring's {tokens} a row, "
            f"got {first} to {last} with lengths {sorted(set(length.tolist()))}"
        )
    if start.numel() and (int(start.min()) < 0 or int(start.max()) >= tokens):
        raise ValueError(f"start must be in [0, {tokens}), got {int(start.min())} to {int(start.max())}")
    shift = torch.repeat_interleave(start - cu_seqlens[:-1].long(), length, output_size=total)
    return (torch.arange(total, device=ring.device) + shift) % tokens
