"""WorkerProcess: a process that calls one function on each item it is sent. It ends with the thread that started it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from megatron_replay.tasks.worker import receive, send

WORKER = Path(__file__).with_name("worker.py")


class WorkerDied(Exception):
    """The process has ended; the words say how."""


class WorkerProcess:
    """`function`, MODULE:FUNCTION or FILE.py:FUNCTION, in a process of its own with the variables `env`.

    `returns` "reward": a grader, called with its four keywords. "value": whatever JSON holds, called with any keywords.
    `memory_bytes` limits its address space. Raises ValueError that says why the function cannot be used, TimeoutError
    or WorkerDied where the process is not ready by `deadline` (time.monotonic).
    """

    def __init__(
        self,
        function: str,
        env: Mapping[str, str],
        *,
        returns: Literal["reward", "value"],
        deadline: float,
        memory_bytes: int | None = None,
    ) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            # by path, not with -m, which would import the package and torch; -P keeps this folder off sys.path
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER), str(os.getpid())],
                # neither the order of a set nor the threads of a library may change what a function returns
                env={**env, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
                stdin=theirs.fileno(),
                stdout=2,
                start_new_session=True,
            )
        settings = {
            "function": function,
            "returns": returns,
            # this process's folder comes last: a script's own folder, not the current one, is on its path
            "path": [*sys.path, os.getcwd()],
            "memory_bytes": memory_bytes,
        }
        said = self.call(settings, deadline)
        if "failed" in said:
            self.kill()
            raise ValueError(said["failed"])

    def call(self, item: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """What worker.py answers. Raises TimeoutError or WorkerDied: the process is dead then."""
        try:
            send(self._channel, dict(item), deadline)
            said: dict[str, Any] = receive(self._channel, deadline)
        except TimeoutError:
            self.kill()
            raise
        # a ValueError: what arrived is no JSON
        except (EOFError, OSError, ValueError):
            raise WorkerDied(self._ended()) from None
        return said

    def kill(self) -> None:
        """End the process and what it started in its session."""
        # a process that has ended may have left others of its session
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._channel.close()

    def _ended(self) -> str:
        # it closes its channel a moment before it ends; not collected yet, so its number is nobody else's
        ended, deadline = None, time.monotonic() + 1
        while ended is None and time.monotonic() < deadline:
            ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
            time.sleep(0.01)
        self.kill()
        code = self._process.returncode
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
