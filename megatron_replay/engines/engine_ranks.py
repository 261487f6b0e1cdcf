"""EngineRanks: who drives an engine, and how the other ranks learn what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_replay.data_parallel import DataParallelGroup

T = TypeVar("T")


@dataclass(frozen=True)
class EngineRanks:
    """The data-parallel replicas, and in each the rank that drives engines: the first of its model-parallel ranks.

    Without process groups one rank is everything. `device` is the one that trains.
    """

    data: DataParallelGroup
    replica: dist.ProcessGroup | None
    device: torch.device

    @property
    def leads(self) -> bool:
        """True on the one rank of a replica that talks to engines."""
        return self.replica is None or dist.get_rank(self.replica) == 0

    @property
    def is_first(self) -> bool:
        """True on the one rank that starts servers."""
        return self.leads and self.data.rank == 0

    def from_leader(self, value: T) -> T:
        """The leader's value on every rank of its replica."""
        if self.replica is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, dist.get_global_rank(self.replica, 0), group=self.replica)
        return held[0]

    def from_first(self, value: T) -> T:
        """The first rank's value on every rank of the run."""
        if not dist.is_initialized():
            return value
        held = [value]
        dist.broadcast_object_list(held, 0)
        return held[0]

    def of_replica(self, value: T) -> list[T]:
        """Every rank's value, in the order of the replica's ranks."""
        if self.replica is None:
            return [value]
        values: list[T] = [value] * dist.get_world_size(self.replica)
        dist.all_gather_object(values, value, group=self.replica)
        return values

    def any(self, flag: bool) -> bool:
        """Whether it is True on some leader of the run; other ranks' own values do not count."""
        return self.data.total(int(self.from_leader(flag))) > 0
