"""The line to a child process: who is let in, and an end for whoever waits. A small program stands in for the child."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from megatron_replay.engines import vllm_child
from megatron_replay.engines.vllm_child import KEY_VARIABLE, VllmChild
from megatron_replay.engines.vllm_client import EngineError

# started as python is: -m MODULE PORT OPTIONS
CHILD = """#!{python}
import os, socket, struct, sys, time
from multiprocessing.connection import Connection

def connect():
    return socket.create_connection(("127.0.0.1", int(sys.argv[3])))

{before}
line = Connection(connect().detach())
line.send_bytes(os.environ["{key}"].encode())
line.send((True, None))
{then}
"""
ANSWER = """
while True:
    method, args = line.recv()
    line.send((True, 7))
"""


def start(folder: Path, *, before: str = "", then: str = ANSWER, timeout: float = 20.0) -> VllmChild:
    python = folder / "python"
    python.write_text(CHILD.format(python=sys.executable, key=KEY_VARIABLE, before=before, then=then))
    python.chmod(0o755)
    return VllmChild({}, folder / "log", timeout=timeout, startup_timeout=60, python=str(python))


@pytest.mark.parametrize(
    "stranger",
    [
        "silent = connect()",
        "connect().close()",
        "slow = connect(); slow.sendall(b'\\0\\0\\0\\x20' + b'0' * 5)",
        "loud = connect(); loud.sendall(b'\\x7f\\xff\\xff\\xff' + b'0' * 99)",
        "wrong = connect(); wrong.sendall(b'\\0\\0\\0\\x20' + b'0' * 32)",
    ],
)
def test_a_stranger_who_connects_first_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    monkeypatch.setattr(vllm_child, "HELLO", 0.4)
    began = time.monotonic()
    child = start(tmp_path, before=stranger)
    try:
        assert child.world_size() == 7 and time.monotonic() - began < 30
    finally:
        child.close()


def test_a_child_that_takes_nothing_ends_the_wait(tmp_path: Path) -> None:
    """What is sent is larger than any buffer between the two."""
    child = start(tmp_path, then="time.sleep(300)", timeout=0.5)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"generate: no answer within 0.5 s, the process was ended") as caught:
        child.generate(b"0" * (64 << 20), [])
    assert caught.value.kind == "timeout" and time.monotonic() - began < 30 and not child.alive()
    with pytest.raises(EngineError, match=r"the process ended"):
        child.world_size()
    child.close()


def test_an_answer_that_stops_half_way_ends_the_wait(tmp_path: Path) -> None:
    half = "line.recv(); os.write(line.fileno(), struct.pack('!i', 99) + b'0'); time.sleep(300)"
    child = start(tmp_path, then=half, timeout=0.5)
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"world_size: no answer within 0.5 s"):
        child.world_size()
    assert time.monotonic() - began < 30 and not child.alive()
    child.close()
