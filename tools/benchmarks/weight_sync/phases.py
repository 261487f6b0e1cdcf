"""Where a push spends its time: the stacks of a process, looked at every few milliseconds.

Nothing is wrapped, so a push that is not looked at runs as in the field, and a function that is renamed changes a
label at most. A look counts for the time since the look before it. Ends and phases:

    sender   pack (shards into the message), checksum, wire (sending, or waiting for memory that is still read),
             engine (all is sent, the engine still loads), control (pause, begin, commit, resume)
    engine   wire (waiting for a message), checksum, convert (to Hugging Face tensors), load, finalize, start
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from types import FrameType, TracebackType

PERIOD = 0.002  # seconds between two looks
Frame = tuple[str, str]  # file, function

# the first that is found, from the innermost frame outwards
_FILES = {
    "sender": (("weight_sync/message.py", "checksum"), ("weight_sync/transports/", "wire")),
    "engine": (
        ("weight_sync/message.py", "checksum"),
        ("weight_sync/transports/", "wire"),
        ("weight_sync/", "convert"),
        ("vllm/model_executor/", "load"),
    ),
}


def place(stack: list[Frame]) -> tuple[str, str] | None:
    """(end, phase) of a stack, innermost frame first; None: it is no part of a push."""
    functions = {function for _, function in stack}
    if "receive_weights" in functions:
        return "engine", _by_file(stack, "engine") or "load"
    if "finish_weight_update" in functions and _runs(stack, "vllm_weight_transfer.py"):
        return "engine", "finalize"
    if "start_weight_update" in functions and _runs(stack, "vllm_weight_transfer.py"):
        return "engine", "start"
    if "push" not in functions or not _runs(stack, "weight_sync/sender.py"):
        return None
    if "_stream" in functions:
        return "sender", _by_file(stack, "sender") or "pack"
    return "sender", "engine" if "_results" in functions and "_each" not in functions else "control"


class StackClock:
    """Looks at all other threads of this process between `with` and its end."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> StackClock:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def phases(self, end: str) -> dict[str, float]:
        """Seconds of each phase of one end, the longest first."""
        found = {phase: s for (of, phase), s in self._seconds.items() if of == end}
        return dict(sorted(found.items(), key=lambda item: -item[1]))

    def _look(self) -> None:
        own, last = threading.get_ident(), time.perf_counter()
        while not self._ended.wait(PERIOD):
            now = time.perf_counter()
            for thread, frame in sys._current_frames().items():
                if thread != own and (found := place(list(_frames(frame)))) is not None:
                    self._seconds[found] += now - last
            last = now


def _frames(frame: FrameType | None) -> Iterator[Frame]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_code.co_name
        frame = frame.f_back


def _by_file(stack: list[Frame], end: str) -> str | None:
    return next((phase for file, _ in stack for part, phase in _FILES[end] if part in file), None)


def _runs(stack: list[Frame], part: str) -> bool:
    return any(part in file for file, _ in stack)
