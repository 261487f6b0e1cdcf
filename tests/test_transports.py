"""Every transport that runs here: bytes through, two workers fed at once, and an end for whoever waits for the dead."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_replay.weight_sync.error import PlanRefusedError, WeightSyncError
from megatron_replay.weight_sync.transports import Receiver, Sender, broadcast, nccl, open_receiver, open_sender
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


def test_a_later_sender_has_the_slots_of_one_that_is_closed() -> None:
    """So that engines which are started again and again do not add up on the trainer's GPUs."""

    def slots(sender: Sender) -> int:
        return sender.message(16).data_ptr()

    first, (receiver,) = opened("shared-memory")
    before = slots(first)
    for end in (receiver, first, first):
        end.close()
    second, (receiver,) = opened("shared-memory")
    assert slots(second) == before
    beside, (other,) = opened("shared-memory")
    assert slots(beside) != before, "closed twice, left once"
    larger = open_sender("shared-memory", host="", workers=1, largest=10 * LARGEST, device=CPU, timeout=1.0)
    assert slots(larger) not in (before, slots(beside))
    # what is sent through them arrives
    second.message(4096).copy_(content(1, 4096))
    second.send()
    assert torch.equal(receiver.receive(4096).wait(), content(1, 4096))
    for end in (receiver, other, second, beside, larger):
        end.close()


class FakeGroup:
    """NCCL's, as far as a machine without it can have one: its first message meets the others, or hangs."""

    def __init__(self, meets: bool, arrives: bool = True, error: Exception | None = None) -> None:
        self.met, self.aborted, self.arrives, self.error = threading.Event(), threading.Event(), arrives, error
        if meets:
            self.met.set()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.met.wait()
        if self.error is not None:
            raise self.error
        return SimpleNamespace(is_completed=lambda: self.arrives, wait=lambda: True)

    def abort(self) -> None:
        self.aborted.set()


def over_nccl(monkeypatch: pytest.MonkeyPatch, group: FakeGroup, timeout: float) -> Sender:
    monkeypatch.setattr(broadcast, "_group", lambda *_: group)
    monkeypatch.setattr(broadcast, "nccl_version", lambda: [2, 27, 5])
    return open_sender("nccl", host="127.0.0.1", workers=1, largest=64, device=CPU, timeout=timeout)


def test_a_meeting_over_nccl_ends_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup(meets=False)
    sender = over_nccl(monkeypatch, group, 0.3)
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"^transport nccl: not all had met after 0\.3 s$"):
        sender.connect()
    assert 0.2 < time.monotonic() - began < 8
    sender.close()
    # nobody waits for the call any more, and what comes of it is given up
    assert not group.aborted.is_set()
    group.met.set()
    assert group.aborted.wait(8)


def test_a_meeting_over_nccl_that_is_given_up_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    group = FakeGroup(meets=False)
    sender = over_nccl(monkeypatch, group, 60.0)
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(sender.connect)
        time.sleep(0.1)
        sender.close()
        error = fails(connecting)
    assert isinstance(error, WeightSyncError) and str(error) == "transport nccl: given up before all had met"
    group.met.set()
    assert group.aborted.wait(8)


def test_what_nccl_says_of_a_meeting_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = over_nccl(monkeypatch, FakeGroup(meets=True, error=RuntimeError("no route")), 8.0)
    with pytest.raises(RuntimeError, match="^no route$"):
        sender.connect()
    sender.close()


@pytest.mark.parametrize("connected", [False, True])
def test_a_message_over_nccl_that_does_not_arrive_raises(monkeypatch: pytest.MonkeyPatch, connected: bool) -> None:
    group = FakeGroup(meets=True, arrives=connected)
    sender = over_nccl(monkeypatch, group, 0.3)
    with pytest.raises(WeightSyncError, match=r"^a message over NCCL took longer than 0\.\d+ s$"):
        sender.connect()
        group.arrives = False
        sender.message(16)
        sender.send()
        sender.flush()
    assert group.aborted.is_set()
    sender.close()


@pytest.mark.parametrize("before", [None, "3"])
def test_errors_of_an_nccl_group_are_left_to_those_who_wait(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """torch reads the mode from the environment when it makes a group: other groups keep theirs."""
    made: list[tuple[Any, str | None]] = []

    class Group:
        class Options:
            _timeout = timedelta(0)

        def __init__(self, store: Any, rank: int, world: int, options: Any) -> None:
            made.append((options._timeout, os.environ.get(nccl.ERROR_HANDLING)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    if before is None:
        monkeypatch.delenv(nccl.ERROR_HANDLING, raising=False)
    else:
        monkeypatch.setenv(nccl.ERROR_HANDLING, before)
    limit = timedelta(minutes=10)
    nccl.nccl_group(dist.HashStore(), 0, 2, limit)
    ((watchdog, mode),) = made
    assert watchdog >= 2 * limit and mode == "0"
    assert os.environ.get(nccl.ERROR_HANDLING) == before


def test_a_process_survives_failed_groups_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for before, after in ((None, "0"), ("1", "1")):
        if before is None:
            monkeypatch.delenv(nccl.DUMP, raising=False)
        else:
            monkeypatch.setenv(nccl.DUMP, before)
        nccl.survive_failed_groups()
        assert os.environ[nccl.DUMP] == after
    monkeypatch.delenv(nccl.DUMP)


def test_two_versions_of_nccl_are_told_apart_before_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    sender = over_nccl(monkeypatch, FakeGroup(meets=True), 1.0)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7, "rc1"))
    words = r"^transport nccl .* the trainer has 2\.27\.5, the engine 2\.29\.7; --rl-vllm-transport gloo"
    with pytest.raises(PlanRefusedError, match=words):
        open_receiver(sender.address, worker=0, device=CPU, timeout=1.0)
    sender.close()
    nccl.check_same_nccl([2, 29, 7])


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
