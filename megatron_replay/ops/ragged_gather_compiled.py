"""The ragged gather in the compiled extension: threads of the CPU, or CUDA kernels. Equations: `ragged_gather`.

Dims: A tokens of a ring, n rows, T tokens of the n rows together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_replay.ops.extension import extension, queue

# csrc/ragged_copy.h, enum Element
ELEMENT = {torch.bool: 0, torch.float32: 1, torch.int32: 2}


def take_records(records: Tensor, slots: Tensor, start: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    count, (rows, width) = slots.numel(), records.shape
    taken, starts = records.new_empty(count, width), torch.empty_like(slots)
    cu = torch.empty(count + 1, dtype=torch.int32)
    out = (taken.data_ptr(), starts.data_ptr(), cu.data_ptr())
    extension().take_records_cpu(records.data_ptr(), rows, width, (start, length), slots.data_ptr(), count, out)
    return taken, starts, cu


def ragged_gather(rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    _move("ragged_gather", rings, start, cu_seqlens, packed)


def ragged_scatter(rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    _move("ragged_scatter", rings, start, cu_seqlens, packed)


def _move(name: str, rings: Sequence[Tensor], start: Tensor, cu_seqlens: Tensor, packed: Sequence[Tensor]) -> None:
    fields = [(r.data_ptr(), p.data_ptr(), ELEMENT[r.dtype]) for r, p in zip(rings, packed, strict=True)]
    rows = (start.data_ptr(), cu_seqlens.data_ptr(), start.numel(), rings[0].numel())
    if start.is_cuda:
        getattr(extension(), f"{name}_cuda")(fields, rows, queue(start.device))
    else:
        getattr(extension(), f"{name}_cpu")(fields, rows, packed[0].numel(), torch.get_num_threads())
