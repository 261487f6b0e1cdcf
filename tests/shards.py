"""Data-parallel groups inside one process: one thread a rank, collectives over a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup

T = TypeVar("T")


class ThreadGroup(DataParallelGroup):
    """DataParallelGroup whose ranks are threads."""

    def __init__(self, rank: int, size: int, board: list[Any], barrier: threading.Barrier) -> None:
        super().__init__()
        self.rank, self.size, self._board, self._barrier = rank, size, board, barrier

    def _everyone(self, mine: Any) -> list[Any]:
        self._board[self.rank] = mine
        self._barrier.wait()
        everyone = list(self._board)
        self._barrier.wait()
        return everyone

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([other.clone() for other in self._everyone(x)])

    def all_to_all(self, blocks: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        received = [other[self.rank].clone() for other in self._everyone(blocks)]
        assert [x.numel() for x in received] == list(sizes)
        return received

    def sum(self, values: Tensor) -> Tensor:
        return self.all_gather(values).sum(0)

    def max(self, values: Tensor) -> Tensor:
        return self.all_gather(values).amax(0)


def run_ranks(size: int, body: Callable[[DataParallelGroup], T]) -> list[T]:
    """body(group) on every rank; its results in rank order. An exception on any rank is raised."""
    board: list[Any] = [None] * size
    barrier = threading.Barrier(size, timeout=30)

    def one(rank: int) -> T:
        try:
            return body(ThreadGroup(rank, size, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(one, range(size)))
