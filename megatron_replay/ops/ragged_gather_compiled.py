"""The ragged gather in the compiled extension: threads of the CPU, or CUDA kernels. Equations: `ragged_gather`.

Dims: A tokens of a ring, n rows, T tokens of the n rows together, C slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_replay.ops.extension import extension, queue

# csrc/ragged_copy.h, enum Element
ELEMENT = {torch.bool: 0, torch.float32: 1, torch.int32: 2}


def row_bounds(start: Tensor, length: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    starts, cu = torch.empty_like(slots), torch.empty(slots.numel() + 1, dtype=torch.int32)
    columns = (start.data_ptr(), length.data_ptr(), _stride(start), start.numel())
    extension().row_bounds(columns, slots.data_ptr(), slots.numel(), starts.data_ptr(), cu.data_ptr())
    return starts, cu


def ragged_gather(rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    _move("ragged_gather", rings, start, cu_seqlens, packed)


def ragged_scatter(rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    _move("ragged_scatter", rings, start, cu_seqlens, packed)


def take_rows(columns: Sequence[Tensor], slots: Tensor, out: Sequence[Tensor]) -> None:
    pairs = zip(columns, out, strict=True)
    fields = [(c.data_ptr(), o.data_ptr(), c.element_size(), _stride(c)) for c, o in pairs]
    if slots.is_cuda:
        extension().take_rows_cuda(fields, slots.data_ptr(), slots.numel(), queue(slots.device))
    else:
        count = columns[0].numel() if columns else 0
        extension().take_rows_cpu(fields, slots.data_ptr(), slots.numel(), count)


def _stride(column: Tensor) -> int:
    return column.stride(0) * column.element_size()


def _move(name: str, rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    fields = [(r.data_ptr(), p.data_ptr(), ELEMENT[r.dtype]) for r, p in zip(rings, packed, strict=True)]
    rows = (start.data_ptr(), cu_seqlens.data_ptr(), start.numel(), rings[0].numel())
    if start.is_cuda:
        getattr(extension(), f"{name}_cuda")(fields, rows, queue(start.device))
    else:
        getattr(extension(), f"{name}_cpu")(fields, rows, packed[0].numel(), torch.get_num_threads())
