"""The guardian of a child process: runs a command, ends it and all that it started when its own parent ends, and frees
the shared memory that they leave.

It is run as a script and imports nothing of this project, so it starts in no time. `ChildProcess` is the other end.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
GRACE = 2.0  # seconds from SIGTERM to SIGKILL, where nobody says another
POLL = 0.1  # seconds between two looks of the guardian
LOOK = 1.0  # seconds between two looks at who uses the shared memory
# numbers of <linux/prctl.h>
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

Segment = tuple[str, int]  # path under /dev/shm, inode


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
        found: list[psutil.Process] = self.me.children(recursive=True)
        return found

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
