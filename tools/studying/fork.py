"""A function in a fork of this process, which has imported what it needs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable

from megatron_replay.run.launcher import end_with_parent


def fork(body: Callable[[], object]) -> int:
    """Start body() and return its process, which ends with this one, in whatever way this one ends.

    The exit code is a program's: 0, 1 after an exception, SystemExit's.
    """
    parent = os.getpid()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        end_with_parent(parent)
        body()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def forked(body: Callable[[], object]) -> float:
    """`fork` to its end; the seconds of processor time. Raises RuntimeError for another exit code than 0."""
    _, status, used = os.wait4(fork(body), 0)
    if status != 0:
        raise RuntimeError(f"a process ended with exit code {os.waitstatus_to_exitcode(status)}")
    return used.ru_utime + used.ru_stime
