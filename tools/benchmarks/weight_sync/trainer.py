"""The trainer's processes: all layouts push into one engine after another, and pass the plain bytes in between.

Every rank runs `measure` with the same settings; rank 0 drives the engines and knows the rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_replay.engines.child_process import ChildProcess
from megatron_replay.engines.vllm_child import VllmChild
from megatron_replay.engines.vllm_client import EngineError
from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sender import WeightSender
from megatron_replay.weight_sync.sharded_weights import ShardedWeights

from .engine import complaint, greedy_tokens, start_engine
from .engine_phases import looked_at
from .floor import PIECE_BYTES, BroadcastFloor, Floor, SharedMemoryFloor
from .model import LAYOUTS, TrainerLayout, load_shards, padded_vocab, shard_bytes, total_bytes
from .row import Row
from .settings import ENGINES, Settings, python_environment

MIB = 1 << 20
TIMEOUT = timedelta(minutes=10)
GRACE = 1.0  # seconds
LOG_LINES = 20
Add = Callable[[Row], None]


class Trainer:
    """One rank of the trainer, in every layout that has as many, and in the floors."""

    def __init__(self, settings: Settings, rank: int, store: dist.TCPStore) -> None:
        self.settings, self.rank = settings, rank
        dist.init_process_group("gloo", store=store, rank=rank, world_size=settings.ranks, timeout=TIMEOUT)
        self.shape = ModelShape.from_folder(settings.folder)
        self.nbytes = total_bytes(self.shape)
        # every rank makes every group, in one order
        self.replicas = {n: dist.new_group(list(range(LAYOUTS[n].ranks)), TIMEOUT) for n in settings.trainers}
        self.floors = {n: dist.new_group(list(range(1 + ENGINES[n])), TIMEOUT) for n in settings.engines}
        self.piece = torch.zeros(min(PIECE_BYTES, self.nbytes), dtype=torch.uint8)
        self.expected: list[int] | None = None
        self.version = 0

    def measure(self, add: Add) -> None:
        """All rows; `add` is called at rank 0."""
        for engine_layout in self.settings.engines:
            phases = self.settings.folder / f"phases-{engine_layout}"
            engine = None
            if self.rank == 0:
                phases.mkdir()
                engine = start_engine(self.settings, engine_layout, phases)
            try:
                for name in self.settings.trainers:
                    weights = self.weights(LAYOUTS[name])
                    for transport in self.settings.between_processes:
                        # what sends each tensor by itself is of interest once
                        if transport != "gloo-per-tensor" or LAYOUTS[name].ranks == 1:
                            row = self.row(transport, name, engine_layout)
                            self._fill(row, weights, engine, phases)
                            if self.rank == 0:
                                add(row)
                    # before the next layout's are made
                    del weights
            finally:
                if engine is not None:
                    engine.close()

    def weights(self, layout: TrainerLayout) -> ShardedWeights | None:
        """None: this rank has no part in the layout."""
        if self.rank >= layout.ranks:
            return None
        memory = torch.empty(shard_bytes(self.shape, layout, self.rank), dtype=torch.uint8)
        return ShardedWeights(
            self.shape,
            padded_vocab(self.shape),
            load_shards(self.settings.folder, self.shape, layout, self.rank, memory),
            tensor_rank=self.rank % layout.tensor_size,
            tensor_size=layout.tensor_size,
            replica=self.replicas[layout.name] if layout.ranks > 1 else None,
        )

    def row(self, transport: str, trainer_layout: str, engine_layout: str) -> Row:
        kind = SharedMemoryFloor if transport == "shared-memory" else BroadcastFloor
        row = Row(transport, trainer_layout, engine_layout, self.nbytes, kind.name)
        if transport == "gloo-per-tensor":
            row.foreign, row.note = True, "this project's sender with one message for each Megatron parameter"
        return row

    def _fill(self, row: Row, weights: ShardedWeights | None, engine: VllmChild | None, phases: Path) -> None:
        floor, sender = self._floor(row), None
        seconds: list[float] = []
        floor_seconds: list[float] = []
        if weights is not None:
            sender = WeightSender(
                weights,
                transport=row.transport.removesuffix("-per-tensor"),
                bucket_bytes=1 if row.transport == "gloo-per-tensor" else self.settings.bucket_mib * MIB,
                device=torch.device("cpu"),
                timeout=self.settings.timeout,
            )
            row.messages = len(sender.plan.buckets)
        engines = [] if engine is None else [engine]
        if self._together(lambda: sender and sender.connect(engines), row):
            for _ in range(1 + self.settings.repeats):
                if not self._together(lambda: self._push(sender, seconds), row):
                    break
                if floor is not None:
                    floor_seconds.append(floor.turn())
            else:
                if self._together(lambda: self._check(engine), row) and self.rank == 0:
                    # the first of both meets memory that is new
                    row.timed(seconds[0], seconds[1:], floor_seconds[1:])
                if row.error is None and LAYOUTS[row.trainer_layout].ranks == 1:
                    self._together(lambda: self._look(row, sender, engine, phases), row)
        for end in (floor, sender):
            if end is not None:
                end.close()

    def _push(self, sender: WeightSender | None, seconds: list[float]) -> None:
        if sender is None:
            return
        # all ranks count alike, so that they send one version
        self.version += 1
        report = sender.push(self.version)
        if report.nbytes != self.nbytes:
            raise WeightSyncError(f"a push of {report.nbytes} bytes, the model has {self.nbytes}")
        seconds.append(report.seconds)

    def _check(self, engine: VllmChild | None) -> None:
        """Raises WeightSyncError unless the engine samples as expected, or as after the first of all pushes."""
        if engine is not None:
            found = greedy_tokens(engine.generate)
            self.expected = self.expected or found
            if (wrong := complaint(found, self.expected)) is not None:
                raise WeightSyncError(wrong)

    def _look(self, row: Row, sender: WeightSender | None, engine: VllmChild | None, phases: Path) -> None:
        if engine is not None:
            row.phases = looked_at(phases, engine.world_size(), lambda: self._push(sender, []))

    def _together(self, work: Callable[[], Any], row: Row) -> bool:
        """What fails on the rank that drives the engines fails on all, also on those that have no part in it."""
        error = None
        try:
            work()
        except (WeightSyncError, EngineError, TimeoutError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        shared = [(error, self.version)]
        dist.broadcast_object_list(shared, 0)
        error, self.version = shared[0]
        if error is not None:
            row.failed(error)
        return error is None

    def _floor(self, row: Row) -> Floor | None:
        """None: this rank takes no part."""
        group = self.floors[row.engine_layout]
        if self.rank > ENGINES[row.engine_layout]:
            return None
        kind = SharedMemoryFloor if row.transport == "shared-memory" else BroadcastFloor
        return kind(self.piece, self.nbytes, group)


def measure_trainer(settings: Settings, expected: list[int] | None, add: Add) -> None:
    """Rank 0 in this process, the others in children. `expected`: what an engine with these weights samples."""
    store = dist.TCPStore("127.0.0.1", 0, settings.ranks, True, TIMEOUT, wait_for_workers=False)
    module = [sys.executable, "-m", "benchmarks.weight_sync.trainer", settings.to_json(), str(store.port)]
    others: list[ChildProcess] = []
    try:
        for rank in range(1, settings.ranks):
            log = settings.folder / f"rank-{rank}.log"
            others.append(ChildProcess([*module, str(rank)], python_environment(), log))
        trainer = Trainer(settings, 0, store)
        trainer.expected = expected
        trainer.measure(add)
    except RuntimeError as error:
        # what the other ranks say tells more than a connection that ended
        said = [f"rank {i}:\n{p.log_tail(LOG_LINES)}" for i, p in enumerate(others, 1) if not _lives(p)]
        raise RuntimeError("\n".join([str(error), *said])) from error
    finally:
        for process in others:
            process.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _lives(process: ChildProcess) -> bool:
    """Whether it goes on, a moment after a failure that may be its own."""
    deadline = time.monotonic() + GRACE
    while process.alive() and time.monotonic() < deadline:
        time.sleep(GRACE / 10)
    return process.alive()


def main() -> None:
    settings, port, rank = Settings.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(settings.threads)
    store = dist.TCPStore("127.0.0.1", port, settings.ranks, False, TIMEOUT, wait_for_workers=False)
    Trainer(settings, rank, store).measure(lambda row: None)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
