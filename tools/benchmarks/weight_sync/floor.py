"""Floors: the same bytes to as many receivers by the same transport and nothing else, in memory that is not new.

One turn is timed from a barrier to a barrier of all who take part; the sender's clock counts. The bytes go in pieces
through one flat tensor at each end, so that the floors need little memory beside the model; a piece is larger than the
caches.
"""

from __future__ import annotations

import mmap
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

PIECE_BYTES = 1 << 28


class Floor(ABC):
    """`nbytes` from rank 0 of `group` to all others; `flat` [at most PIECE_BYTES] uint8 is this rank's end."""

    name: str  # what is timed

    def __init__(self, flat: Tensor, nbytes: int, group: dist.ProcessGroup) -> None:
        self.flat, self.group = flat, group
        self.sends = dist.get_rank(group) == 0
        whole, rest = divmod(nbytes, flat.numel())
        self.sizes = [flat.numel()] * whole + [rest] * (rest > 0)

    def turn(self) -> float:
        """Seconds. All ranks of the group call it together."""
        dist.barrier(self.group)
        began = time.perf_counter()
        for size in self.sizes:
            self.transfer(self.flat[:size])
        dist.barrier(self.group)
        return time.perf_counter() - began

    @abstractmethod
    def transfer(self, piece: Tensor) -> None: ...

    def close(self) -> None:  # noqa: B027
        """Give back what the floor alone holds."""


class BroadcastFloor(Floor):
    name = "gloo broadcasts of a flat tensor"

    def transfer(self, piece: Tensor) -> None:
        dist.broadcast(piece, 0, self.group)


class SharedMemoryFloor(Floor):
    """The sender copies a piece in, then all receivers copy it out at once; no piece overlaps the next."""

    name = "a copy into memory that is shared, then a copy out of it"

    def __init__(self, flat: Tensor, nbytes: int, group: dist.ProcessGroup) -> None:
        super().__init__(flat, nbytes, group)
        shared: list[str | None] = [None]
        if self.sends:
            # without a name that could be left behind
            self.file = os.memfd_create("weight-sync-floor")
            os.truncate(self.file, flat.numel())
            shared = [f"/proc/{os.getpid()}/fd/{self.file}"]
        dist.broadcast_object_list(shared, 0, group)
        assert shared[0] is not None
        with open(shared[0], "r+b") as file:
            self.mapped = torch.frombuffer(mmap.mmap(file.fileno(), flat.numel()), dtype=torch.uint8)

    def transfer(self, piece: Tensor) -> None:
        mapped = self.mapped[: piece.numel()]
        if self.sends:
            mapped.copy_(piece)
        dist.barrier(self.group)
        if not self.sends:
            piece.copy_(mapped)
        dist.barrier(self.group)

    def close(self) -> None:
        if self.sends:
            os.close(self.file)


def seconds_of(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
