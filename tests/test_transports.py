"""Every transport that runs here: bytes through, two workers fed at once, and an end for whoever waits for the dead."""

from __future__ import annotations

import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.transports import Receiver, Sender, open_receiver, open_sender
from megatron_replay.weight_sync.transports.cuda_ipc import refuse_expandable_segments
from tests.transfers import CPU

HERE = ["in-process", "shared-memory", "gloo"]
SIZES = [48, 4096, 16, 100_000, 99_984, 32]
LARGEST = max(SIZES)


def opened(transport: str, workers: int = 1, timeout: float = 20.0) -> tuple[Sender, list[Receiver]]:
    sender = open_sender(transport, host="127.0.0.1", workers=workers, largest=LARGEST, device=CPU, timeout=timeout)
    with ThreadPoolExecutor(workers) as pool:
        asked = [
            pool.submit(open_receiver, sender.address, worker=i, device=CPU, timeout=timeout) for i in range(workers)
        ]
        sender.connect()
        return sender, [a.result() for a in asked]


def content(number: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))


def read(receiver: Receiver, sizes: list[int], pause: float = 0.0) -> list[torch.Tensor]:
    """As the product reads: the next message is asked for before one is worked on."""
    got, arriving = [], receiver.receive(sizes[0])
    for i in range(len(sizes)):
        message = arriving.wait()
        here, arriving = arriving, receiver.receive(sizes[i + 1]) if i + 1 < len(sizes) else None
        time.sleep(pause)
        got.append(message.clone())
        here.release()
    return got


@pytest.mark.parametrize(
    ("transport", "workers"), [("in-process", 1), ("shared-memory", 1), ("shared-memory", 3), ("gloo", 1), ("gloo", 3)]
)
def test_messages_of_any_size_arrive_whole_and_in_order_push_after_push(transport: str, workers: int) -> None:
    sender, receivers = opened(transport, workers)
    with ThreadPoolExecutor(workers) as pool:
        for push in range(3):
            # slow and fast readers: the sender waits for the slowest before it writes into a slot again
            reading = [pool.submit(read, r, SIZES, 0.01 * i) for i, r in enumerate(receivers)]
            for i, size in enumerate(SIZES):
                sender.message(size).copy_(content(100 * push + i, size))
                sender.send()
            sender.flush()
            for got in reading:
                for i, (message, size) in enumerate(zip(got.result(), SIZES, strict=True)):
                    assert torch.equal(message, content(100 * push + i, size)), (push, i)
    for end in (*receivers, sender):
        end.close()


def fails(waiting: Future, within: float = 8.0) -> BaseException:
    error = waiting.exception(timeout=within)
    assert error is not None
    return error


@pytest.mark.parametrize("transport", HERE)
def test_a_worker_that_leaves_ends_the_senders_wait(transport: str) -> None:
    sender, (receiver,) = opened(transport)

    def send() -> None:
        for size in SIZES * 40:
            sender.message(LARGEST)[:size].zero_()
            sender.send()
        sender.flush()

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        receiver.receive(LARGEST).wait()
        receiver.close()
        fails(sending)
    sender.close()


@pytest.mark.parametrize("transport", HERE)
def test_a_sender_that_leaves_ends_the_workers_wait(transport: str) -> None:
    sender, (receiver,) = opened(transport)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: receiver.receive(64).wait())
        time.sleep(0.2)
        sender.close()
        fails(waiting)
    receiver.close()


@pytest.mark.parametrize("transport", HERE)
def test_silence_ends_after_the_timeout(transport: str) -> None:
    sender, (receiver,) = opened(transport, timeout=1.0)
    began = time.monotonic()
    with pytest.raises((WeightSyncError, RuntimeError)):
        receiver.receive(64).wait()
    assert 0.5 < time.monotonic() - began < 8
    receiver.close()
    sender.close()


def test_a_worker_that_never_comes_ends_the_senders_wait() -> None:
    for transport in ("shared-memory", "gloo"):
        sender = open_sender(transport, host="127.0.0.1", workers=1, largest=64, device=CPU, timeout=1.0)
        began = time.monotonic()
        with pytest.raises((OSError, RuntimeError)):
            sender.connect()
        assert time.monotonic() - began < 8
        sender.close()


def test_shared_memory_is_for_those_who_know_the_secret() -> None:
    sender = open_sender("shared-memory", host="127.0.0.1", workers=1, largest=64, device=CPU, timeout=10.0)
    with ThreadPoolExecutor(2) as pool:
        connecting = pool.submit(sender.connect)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            stranger.connect("\0" + sender.address["name"])
            stranger.sendall(b"0" * len(sender.address["secret"]))
            assert stranger.recv(1) == b"", "hung up on, and given nothing"
        receiver = open_receiver(sender.address, worker=0, device=CPU, timeout=10.0)
        connecting.result(5)
    sender.message(64).fill_(9)
    sender.send()
    assert receiver.receive(64).wait().eq(9).all()
    receiver.close()
    sender.close()


@pytest.mark.parametrize("address", [{"transport": "in-process", "key": "gone"}, {"transport": "shared-memory"}])
def test_an_engine_elsewhere_is_told_what_the_transport_needs(address: dict[str, Any]) -> None:
    address = {"name": "nobody-listens", "secret": "x", "slot_bytes": 4096} | address
    with pytest.raises(
        WeightSyncError, match=rf"transport {address['transport']} needs an engine (in|on) the trainer's"
    ):
        open_receiver(address, worker=0, device=CPU, timeout=1.0)


def test_unknown_transports_and_too_many_workers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"transport must be one of .*gloo.*, got 'carrier-pigeon'"):
        open_sender("carrier-pigeon", host="127.0.0.1", workers=1, largest=1, device=CPU, timeout=1.0)
    with pytest.raises(ValueError, match=r"in-process feeds one worker, in this process, got 2"):
        open_sender("in-process", host="127.0.0.1", workers=2, largest=1, device=CPU, timeout=1.0)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [("expandable_segments:True", True), ("max_split_size_mb:64, expandable_segments: true", True), ("", False),
     ("expandable_segments:False", False)],
)  # fmt: skip
def test_memory_that_cannot_be_shared_is_refused_at_the_start(settings: str, refused: bool) -> None:
    words = r"PYTORCH_CUDA_ALLOC_CONF .* expandable_segments .*, got"
    with pytest.raises(ValueError, match=words) if refused else nullcontext():
        refuse_expandable_segments(settings)
