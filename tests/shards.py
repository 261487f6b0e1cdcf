"""Data-parallel groups inside one process: one thread a rank, collectives over a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
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

    def gather(self, rows: Tensor) -> list[Tensor]:
        self._board[self.rank] = rows
        self._barrier.wait()
        everyone = [x.clone() for x in self._board]
        self._barrier.wait()
        return everyone

    def sum(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values)).sum(0)

    def max(self, values: Tensor) -> Tensor:
        return torch.stack(self.gather(values)).amax(0)


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
