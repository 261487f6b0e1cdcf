"""The look at an engine's phases from inside its workers, and how a trainer asks for it.

vLLM imports this module in each worker (`worker_extension_cls`). A folder connects the two: the trainer makes the file
`look`, each worker answers with a file, and writes its phases when `look` has gone.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_replay.engines.transfer_status import TransferStatus

from .phases import StackClock

FOLDER_VARIABLE = "WEIGHT_SYNC_PHASES"
POLL = 0.1  # seconds
TIMEOUT = 30.0  # seconds


class EnginePhases(TransferStatus):
    """Adds no method to a worker: that its module is imported is enough."""


def watch(folder: Path) -> None:
    """In a worker, as long as it lives."""
    while True:
        time.sleep(POLL)
        if not (folder / "look").exists():
            continue
        with StackClock() as clock:
            (folder / f"ready-{os.getpid()}").touch()
            while (folder / "look").exists():
                time.sleep(POLL)
        beside = folder / f"new-{os.getpid()}"
        beside.write_text(json.dumps(clock.phases("engine")))
        beside.rename(folder / f"phases-{os.getpid()}")


def looked_at(folder: Path, workers: int, push: Callable[[], Any]) -> dict[str, dict[str, float]]:
    """Phases of both ends of one push; those of the engine are of the worker that loaded longest.

    Raises TimeoutError where a worker does not answer.
    """
    for old in folder.iterdir():
        old.unlink()
    (folder / "look").touch()
    _wait_for(folder, "ready-*", workers)
    try:
        with StackClock() as clock:
            push()
    finally:
        (folder / "look").unlink()
    found = [json.loads(path.read_text()) for path in _wait_for(folder, "phases-*", workers)]
    return {"sender": clock.phases("sender"), "engine": max(found, key=lambda phases: phases.get("load", 0.0))}


def _wait_for(folder: Path, pattern: str, count: int) -> list[Path]:
    deadline = time.monotonic() + TIMEOUT
    while len(found := list(folder.glob(pattern))) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} workers of an engine should show their phases, {len(found)} did ({pattern})")
        time.sleep(POLL / 10)
    return found


if FOLDER_VARIABLE in os.environ:
    threading.Thread(target=watch, args=(Path(os.environ[FOLDER_VARIABLE]),), daemon=True).start()
