"""What VllmEngine tries again, how often, and what it gives up: no vLLM runs here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.engines.vllm_engine import VllmEngine
from megatron_replay.engines.vllm_options import ServedModel
from megatron_replay.weight_sync.engine_control import EngineControl
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from tests.transfers import CPU, KeepingEngine, shape, shards

SERVED = ServedModel(Path("model"), "float32", 64, seed=0, device="cpu")


class OneRank:
    """A policy of one rank."""

    def sharded_weights(self, of: Any) -> ShardedWeights:
        return shards(of, 1, 1)[0]


class Colocated(VllmEngine):
    """An engine of its own for each replica; `make_room` is a collective, as on GPUs. It fails to start `failures`
    times."""

    AUTO = {"cpu": "in-process"}  # noqa: RUF012

    def __init__(self, ranks: EngineRanks, failures: int) -> None:
        super().__init__(VllmConfig(retries=2), SamplingConfig(), 1, SERVED, shape(), ranks)
        self.engine, self.failures = KeepingEngine(shape()), failures

    def feeds(self) -> bool:
        return True

    def make_room(self) -> None:
        self.ranks.any(False)

    def revive(self, suspect: bool) -> bool:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no memory yet")
        return True

    def controls(self) -> list[EngineControl]:
        return [self.engine]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    own = [dist.new_group([r]) for r in range(2)][rank]
    ranks = EngineRanks.build(DataParallelGroup(dist.group.WORLD, device=CPU), own, CPU)
    made = Colocated(ranks, failures=rank)
    made.load_weights(OneRank(), 5)
    # what the loop asks next: every rank's collectives still pair
    found = made.metrics()
    assert found["engine/failed_syncs"] == 1 and made.weight_version == made.engine.version == 5
    made.close()
    Path(folder, f"done{rank}").touch()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_push_that_fails_at_one_replica_keeps_the_ranks_in_step(tmp_path: Path) -> None:
    running = mp.spawn(_rank, (str(tmp_path),), nprocs=2, join=False)
    deadline = time.monotonic() + 150
    try:
        while not running.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in running.processes:
            process.kill()
    assert sorted(p.name for p in tmp_path.glob("done*")) == ["done0", "done1"]
