"""The processes of a run, found by descent: this process is the one that orphans are given to, so none is lost."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_replay.engines.guardian import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, segments, segments_of

POLL = 0.05  # seconds
GUARDIAN = "guardian.py"
ENGINE_MODULES = ("vllm.entrypoints", "megatron_replay.engines.vllm_child")
_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def adopt_orphans() -> None:
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_with_parent() -> None:
    """For a new process: killed when its parent is."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def descendants() -> list[psutil.Process]:
    """All that live."""
    return [p for p in psutil.Process().children(recursive=True) if alive(p)]


def alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks(launcher: int) -> dict[int, psutil.Process]:
    """rank -> process: torchrun's workers are its children with RANK in their environment."""
    found: dict[int, psutil.Process] = {}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(launcher).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if alive(child) and (rank := child.environ().get("RANK", "")).isdigit():
                    found[int(rank)] = child
    return dict(sorted(found.items()))


def engines() -> list[psutil.Process]:
    """vLLM's processes: servers, children that hold an LLM(), and their workers. Guardians are no engines."""
    return [p for p in descendants() if _is_engine(p)]


def _is_engine(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline())
        return GUARDIAN not in words and (words.startswith("VLLM::") or any(m in words for m in ENGINE_MODULES))
    return False


def said(process: psutil.Process) -> str:
    """Its number and command, for a report: files by their names, so that it can be kept."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {without_folders(' '.join(process.cmdline()))[:200]}"
    return str(process.pid)


def without_folders(command: str) -> str:
    """The command with /a/b/c as c."""
    return re.sub(r"(?<!\S)(@?)/(?:[^/\s]+/)+", r"\1", command)


def wait_until_gone(seconds: float, look: Callable[[], None]) -> list[psutil.Process]:
    """Wait for all descendants to end; those that have not after `seconds`. `look` is called meanwhile."""
    deadline = time.monotonic() + seconds
    while (left := descendants()) and time.monotonic() < deadline:
        look()
        time.sleep(POLL)
    return left


def end_all() -> None:
    """SIGKILL to all descendants until there is none; their exit codes are collected."""
    while left := descendants():
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass


class SharedMemory:
    """Segments of /dev/shm that our processes have used. Those of others on the machine are not ours to judge."""

    def __init__(self) -> None:
        self.foreign = segments()
        self.ours: set[tuple[str, int]] = set()
        self._unclaimed: set[tuple[str, int]] = set()

    def look(self) -> None:
        """Who uses the segments that are new; once a process is dead it could not be known."""
        unclaimed = segments() - self.foreign - self.ours
        if unclaimed == self._unclaimed:
            return
        for process in descendants():
            self.ours |= segments_of(process.pid) & unclaimed
        self._unclaimed = unclaimed - self.ours

    def left(self) -> list[Path]:
        return sorted(Path(name) for name, _ in self.ours & segments())
