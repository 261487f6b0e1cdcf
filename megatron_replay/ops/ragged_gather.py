"""Rows of any length between rings of tokens and packed tensors.

Dims: A tokens of a ring, n rows, T tokens of the n rows together. A row may wrap around the end of the ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_replay.ops import backend as backends
from megatron_replay.ops.checks import require_vector

# what a token is in a ring, and in a packed tensor: ids are stored narrow
PACKED_DTYPE = {torch.int32: torch.int64, torch.bool: torch.bool, torch.float32: torch.float32}


def take_records(
    records: Tensor, slots: Tensor, *, start: int, length: int, backend: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The records [n, W] of slots [n], their column `start` [n], and cu_seqlens [n+1] int32 of their column `length`.

    records [C, W] int64, slots [n] int64 in [0, C), both on the host and contiguous: what `ragged_gather` needs to know
    of some slots. Raises ValueError otherwise, OverflowError where the rows have 2^31 tokens or more.
    """
    host = torch.device("cpu")
    if records.dtype != torch.int64 or records.dim() != 2 or records.device != host or not records.is_contiguous():
        raise ValueError(
            f"records must be torch.int64 [C, W] on cpu, contiguous, "
            f"got {records.dtype} {list(records.shape)} on {records.device}, strides {records.stride()}"
        )
    require_vector("slots", slots, torch.int64, slots.numel(), host)
    for name, column in (("start", start), ("length", length)):
        if not 0 <= column < records.shape[1]:
            raise ValueError(f"{name} must be one of the {records.shape[1]} columns, got {column}")
    taken: tuple[Tensor, Tensor, Tensor] = _implementation(backend, host).take_records(records, slots, start, length)
    return taken


def ragged_gather(
    rings: Sequence[Tensor],
    start: Tensor,
    cu_seqlens: Tensor,
    packed: Sequence[Tensor],
    *,
    backend: str | None = None,
) -> None:
    """packed[cu_i + j] = ring[(start_i + j) mod A], 0 <= j < cu_{i+1} - cu_i, for each ring and its packed tensor.

    rings: [A] each, int32, bool or float32; packed: [T] each, written, int64 for an int32 ring, else the ring's dtype.
    start [n] int64 in [0, A); cu_seqlens [n+1] int32 from 0 to T. Rows may repeat and overlap. Everything is
    contiguous and on one device. Raises ValueError otherwise; on CUDA the values of start and cu_seqlens are the
    caller's to answer for, since a look at them would wait for the device.
    """
    _check(rings, start, cu_seqlens, packed)
    _implementation(backend, start.device).ragged_gather(rings, start, cu_seqlens, packed)


def ragged_scatter(
    rings: Sequence[Tensor],
    start: Tensor,
    cu_seqlens: Tensor,
    packed: Sequence[Tensor],
    *,
    backend: str | None = None,
) -> None:
    """ring[(start_i + j) mod A] = packed[cu_i + j], in place; the rows must not overlap in the ring.

    Arguments and errors as of `ragged_gather`; the rings are written.
    """
    _check(rings, start, cu_seqlens, packed)
    _implementation(backend, start.device).ragged_scatter(rings, start, cu_seqlens, packed)


def _check(rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    n = start.numel()
    require_vector("start", start, torch.int64, n, start.device)
    require_vector("cu_seqlens", cu_seqlens, torch.int32, n + 1, start.device)
    if len(rings) != len(packed) or not rings:
        raise ValueError(f"packed must have one tensor for each of {len(rings)} rings, at least 1, got {len(packed)}")
    for i, (ring, target) in enumerate(zip(rings, packed, strict=True)):
        if ring.dtype not in PACKED_DTYPE:
            raise ValueError(f"rings must be int32, bool or float32, got {ring.dtype} at {i}")
        require_vector(f"rings[{i}]", ring, ring.dtype, rings[0].numel(), start.device)
        require_vector(f"packed[{i}]", target, PACKED_DTYPE[ring.dtype], packed[0].numel(), start.device)


def _implementation(backend: str | None, device: torch.device) -> Any:
    return backends.load("ragged_gather", backends.resolve("ragged_gather", backend, device))
