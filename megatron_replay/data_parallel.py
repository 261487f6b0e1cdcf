"""DataParallelGroup: the few collectives that the buffer and the loop need, over a group that is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class DataParallelGroup:
    """The data-parallel ranks that hold shards of one batch and one buffer; without a group, one rank."""

    def __init__(self, group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> None:
        self._group = group
        self._device = torch.device(device)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def shard(self, items: Sequence[T]) -> list[T]:
        """This rank's part of a list that every rank holds: every `size`-th item."""
        return list(items[self.rank :: self.size])

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over the ranks, on the values' device."""
        if self.size == 1:
            return values
        total = values.to(self._device, copy=True)
        dist.all_reduce(total, group=self._group)
        return total.to(values.device)

    def max(self, values: Tensor) -> Tensor:
        """Elementwise maximum over the ranks, on the values' device."""
        if self.size == 1:
            return values
        largest = values.to(self._device, copy=True)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._group)
        return largest.to(values.device)

    def total(self, count: int) -> int:
        """Sum of one integer over the ranks."""
        return int(self.sum(torch.tensor([count], dtype=torch.int64)))

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Every rank's rows [n_r, ...], n_r may differ, in rank order."""
        if self.size == 1:
            return [rows]
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = rows.shape[0]
        counts = self.sum(counts)
        longest = int(counts.max())
        padded = torch.zeros((longest, *rows.shape[1:]), dtype=rows.dtype, device=self._device)
        padded[: rows.shape[0]] = rows.to(self._device)
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded, group=self._group)
        return [g[: int(n)].to(rows.device) for g, n in zip(gathered, counts, strict=True)]
