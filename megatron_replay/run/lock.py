"""RunLock: one run at a time in a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from pathlib import Path
from typing import TextIO

LOCK_FILE = ".lock"


class RunLock:
    """Held from `take` until `release` or the end of this process, in whatever way: there is no stale lock."""

    def __init__(self) -> None:
        self._files: dict[Path, TextIO] = {}

    def take(self, folder: str | Path, flag: str) -> None:
        """Raises RuntimeError, naming the flag and who holds it, where another run is in the folder. Twice is once."""
        path = Path(folder).resolve() / LOCK_FILE
        if path in self._files:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        while True:
            file = open(path, "a+")  # noqa: SIM115 - held on purpose
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "which says nothing of itself"
                file.close()
                raise RuntimeError(f"{flag} {folder} is in use by another run, {holder}") from None
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
            # its owner has removed it between our two calls
            file.close()
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._files[path] = file

    def release(self) -> None:
        """Leave all folders; no file of ours stays."""
        for path, file in self._files.items():
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    path.unlink()
            file.close()
        self._files.clear()
