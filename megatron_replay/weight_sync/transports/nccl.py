"""NCCL for a group whose peers may be late or die, and its version, which must be the same on both ends.

What torch does to a process whose group fails was read in its ProcessGroupNCCL.cpp; none of it has run here.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_replay.environment_variable import environment_variable
from megatron_replay.weight_sync.error import PlanRefusedError

ERROR_HANDLING, DUMP = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT"
# of the watchdog, beside the limit of a message: torch waits as long for the end of an aborted group
MARGIN = timedelta(hours=1)


def survive_failed_groups() -> None:
    """Before the first NCCL group of a process: a failure of another group leaves the process alone.

    A group's watchdog that sees an error raises a flag of the whole process, on which the monitor of the first group
    ends it. Each group's own watchdog still does. A value that the user has set stays.
    """
    os.environ.setdefault(DUMP, "0")


def nccl_group(store: dist.Store, rank: int, world: int, limit: timedelta) -> Any:
    """A group whose failures are seen by who waits for its messages, up to `limit`, and by nobody else.

    The watchdog of a group ends the process on a message that is late or broken. This one is given more time than the
    waiting takes, and the mode without error handling.
    """
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = 2 * limit + MARGIN
    # a group reads it when it is made
    with environment_variable(ERROR_HANDLING, "0"):
        return dist.ProcessGroupNCCL(store, rank, world, options)


def nccl_version() -> list[int]:
    """Of the library that this process has loaded: major, minor, patch."""
    return list(torch.cuda.nccl.version()[:3])


def check_same_nccl(theirs: list[int]) -> None:
    """Raise PlanRefusedError where the sender's NCCL is another than this process's: NCCL refuses to meet it."""
    if (ours := nccl_version()) != theirs:
        trainer, engine = (".".join(map(str, version)) for version in (theirs, ours))
        raise PlanRefusedError(
            f"transport nccl needs one version of NCCL: the trainer has {trainer}, the engine {engine}; "
            "--rl-vllm-transport gloo does without"
        )
