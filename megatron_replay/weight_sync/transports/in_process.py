"""An engine in the sender's own process: messages change hands through a queue, nothing is copied."""

from __future__ import annotations

import queue
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.transports.buffers import BufferedSender

GIVEN_UP = "the engine has given up the push"
# of this process: key of a sender -> its queue of (message, future that is done when the worker has read it)
_OPEN: dict[str, queue.Queue[tuple[Tensor, Future[None]] | None]] = {}


class InProcessSender(BufferedSender):
    def __init__(self, workers: int, largest: int, device: torch.device, timeout: float) -> None:
        if workers != 1:
            raise ValueError(f"transport in-process feeds one worker, in this process, got {workers}")
        super().__init__(largest, device)
        self.timeout = timeout
        self._key = uuid.uuid4().hex
        self._queue = _OPEN[self._key] = queue.Queue()
        self.address = {"transport": "in-process", "key": self._key}

    def connect(self) -> None:
        """Nobody to wait for: the queue is there."""

    def _start(self, message: Tensor) -> Callable[[], object]:
        read: Future[None] = Future()
        self._queue.put((message, read))
        # looked at after the put: a worker that left before it will not look into its queue again
        if self._key not in _OPEN:
            raise WeightSyncError(GIVEN_UP)
        return partial(read.result, self.timeout)

    def close(self) -> None:
        _OPEN.pop(self._key, None)
        # wakes a worker that waits
        self._queue.put(None)


class InProcessReceiver:
    def __init__(self, address: dict[str, Any], timeout: float) -> None:
        self._key, self.timeout = address["key"], timeout
        if self._key not in _OPEN:
            raise WeightSyncError("transport in-process needs an engine in the trainer's own process")
        self._queue = _OPEN[self._key]
        self._taken: list[_Taken] = []

    def receive(self, nbytes: int) -> _Taken:
        taken = _Taken(self._queue, nbytes, self.timeout)
        self._taken = [t for t in self._taken if not t.is_over()] + [taken]
        return taken

    def close(self) -> None:
        """What nobody will read must not leave its sender waiting."""
        _OPEN.pop(self._key, None)
        unread = [t.read for t in self._taken if t.read is not None]
        while not self._queue.empty():
            if (item := self._queue.get()) is not None:
                unread.append(item[1])
        for read in unread:
            if not read.done():
                read.set_exception(WeightSyncError(GIVEN_UP))


class _Taken:
    def __init__(self, source: queue.Queue[tuple[Tensor, Future[None]] | None], nbytes: int, timeout: float) -> None:
        self._queue, self._nbytes, self._timeout = source, nbytes, timeout
        self.read: Future[None] | None = None

    def is_over(self) -> bool:
        return self.read is not None and self.read.done()

    def wait(self) -> Tensor:
        try:
            item = self._queue.get(timeout=self._timeout)
        except queue.Empty:
            raise WeightSyncError(f"the trainer sent nothing for {self._timeout:g} s") from None
        if item is None:
            raise WeightSyncError("the trainer has given up the push")
        message, self.read = item
        if message.numel() != self._nbytes:
            raise WeightSyncError(f"a message of {self._nbytes} bytes was expected, got {message.numel()}")
        return message

    def release(self) -> None:
        if self.read is not None and not self.read.done():
            self.read.set_result(None)
