"""What needs the engine in the process that measures: a push within one process, and vLLM's own way to other weights.

`python -m benchmarks.weight_sync.alone SETTINGS FILE` writes {"expected", "rows"} to FILE. Its engine has read the
model's folder itself, so what it samples at first is what every push must lead to.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from megatron_replay.engines.child_process import ChildProcess
from megatron_replay.engines.vllm_child import LlmEngine
from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sender import WeightSender
from megatron_replay.weight_sync.sharded_weights import ShardedWeights

from ..json_file import write_json
from .engine import STARTUP_TIMEOUT, complaint, greedy_tokens, options
from .floor import seconds_of
from .model import LAYOUTS, WEIGHTS, load_shards, padded_vocab, total_bytes
from .phases import StackClock
from .row import Row
from .settings import Settings, python_environment

MIB = 1 << 20
POLL = 0.2  # seconds
LOG_LINES = 20
Seconds = Callable[[], float]
# of the process, as `VllmChild` sets them for its own
VLLM = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


class Alone:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.engine = LlmEngine(options(settings, "TP1", "auto"))
        self.shape = ModelShape.from_folder(settings.folder)
        self.nbytes = total_bytes(self.shape)
        self.expected = greedy_tokens(self.engine.generate)
        self.flat, self.copied = torch.zeros(2, self.nbytes, dtype=torch.uint8)

    def rows(self) -> list[Row]:
        fill = {"in-process": self._in_process, "vllm-reload": self._reload}
        return [fill[transport]() for transport in self.settings.alone]

    def _in_process(self) -> Row:
        row = Row("in-process", "TP1", "TP1", self.nbytes, "one copy")
        layout = LAYOUTS["TP1"]
        shards = load_shards(self.settings.folder, self.shape, layout, 0, self.flat)
        sender = WeightSender(
            ShardedWeights(self.shape, padded_vocab(self.shape), shards),
            transport="in-process",
            bucket_bytes=self.settings.bucket_mib * MIB,
            device=torch.device("cpu"),
            timeout=self.settings.timeout,
        )
        row.messages = len(sender.plan.buckets)
        sender.connect([self.engine])
        version = iter(range(1, 1000))
        self._time(row, lambda: sender.push(next(version)).seconds, lambda: self.copied.copy_(self.flat))
        if row.error is None:
            with StackClock() as clock:
                sender.push(next(version))
            row.phases = {end: clock.phases(end) for end in ("sender", "engine")}
        sender.close()
        return row

    def _reload(self) -> Row:
        note = "reload_weights of a file in the page cache, then reset_prefix_cache; writing the file is not in it"
        file = self.settings.folder / WEIGHTS
        row = Row("vllm-reload", "-", "TP1", self.nbytes, "one read of the file in the page cache", foreign=True)
        row.note = note

        def reload() -> None:
            path = {"weights_path": str(self.settings.folder)}
            self.engine._llm.collective_rpc("reload_weights", kwargs=path)
            self.engine.reset_prefix_cache()

        def read() -> None:
            with file.open("rb", buffering=0) as source:
                target = memoryview(self.copied.numpy())
                while (got := source.readinto(target)) and len(target) > got:
                    target = target[got:]

        self._time(row, lambda: seconds_of(reload), read)
        return row

    def _time(self, row: Row, push: Seconds, floor: Callable[[], Any]) -> None:
        """By turns; the first of both is not counted."""
        pushes: list[float] = []
        floors: list[float] = []
        try:
            for _ in range(1 + self.settings.repeats):
                pushes.append(push())
                floors.append(seconds_of(floor))
            if (wrong := complaint(greedy_tokens(self.engine.generate), self.expected)) is not None:
                raise WeightSyncError(wrong)
        except WeightSyncError as error:
            row.failed(f"{type(error).__name__}: {error}")
        else:
            row.timed(pushes[0], pushes[1:], floors[1:])


def measure_alone(settings: Settings) -> tuple[list[int], list[Row]]:
    """(what an engine with the model's weights samples, rows), measured in a child. Raises RuntimeError where it ends
    without them."""
    out, log = settings.folder / "alone.json", settings.folder / "alone.log"
    command = [sys.executable, "-m", "benchmarks.weight_sync.alone", settings.to_json(), str(out)]
    process = ChildProcess(command, python_environment(**VLLM), log)
    try:
        deadline = time.monotonic() + STARTUP_TIMEOUT + settings.timeout
        while process.alive() and not out.exists() and time.monotonic() < deadline:
            time.sleep(POLL)
    finally:
        process.stop()
    if not out.exists():
        raise RuntimeError(f"the process of {', '.join(settings.alone)} gave no rows:\n{process.log_tail(LOG_LINES)}")
    found = json.loads(out.read_text())
    return found["expected"], [Row(**row) for row in found["rows"]]


def main() -> None:
    settings = Settings.from_json(sys.argv[1])
    torch.set_num_threads(settings.threads)
    alone = Alone(settings)
    rows = alone.rows()
    write_json(Path(sys.argv[2]), {"expected": alone.expected, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
