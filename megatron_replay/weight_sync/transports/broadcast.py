"""gloo and NCCL: one broadcast feeds the workers of all engines.

The groups are built by hand on a store of their own: torch.distributed's rendezvous would read the environment of a
surrounding torchrun, and make the store a client of the launcher's.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.transports.addresses import address_towards
from megatron_replay.weight_sync.transports.buffers import BUFFERS, BufferedSender

POLL = 2e-4  # seconds


class BroadcastSender(BufferedSender):
    """Rank 0 of a group of 1 + workers."""

    def __init__(
        self, backend: str, host: str, workers: int, largest: int, device: torch.device, timeout: float
    ) -> None:
        super().__init__(largest, device)
        self.backend, self.host, self.world, self.timeout = backend, host, 1 + workers, timedelta(seconds=timeout)
        # listens on this address alone, on a port that the system chooses: a store takes orders from whoever reaches it
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family)
        port = listening.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, self.world, True, self.timeout, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        self.address = {
            "transport": backend,
            "host": host,
            "port": port,
            "world": self.world,
            "largest": largest,
        }
        self._group: Any = None

    def connect(self) -> None:
        self._group = _group(self.backend, self._store, 0, self.world, self.timeout, self.host)
        _meet(self._group, self.backend, self._free[0][:1], self.timeout)

    def _start(self, message: Tensor) -> Callable[[], object]:
        return partial(_finish, _broadcast(self._group, message), self._group, self.backend, self.timeout)

    def close(self) -> None:
        _end(self._group)
        self._group = None


class BroadcastReceiver:
    def __init__(self, address: dict[str, Any], worker: int, device: torch.device, timeout: float) -> None:
        limit = timedelta(seconds=timeout)
        host, world = address["host"], address["world"]
        store = dist.TCPStore(host, address["port"], world, False, limit, wait_for_workers=False)
        self._backend, self._limit = address["transport"], limit
        self._group = _group(self._backend, store, 1 + worker, world, limit, address_towards(host))
        # fresh memory costs more than the transfer: its pages come one by one
        self._free = [torch.empty(address["largest"], dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        _meet(self._group, self._backend, self._free[0][:1], limit)

    def receive(self, nbytes: int) -> _Arriving:
        buffer = self._free.pop()
        message = buffer[:nbytes]
        arrive = partial(_finish, _broadcast(self._group, message), self._group, self._backend, self._limit)
        return _Arriving(arrive, message, lambda: self._free.append(buffer))

    def close(self) -> None:
        _end(self._group)
        self._group = None


class _Arriving:
    def __init__(self, arrive: Callable[[], None], message: Tensor, free: Callable[[], None]) -> None:
        self._arrive, self._message, self.release = arrive, message, free

    def wait(self) -> Tensor:
        self._arrive()
        return self._message


def _group(backend: str, store: dist.Store, rank: int, world: int, timeout: timedelta, host: str) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, world, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, world, options)


def _broadcast(group: Any, message: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([message], options)


def _meet(group: Any, backend: str, memory: Tensor, timeout: timedelta) -> None:
    """NCCL makes its communicator with the first message; gloo has met all in its constructor."""
    if backend == "nccl":
        _finish(_broadcast(group, memory), group, backend, timeout)


def _finish(work: Any, group: Any, backend: str, timeout: timedelta) -> None:
    """Wait until a message has been sent or has arrived; raise after the timeout.

    NCCL's own wait only orders streams: who is late there would be noticed by its watchdog, which ends the process.
    """
    if backend == "nccl":
        deadline = time.monotonic() + timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline:
                group.abort()
                raise WeightSyncError(f"a message over NCCL took longer than {timeout.total_seconds():g} s")
            time.sleep(POLL)
    work.wait()


def _end(group: Any) -> None:
    """Give up: what still waits on the group raises, here and at its peers."""
    if group is not None:
        group.abort()
