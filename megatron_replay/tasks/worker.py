"""The worker process: calls one function on each item that arrives on its channel, and answers with what came of it.

It is run as a script, by its path, and imports nothing of this project or torch, so it starts in no time.
`WorkerProcess` is the other end. The channel is a socket that arrives as standard input; what the function prints goes
to standard error.

A message is its length in 8 bytes, big-endian, and JSON. The first one holds the settings (`function`, `returns`,
`path`, `memory_bytes`); the answer is {"ready": true} or {"failed": why}. Then each item, the keyword arguments of the
function, is answered by {"value": what it returned} or {"error": what was raised, "value": the reward all the same, or
null}. Where it `returns` a "reward" the value is a float or null, and another answer is {"bad": what is no reward}.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import os
import resource
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ARGUMENTS = ("prompt", "response", "answer", "extra")
PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
MOST_WORDS = 500  # characters of an error that travel


def send(channel: socket.socket, message: Any, deadline: float | None = None) -> None:
    """Raises TimeoutError past `deadline` (time.monotonic)."""
    data = json.dumps(message).encode()
    channel.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
    channel.sendall(struct.pack("!Q", len(data)) + data)


def receive(channel: socket.socket, deadline: float | None = None) -> Any:
    """The next message. Raises EOFError where the other end is closed, TimeoutError past `deadline`."""
    (size,) = struct.unpack("!Q", _exactly(channel, 8, deadline))
    return json.loads(_exactly(channel, size, deadline))


def _exactly(channel: socket.socket, size: int, deadline: float | None) -> bytes:
    data = bytearray()
    while len(data) < size:
        channel.settimeout(None if deadline is None else max(1e-3, deadline - time.monotonic()))
        part = channel.recv(min(size - len(data), 1 << 20))
        if not part:
            raise EOFError(f"the channel ended after {len(data)} of {size} bytes")
        data += part
    return bytes(data)


def load(name: str, is_grader: bool) -> Callable[..., Any]:
    """The function that MODULE:FUNCTION or FILE.py:FUNCTION names.

    Raises ValueError for another form, a name that is no function, or a grader that cannot be called with the four
    keywords; what the import raises is passed on.
    """
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise ValueError(f"must be MODULE:FUNCTION, got {name!r}")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{place} must define a function {attribute}, got {type(function).__name__}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{name} must return a number, got an async function")
    try:
        if is_grader:
            inspect.signature(function).bind(**dict.fromkeys(ARGUMENTS))
    except TypeError as error:
        words = ", ".join(f"{x}=" for x in ARGUMENTS)
        raise ValueError(f"{name} must take ({words}), got {inspect.signature(function)}: {error}") from error
    return function


def answer(function: Callable[..., Any], item: dict[str, Any], is_grader: bool) -> dict[str, Any]:
    try:
        value = function(**item)
    # sys.exit in a grader is an error like another
    except BaseException as error:
        return {"error": describe(error), "value": getattr(error, "reward", None)}
    if value is None or not is_grader:
        return {"value": value}
    with suppress(OverflowError):
        if isinstance(value, numbers.Real) and math.isfinite(value):
            return {"value": float(value)}
    return {
        "bad": f"{type(value).__name__} {value!r:.100}" if isinstance(value, numbers.Real) else type(value).__name__
    }


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip(": ")[:MOST_WORDS]


def main() -> int:
    parent = int(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    # even in the middle of a computation that holds the interpreter: the kernel ends us with the thread that owns us
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        return 1
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    settings = receive(channel)
    sys.path[:] = settings["path"]
    if settings["memory_bytes"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (settings["memory_bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # where the machine runs out of memory, a worker goes before the trainer
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    is_grader = settings["returns"] == "reward"
    try:
        function = load(settings["function"], is_grader)
    except BaseException as error:
        send(channel, {"failed": describe(error)})
        return 1
    send(channel, {"ready": True})
    with suppress(EOFError):
        while True:
            send(channel, answer(function, receive(channel), is_grader))
    return 0


if __name__ == "__main__":
    sys.exit(main())
