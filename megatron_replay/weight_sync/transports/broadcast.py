"""gloo and NCCL: one broadcast feeds the workers of all engines.

The groups are built by hand on a store of their own: torch.distributed's rendezvous would read the environment of a
surrounding torchrun, and make the store a client of the launcher's.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_replay.weight_sync.transports.buffers import BUFFERS, BufferedSender


class BroadcastSender(BufferedSender):
    """Rank 0 of a group of 1 + workers."""

    def __init__(
        self, backend: str, host: str, workers: int, largest: int, device: torch.device, timeout: float
    ) -> None:
        super().__init__(largest, device)
        self.backend, self.host, self.world, self.timeout = backend, host, 1 + workers, timedelta(seconds=timeout)
        # port 0: the system chooses a free one
        self._store = dist.TCPStore(host, 0, self.world, True, self.timeout, wait_for_workers=False)
        self.address = {
            "transport": backend,
            "host": host,
            "port": self._store.port,
            "world": self.world,
            "largest": largest,
        }
        self._group: Any = None

    def connect(self) -> None:
        self._group = _group(self.backend, self._store, 0, self.world, self.timeout, self.host)

    def _start(self, message: Tensor) -> Callable[[], object]:
        return _broadcast(self._group, message).wait

    def close(self) -> None:
        _end(self._group)
        self._group = None


class BroadcastReceiver:
    def __init__(self, address: dict[str, Any], worker: int, device: torch.device, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        host, world = address["host"], address["world"]
        store = dist.TCPStore(host, address["port"], world, False, limit, wait_for_workers=False)
        self._group = _group(address["transport"], store, 1 + worker, world, limit, None)
        # fresh memory costs more than the transfer: its pages come one by one
        self._free = [torch.empty(address["largest"], dtype=torch.uint8, device=device) for _ in range(BUFFERS)]

    def receive(self, nbytes: int) -> _Arriving:
        buffer = self._free.pop()
        message = buffer[:nbytes]
        return _Arriving(_broadcast(self._group, message), message, lambda: self._free.append(buffer))

    def close(self) -> None:
        _end(self._group)
        self._group = None


class _Arriving:
    def __init__(self, work: Any, message: Tensor, free: Callable[[], None]) -> None:
        self._work, self._message, self.release = work, message, free

    def wait(self) -> Tensor:
        self._work.wait()
        return self._message


def _group(backend: str, store: dist.Store, rank: int, world: int, timeout: timedelta, host: str | None) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    gloo = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
    return gloo(store, rank, world, options)


def _broadcast(group: Any, message: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([message], options)


def _end(group: Any) -> None:
    """Give up: what still waits on the group raises, here and at its peers."""
    if group is not None:
        group.abort()
