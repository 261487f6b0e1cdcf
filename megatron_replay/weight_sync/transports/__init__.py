"""How one sender's messages reach the workers of all engines. One dispatch point: `open_sender`, `open_receiver`.

A transport has two ends. The sender's has an `address` (JSON) that reaches the workers over the engines' control
channel; a worker's end is opened with it. Both ends are lock-step: the
n-th message sent is the n-th received, its size known to both. A peer that dies, closes or is late raises on the other.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_replay.ops.checks import require_choice

TRANSPORTS = ("in-process", "gloo", "nccl", "shared-memory", "cuda-ipc")


class Sender(Protocol):
    address: dict[str, Any]

    def connect(self) -> None:
        """Meet the workers, who call `open_receiver` meanwhile."""

    def message(self, nbytes: int) -> Tensor:
        """[nbytes] uint8 for the next message; waits until an earlier message has left that memory."""

    def send(self) -> None:
        """Send the memory that `message` returned last."""

    def flush(self) -> None:
        """Wait until every message has left."""

    def close(self) -> None: ...


class Received(Protocol):
    def wait(self) -> Tensor:
        """The message [bytes] uint8; valid until `release`."""

    def release(self) -> None:
        """The message is no longer read."""


class Receiver(Protocol):
    def receive(self, nbytes: int) -> Received: ...
    def close(self) -> None: ...


def open_sender(
    transport: str, *, host: str, workers: int, largest: int, device: torch.device, timeout: float
) -> Sender:
    """The sending end for `workers` workers and messages of at most `largest` bytes; `timeout` in seconds.

    `host` is the address under which the workers reach this process.
    """
    require_choice("transport", transport, TRANSPORTS)
    if transport in ("gloo", "nccl"):
        from megatron_replay.weight_sync.transports.broadcast import BroadcastSender

        return BroadcastSender(transport, host, workers, largest, device, timeout)
    if transport == "in-process":
        from megatron_replay.weight_sync.transports.in_process import InProcessSender

        return InProcessSender(workers, largest, device, timeout)
    from megatron_replay.weight_sync.transports.slots import SlotSender

    on_device = device if transport == "cuda-ipc" else torch.device("cpu")
    return SlotSender(workers, largest, on_device, timeout)


def open_receiver(address: dict[str, Any], *, worker: int, device: torch.device, timeout: float) -> Receiver:
    """Worker `worker` (0-based, over all engines) of the sender at `address`; blocks until both have met."""
    transport = address["transport"]
    require_choice("transport", transport, TRANSPORTS)
    if transport in ("gloo", "nccl"):
        from megatron_replay.weight_sync.transports.broadcast import BroadcastReceiver

        return BroadcastReceiver(address, worker, device, timeout)
    if transport == "in-process":
        from megatron_replay.weight_sync.transports.in_process import InProcessReceiver

        return InProcessReceiver(address, timeout)
    from megatron_replay.weight_sync.transports.slots import SlotReceiver

    return SlotReceiver(address, device, timeout)
