"""Worlds of gloo ranks forked from a process that has imported everything, which takes longer than what they do."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

MINUTES = 2  # that a rank waits for another


def run_world(world: int, store: Path, body: Callable[..., None], *args: Any) -> None:
    """body(*args) on every rank of a new world; the first rank that fails ends the others and this process.

    `store` is a file that does not exist yet.
    """
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, world, store, body, args), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    alive = {process.sentinel: process for process in ranks}
    while alive:
        for sentinel in wait(list(alive)):
            process = alive.pop(sentinel)
            process.join()
            if process.exitcode:
                sys.exit(f"rank {ranks.index(process)} of {world} ended with {process.exitcode}")


def _rank(rank: int, world: int, store: Path, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(minutes=MINUTES)
    )
    body(*args)
    dist.destroy_process_group()
