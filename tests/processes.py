"""Whether processes of other parents still run, and waiting for what they do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil


def wait_for(what: Callable[[], Any], seconds: float = 10) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def alive(pid: float) -> bool:
    """A zombie is not."""
    try:
        return psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def gone(pids: Iterable[float]) -> bool:
    return not any(map(alive, pids))
