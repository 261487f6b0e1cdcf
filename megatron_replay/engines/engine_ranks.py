"""EngineRanks: who drives an engine, and how the other ranks learn what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from megatron_replay.data_parallel import DataParallelGroup

T = TypeVar("T")
# Ranks wait here while one of them samples or starts a server. Those waits have limits of their own (--rl-vllm-*), and
# a rank that dies ends the run: the limit of a collective would only cut a long batch short.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class EngineRanks:
    """The data-parallel replicas, and in each the rank that drives engines: the first of its model-parallel ranks.

    Without process groups one rank is everything. `device` is the one that trains. The groups are of gloo on any
    device: what they carry is small and lies in host memory.
    """

    data: DataParallelGroup
    replica: dist.ProcessGroup | None
    device: torch.device
    everyone: dist.ProcessGroup | None = None

    @classmethod
    def build(cls, data: DataParallelGroup, replica: dist.ProcessGroup, device: torch.device) -> EngineRanks:
        """Groups of our own over the ranks of `replica` and of the run. Every rank of the run calls it."""
        world = dist.get_world_size()
        if world == 1:
            return cls(data, None, device)
        replicas: list[tuple[int, ...]] = [()] * world
        mine = tuple(dist.get_process_group_ranks(replica))
        dist.all_gather_object(replicas, mine)
        made = {ranks: dist.new_group(list(ranks), timeout=PATIENCE, backend="gloo") for ranks in sorted(set(replicas))}
        everyone = dist.new_group(timeout=PATIENCE, backend="gloo")
        return cls(data, made[mine] if len(mine) > 1 else None, device, everyone)

    @property
    def leads(self) -> bool:
        """True on the one rank of a replica that talks to engines."""
        return self.replica is None or dist.get_rank(self.replica) == 0

    def from_leader(self, value: T) -> T:
        """The leader's value on every rank of its replica."""
        if self.replica is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, dist.get_global_rank(self.replica, 0), group=self.replica)
        return held[0]

    def from_first(self, value: T) -> T:
        """The first rank's value on every rank of the run."""
        if self.everyone is None:
            return value
        held = [value]
        dist.broadcast_object_list(held, 0, group=self.everyone)
        return held[0]

    def of_replica(self, value: T) -> list[T]:
        """Every rank's value, in the order of the replica's ranks."""
        if self.replica is None:
            return [value]
        values: list[T] = [value] * dist.get_world_size(self.replica)
        dist.all_gather_object(values, value, group=self.replica)
        return values

    def sum_of_leaders(self, values: Sequence[float]) -> list[float]:
        """Elementwise, over the leaders of all replicas, on every rank of the run."""
        sums = torch.tensor(values, dtype=torch.float64) * float(self.leads)
        if self.everyone is not None:
            dist.all_reduce(sums, group=self.everyone)
        return sums.tolist()

    def any(self, flag: bool) -> bool:
        """Whether it is True on some leader of the run; other ranks' own values do not count."""
        return self.sum_of_leaders([float(flag)])[0] > 0
