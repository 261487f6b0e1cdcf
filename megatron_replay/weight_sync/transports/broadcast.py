"""gloo and NCCL: one broadcast feeds the workers of all engines.

The groups are built by hand on a store of their own: torch.distributed's rendezvous would read the environment of a
surrounding torchrun, and make the store a client of the launcher's.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.transports.addresses import address_towards
from megatron_replay.weight_sync.transports.buffers import BUFFERS, BufferedSender
from megatron_replay.weight_sync.transports.nccl import check_same_nccl, nccl_group, nccl_version

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
        if backend == "nccl":
            self.address["nccl"] = nccl_version()
        self._group: Any = None
        self._first: Future[Any] = Future()

    def connect(self) -> None:
        group = _group(self.backend, self._store, 0, self.world, self.timeout, self.host)
        _meet(group, self.backend, self._free[0][:1], self.timeout, self._first)
        self._group = group

    def _start(self, message: Tensor) -> Callable[[], object]:
        return partial(_finish, _broadcast(self._group, message), self._group, self.backend, self.timeout)

    def close(self) -> None:
        # who still waits to meet the workers, in another thread, is told
        self._first.cancel()
        _end(self._group)
        self._group = None


class BroadcastReceiver:
    def __init__(self, address: dict[str, Any], worker: int, device: torch.device, timeout: float) -> None:
        if address["transport"] == "nccl":
            check_same_nccl(address["nccl"])
        limit = timedelta(seconds=timeout)
        host, world = address["host"], address["world"]
        store = dist.TCPStore(host, address["port"], world, False, limit, wait_for_workers=False)
        self._backend, self._limit = address["transport"], limit
        group = _group(self._backend, store, 1 + worker, world, limit, address_towards(host))
        # fresh memory costs more than the transfer: its pages come one by one
        self._free = [torch.empty(address["largest"], dtype=torch.uint8, device=device) for _ in range(BUFFERS)]
        _meet(group, self._backend, self._free[0][:1], limit, Future())
        self._group = group

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
        return nccl_group(store, rank, world, timeout)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, world, options)


def _broadcast(group: Any, message: Tensor) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return group.broadcast([message], options)


def _meet(group: Any, backend: str, memory: Tensor, timeout: timedelta, first: Future[Any]) -> None:
    """NCCL makes its communicator with the first message; gloo has met all in its constructor.

    The call waits for all and has no limit, so it is made in a thread. Raises TimeoutError when the limit is over, and
    WeightSyncError when `first` is cancelled before; the call is then left to itself, and ends what comes of it.
    """
    if backend != "nccl":
        return
    deadline = time.monotonic() + timeout.total_seconds()

    def send_first() -> None:
        try:
            work = _broadcast(group, memory)
        except Exception as error:
            outcome: Callable[[], None] = partial(first.set_exception, error)
        else:
            outcome = partial(first.set_result, work)
        try:
            outcome()
        except InvalidStateError:
            group.abort()

    # a daemon: the end of the process does not wait for it
    threading.Thread(target=send_first, daemon=True, name="nccl-meeting").start()
    try:
        first.exception(timeout.total_seconds())
    except CancelledError:
        raise WeightSyncError(f"transport {backend}: given up before all had met") from None
    except TimeoutError:
        if first.cancel():
            raise TimeoutError(f"transport {backend}: not all had met after {timeout.total_seconds():g} s") from None
    _finish(first.result(), group, backend, timedelta(seconds=max(0.0, deadline - time.monotonic())))


def _finish(work: Any, group: Any, backend: str, timeout: timedelta) -> None:
    """Wait until a message has been sent or has arrived; raise after the timeout.

    NCCL's own wait only orders streams: who is late there would be noticed by its watchdog alone (transports.nccl).
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
