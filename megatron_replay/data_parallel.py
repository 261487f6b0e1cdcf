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

    def all_gather(self, x: Tensor) -> Tensor:
        """[R, ...]: every rank's tensor of one shape, in rank order, on its device."""
        if self.size == 1:
            return x[None]
        sent = x.to(self._device).contiguous()
        gathered = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(gathered, sent, group=self._group)
        return torch.stack(gathered).to(x.device)

    def all_to_all(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """blocks[r] [n_r] goes to rank r; the block of sizes[r] elements that rank r has for this one comes back."""
        if self.size == 1:
            return list(blocks)
        sent = torch.cat(list(blocks)).to(self._device)
        received = torch.empty(sum(sizes), dtype=sent.dtype, device=self._device)
        dist.all_to_all_single(received, sent, list(sizes), [b.numel() for b in blocks], group=self._group)
        return list(received.to(blocks[0].device).split(list(sizes)))
