"""Two slots of memory that sender and workers share: host memory on one host, or device memory by CUDA IPC.

The sender fills one slot while the workers read the other. Who may do what travels as single bytes over a
local socket, so the kernel orders memory and a peer that dies is noticed at once. Host memory is an anonymous file
whose descriptor goes over the same socket: it has no name that could be left behind, and no limit of /dev/shm.

The memory of a sender that is closed serves the next one of its size. torch frees device memory that it has exported
only when every process that opened it says so, and an engine that was killed never does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.transports import cuda_ipc

SLOTS = 2
_FILLED, _READ = b"f", b"r"
# of this process, by device and bytes: (slots, file of host memory or -1) that closed senders have left
_SPARE: defaultdict[tuple[torch.device, int], list[tuple[Tensor, int]]] = defaultdict(list)


class SlotSender:
    def __init__(self, workers: int, largest: int, device: torch.device, timeout: float) -> None:
        if not sys.platform.startswith("linux"):
            raise ValueError(f"transports shared-memory and cuda-ipc need Linux, got {sys.platform}; use gloo")
        self.workers, self.timeout = workers, timeout
        self._slot_bytes = -(-largest // mmap.PAGESIZE) * mmap.PAGESIZE
        self._spare = _SPARE[device, SLOTS * self._slot_bytes]
        self._memory, self._file = self._spare.pop() if self._spare else _new(device, SLOTS * self._slot_bytes)
        self._closed = False
        # abstract: the name is in no file system and goes with the socket; the secret keeps other users out
        name, self._secret = f"megatron-replay-{secrets.token_hex(8)}", secrets.token_hex(16)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind("\0" + name)
        self._listener.listen(workers)
        self._listener.settimeout(timeout)
        self._peers: list[socket.socket] = []
        self._sent = self._read = 0  # messages
        self._slot = self._memory[:0]
        transport = "cuda-ipc" if device.type == "cuda" else "shared-memory"
        self.address = {"transport": transport, "name": name, "secret": self._secret, "slot_bytes": self._slot_bytes}

    def connect(self) -> None:
        while len(self._peers) < self.workers:
            peer, _ = self._listener.accept()
            peer.settimeout(self.timeout)
            if not secrets.compare_digest(_read(peer, len(self._secret)), self._secret.encode()):
                peer.close()
                continue
            if self._file >= 0:
                socket.send_fds(peer, [b"m"], [self._file])
            else:
                handle = cuda_ipc.export(self._memory)
                peer.sendall(struct.pack("<I", len(handle)) + handle)
            self._peers.append(peer)
        self._listener.close()

    def message(self, nbytes: int) -> Tensor:
        if self._sent - self._read == SLOTS:
            self._wait()
        self._slot = self._memory.narrow(0, self._sent % SLOTS * self._slot_bytes, nbytes)
        return self._slot

    def send(self) -> None:
        if self._slot.is_cuda:
            torch.cuda.current_stream(self._slot.device).synchronize()
        for peer in self._peers:
            peer.sendall(_FILLED)
        self._sent += 1

    def flush(self) -> None:
        while self._read < self._sent:
            self._wait()

    def close(self) -> None:
        for end in (self._listener, *self._peers):
            # wakes a thread that waits on it
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._peers = []
        if not self._closed:
            self._closed = True
            self._spare.append((self._memory, self._file))

    def _wait(self) -> None:
        for peer in self._peers:
            _expect(peer, _READ)
        self._read += 1


class SlotReceiver:
    def __init__(self, address: dict[str, Any], device: torch.device, timeout: float) -> None:
        self._slot_bytes, self._device = address["slot_bytes"], device
        self._peer = socket.socket(socket.AF_UNIX)
        self._peer.settimeout(timeout)
        try:
            self._peer.connect("\0" + address["name"])
        except OSError as error:
            raise WeightSyncError(
                f"transport {address['transport']} needs an engine on the trainer's host and network: {error}"
            ) from error
        self._peer.sendall(address["secret"].encode())
        if address["transport"] == "shared-memory":
            _, (file, *_), _, _ = socket.recv_fds(self._peer, 1, 1)
            self._memory = _map(file, SLOTS * self._slot_bytes)
            os.close(file)
        else:
            (size,) = struct.unpack("<I", _read(self._peer, 4))
            self._memory = cuda_ipc.open_exported(_read(self._peer, size))
        self._asked = 0

    def receive(self, nbytes: int) -> _Slot:
        slot = self._memory.narrow(0, self._asked % SLOTS * self._slot_bytes, nbytes)
        self._asked += 1
        return _Slot(self._peer, slot, self._device)

    def close(self) -> None:
        self._peer.close()


class _Slot:
    def __init__(self, peer: socket.socket, slot: Tensor, device: torch.device) -> None:
        self._peer, self._slot, self._device = peer, slot, device

    def wait(self) -> Tensor:
        """On the worker's own device: shards of several trainer ranks lie on as many GPUs."""
        _expect(self._peer, _FILLED)
        return self._slot.to(self._device)

    def release(self) -> None:
        for device in {self._slot.device, self._device}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        self._peer.sendall(_READ)


def _new(device: torch.device, size: int) -> tuple[Tensor, int]:
    if device.type == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=device), -1
    file = os.memfd_create("megatron-replay-weights")
    os.ftruncate(file, size)
    return _map(file, size), file


def _map(file: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)


def _read(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = peer.recv(count - len(data))
        if not part:
            raise WeightSyncError("the other side has given up the push")
        data += part
    return data


def _expect(peer: socket.socket, what: bytes) -> None:
    try:
        got = _read(peer, 1)
    except TimeoutError:
        raise WeightSyncError(f"the other side of a weight transfer said nothing for {peer.gettimeout():g} s") from None
    if got != what:
        raise WeightSyncError(f"the other side of a weight transfer said {got!r}, expected {what!r}")
