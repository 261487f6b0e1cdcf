"""BufferedSender: the two buffers of a sender whose transport does not bring memory of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BUFFERS = 2  # one is filled while the other is on its way


class BufferedSender:
    address: dict[str, Any]

    def __init__(self, largest: int, device: torch.device) -> None:
        self._free = deque(torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(BUFFERS))
        self._sent: deque[tuple[Callable[[], object], Tensor]] = deque()
        self._size = 0

    def message(self, nbytes: int) -> Tensor:
        if not self._free:
            self._wait()
        self._size = nbytes
        return self._free[0][:nbytes]

    def send(self) -> None:
        arrived = self._start(self._free[0][: self._size])
        self._sent.append((arrived, self._free.popleft()))

    def flush(self) -> None:
        while self._sent:
            self._wait()

    def _start(self, message: Tensor) -> Callable[[], object]:
        """Begin to send; the returned call waits until the message has left its memory."""
        raise NotImplementedError

    def _wait(self) -> None:
        arrived, buffer = self._sent.popleft()
        arrived()
        self._free.append(buffer)
