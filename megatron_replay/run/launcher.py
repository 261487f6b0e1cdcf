"""What a rank owes its launcher: it does not outlive it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>


def end_with_launcher() -> None:
    """Under torchrun: the kernel kills this process when the launcher ends, in whatever way.

    A launcher that is killed would leave its ranks training, and holding the run folder, for as long as they can.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(os.getppid())


def end_with_parent(parent: int) -> None:
    """On Linux: the kernel kills this process, a child of `parent`, when that ends, in whatever way."""
    if sys.platform != "linux":
        return
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        # it ended while we asked
        os.kill(os.getpid(), signal.SIGKILL)
