"""A program whose life is bound to ours: when this process ends, in whatever way, the program and all that it started
end too, and the shared memory that they leave is freed.

Run as a script this file is the guardian between the two. It imports nothing of this project, so it starts in no time.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
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
POLL = 0.1  # seconds between two looks of the guardian
LOOK = 1.0  # seconds between two looks at who uses the shared memory
LOG_TAIL_BYTES = 1 << 16
# numbers of <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

Segment = tuple[str, int]  # path under /dev/shm, inode


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
        guardian = [sys.executable, "-P", __file__, str(os.getpid()), json.dumps(list(command))]
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
        return reserved.getsockname()[1]


class Guardian:
    """Runs in the guardian process: starts the command, waits for its end or ours, and cleans up."""

    def __init__(self, parent: int, command: list[str]) -> None:
        self.parent = parent
        self.terminated = False
        self.exit_code: int | None = None
        self.me = psutil.Process()
        self.libc = ctypes.CDLL(None, use_errno=True)
        # orphans of the command become our children, so none is lost from sight
        self._prctl(PR_SET_CHILD_SUBREAPER, 1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._terminate)
        # what was there before the command is not its own, even where it uses it
        self.foreign = segments()
        self.ours: set[Segment] = set()
        self.unclaimed: set[Segment] = set()
        self.looked = 0.0
        self.command = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            stderr=sys.stderr,
            start_new_session=True,
            # a guardian that is killed leaves no command behind
            preexec_fn=lambda: self._prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )

    def run(self) -> None:
        """Until the command has ended or is to end; then nothing of it is left."""
        tell(f"pid {self.command.pid}")
        grace = None
        while grace is None and self.exit_code is None:
            self._claim()
            grace = self._asked_to_end()
            self._reap()
        self._end(GRACE if grace is None else grace)
        self._free()

    def _asked_to_end(self) -> float | None:
        """The grace in seconds, or None."""
        # the end of the pipe does not suffice: a process that our parent forked may hold it
        if self.terminated or os.getppid() != self.parent:
            return GRACE
        if not select.select([sys.stdin], [], [], POLL)[0]:
            return None
        line = sys.stdin.readline()
        return float(line.removeprefix("stop ")) if line else GRACE

    def _end(self, grace: float) -> None:
        """SIGTERM to each process, SIGKILL to those that are left after the grace, until there is none."""
        warned: set[psutil.Process] = set()
        deadline = time.monotonic() + grace
        while processes := self._descendants():
            self._claim(now=True)
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    if time.monotonic() >= deadline:
                        process.kill()
                    elif process not in warned:
                        warned.add(process)
                        process.terminate()
            time.sleep(POLL / 2)

    def _descendants(self) -> list[psutil.Process]:
        self._reap()
        return self.me.children(recursive=True)

    def _reap(self) -> None:
        """Collect exit codes, also those of orphans."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] == self.command.pid:
                    self.exit_code = self.command.returncode = os.waitstatus_to_exitcode(ended[1])
                    tell(f"exit {self.exit_code}")

    def _claim(self, now: bool = False) -> None:
        """Note which segments the command's processes use: once they are dead it could not be known."""
        unclaimed = segments() - self.foreign - self.ours
        if not unclaimed or not (now or unclaimed != self.unclaimed or time.monotonic() - self.looked >= LOOK):
            return
        self.looked = time.monotonic()
        for process in self.me.children(recursive=True):
            self.ours |= segments_of(process.pid) & unclaimed
        self.unclaimed = unclaimed - self.ours

    def _free(self) -> None:
        """Unlink the segments that are left and that nobody alive uses."""
        left = self.ours & segments()
        if left:
            left -= set().union(*map(segments_of, psutil.pids()))
        for path, _ in sorted(left):
            print(f"{__file__}: freed {path}, which pid {self.command.pid} had left", file=sys.stderr)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def _terminate(self, number: int, frame: object) -> None:
        self.terminated = True

    def _prctl(self, option: int, value: int) -> None:
        if self.libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def segments() -> set[Segment]:
    """The files directly in /dev/shm. Those in folders are a user's, not shared memory of a program."""
    found: set[Segment] = set()
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                found.add((str(path), status.st_ino))
    return found


def segments_of(pid: int) -> set[Segment]:
    """What a process has mapped or open of /dev/shm; nothing for one that has ended or that we may not look at."""
    found: set[Segment] = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            if str(SHARED_MEMORY) in line:
                *_, inode, path = line.split(maxsplit=5)
                found.add((path, int(inode)))
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                path = os.readlink(fd)
                if path.startswith(f"{SHARED_MEMORY}/"):
                    found.add((path, fd.stat().st_ino))
    return found


def tell(line: str) -> None:
    """To the process that started us, if it lives."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


def main() -> int:
    parent, command = int(sys.argv[1]), json.loads(sys.argv[2])
    try:
        guardian = Guardian(parent, command)
    except FileNotFoundError as error:
        tell(f"missing {error}")
    except PermissionError as error:
        tell(f"forbidden {error}")
    except OSError as error:
        tell(f"failed {error}")
    else:
        guardian.run()
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
