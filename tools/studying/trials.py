"""Many trials, side by side, each in a process forked from one that has imported everything; what is there is kept."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.environment import commit
from tqdm import tqdm

from studying.fork import fork
from studying.trial import ENTRY, EVALUATE, LOG, Trial, perform, read_record

# what a run imports after its start
LATER = (
    "megatron.core.dist_checkpointing.strategies.torch",
    "matplotlib.pyplot",
    "sentencepiece",
    "torch.utils.tensorboard",
    "transformers",
)


def perform_all(trials: Sequence[Trial], folder: Path, workers: int) -> list[dict[str, Any]]:
    """Their records, in order. Raises RuntimeError for a trial that failed; those that run are finished before."""
    missing = [t for t in dict.fromkeys(trials) if read_record(t, folder) is None]
    if missing:
        _import()
        _run(missing, folder, workers)
    return [record for t in trials if (record := read_record(t, folder)) is not None]


def _import() -> None:
    """What the trials need, once for all: they are forked from here."""
    commit()
    for script in (ENTRY, EVALUATE):
        sys.argv = [str(script)]
        runpy.run_path(str(script), run_name="studied")
    for name in LATER:
        __import__(name)


def _run(trials: Sequence[Trial], folder: Path, workers: int) -> None:
    waiting, running, failed = list(reversed(trials)), dict[int, Trial](), list[Trial]()
    bar = tqdm(total=len(trials), desc="trials", unit="trial", mininterval=5, dynamic_ncols=True)
    try:
        while running or (waiting and not failed):
            while waiting and not failed and len(running) < workers:
                trial = waiting.pop()
                running[_start(trial, folder)] = trial
            process, status = os.wait()
            trial = running.pop(process)
            failed += [trial] if status else []
            bar.update()
    finally:
        bar.close()
        for process in running:
            os.killpg(process, signal.SIGKILL)
    if failed:
        names = ", ".join(f"{t.name} (see {folder / t.name / LOG})" for t in failed)
        raise RuntimeError(f"trials failed: {names}")


def _start(trial: Trial, folder: Path) -> int:
    def body() -> None:
        os.setsid()
        perform(trial, folder)

    return fork(body)
