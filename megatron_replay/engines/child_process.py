"""A program whose life is bound to ours: when this process ends, in whatever way, the program and all that it started
end too, and the shared memory that they leave is freed. guardian.py runs between the two.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# what torchrun sets for its workers: a server that inherits it would join our rendezvous
TORCHRUN = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
TORCHRUN_PREFIXES = ("ROLE_", "TORCHELASTIC_")
GRACE = 2.0  # seconds from SIGTERM to SIGKILL
LOG_TAIL_BYTES = 1 << 16
GUARDIAN = Path(__file__).with_name("guardian.py")


class ChildProcess:
    """`command` in a session of its own, its output appended to `log_path`, its input empty.

    It ends with `stop`, or with this process in whatever way (kill -9 included). `reserved` are sockets that the
    guardian holds as long as the command runs. Raises FileNotFoundError, PermissionError or RuntimeError where the
    command does not start.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: str | os.PathLike[str],
        reserved: Sequence[socket.socket] = (),
    ) -> None:
        self.log_path = Path(log_path)
        self._returncode: int | None = None
        self._said = b""
        # by path, not with -m, which would import the package and torch; -P keeps this folder off sys.path
        guardian = [sys.executable, "-P", str(GUARDIAN), str(os.getpid()), json.dumps(list(command))]
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._guardian = subprocess.Popen(
                guardian,
                env=dict(env),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=[s.fileno() for s in reserved],
            )
        assert self._guardian.stdin is not None and self._guardian.stdout is not None
        self._control, self._status = self._guardian.stdin, self._guardian.stdout
        first = self._status.readline().split(maxsplit=1)
        if not first or first[0] != b"pid":
            words = first[1].decode() if len(first) == 2 else self.log_tail(5)
            self._guardian.wait()
            self._close()
            kind = {b"missing": FileNotFoundError, b"forbidden": PermissionError}.get(first[0] if first else b"")
            raise (kind or RuntimeError)(f"command {command[0]!r} did not start: {words}")
        self.pid = int(first[1])
        os.set_blocking(self._status.fileno(), False)

    @property
    def returncode(self) -> int | None:
        """The command's exit code, negative for a signal; None while it runs."""
        if self._returncode is None:
            # the order matters: what a guardian that has ended wrote can still be read
            gone = self._guardian.poll()
            self._said += self._read()
            for line in self._said.split(b"\n")[:-1]:
                self._returncode = int(line.removeprefix(b"exit "))
            if self._returncode is None and gone is not None:
                # a guardian that was killed takes the command along
                self._returncode = -signal.SIGKILL
        return self._returncode

    def alive(self) -> bool:
        return self.returncode is None

    def stop(self, timeout: float = GRACE) -> None:
        """End the command and all its descendants: SIGTERM, and SIGKILL after `timeout` seconds. Twice is once."""
        if self._control.closed:
            return
        # a broken pipe: the command has ended, and its guardian after it
        with contextlib.suppress(BrokenPipeError):
            self._control.write(f"stop {timeout}\n".encode())
            self._control.flush()
        try:
            self._guardian.wait(timeout + 30)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
            raise TimeoutError(f"process {self.pid} could not be ended within {timeout + 30:g} s") from None
        finally:
            _ = self.returncode
            self._close()

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that the command wrote."""
        with self.log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            return "\n".join(log.read().decode(errors="replace").splitlines()[-lines:])

    def _read(self) -> bytes:
        return b"" if self._status.closed else self._status.read() or b""

    def _close(self) -> None:
        for pipe in (self._control, self._status):
            # an unsent "stop" may be in the buffer
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def clean_environment(**extra: str) -> dict[str, str]:
    """The variables of this process without torchrun's, and `extra`. OMP_NUM_THREADS stays."""
    kept = {k: v for k, v in os.environ.items() if k not in TORCHRUN and not k.startswith(TORCHRUN_PREFIXES)}
    return kept | extra


def reserve_port(host: str) -> socket.socket:
    """A socket bound to a free port of `host`. While it is open nobody else is given the port, and a server that sets
    SO_REUSEADDR (vLLM, uvicorn, http.server) can still bind it. Raises OSError for a host that is not ours."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, kind, protocol)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)
    except OSError:
        reserved.close()
        raise
    return reserved


def free_port(host: str) -> int:
    """A port of `host` that was free a moment ago."""
    with reserve_port(host) as reserved:
        port: int = reserved.getsockname()[1]
        return port
