"""DataParallelGroup over two real gloo processes, and alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_replay.config import ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.replay_buffer import RolloutReplayBuffer
from tests.rollouts import batch


def test_one_rank_needs_no_process_group() -> None:
    group = DataParallelGroup()
    assert (group.rank, group.size) == (0, 1)
    assert group.shard([1, 2, 3]) == [1, 2, 3] and group.total(4) == 4
    rows = torch.arange(6).view(3, 2)
    assert torch.equal(group.gather(rows)[0], rows)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = DataParallelGroup(dist.group.WORLD)
    assert group.shard(list(range(5))) == [[0, 2, 4], [1, 3]][rank]
    assert group.total(rank + 3) == 7
    assert group.sum(torch.tensor([1.5, rank])).tolist() == [3.0, 1.0]
    assert group.max(torch.tensor([rank, -rank])).tolist() == [1, 0]
    mine = torch.full((rank * 2, 3), float(rank))  # ragged: nothing on rank 0
    assert [g.shape for g in group.gather(mine)] == [(0, 3), (2, 3)]
    value = torch.tensor([rank + 1.0])
    assert group.sum(value).tolist() == [3.0] and value.tolist() == [rank + 1.0], "the input is left as it was"

    buffer = RolloutReplayBuffer(ReplayConfig(), seed=1, arena_tokens=512, group=group)
    whole = batch([(2, 3)] * 12)
    buffer.push(whole.select(whole.group_ids % 2 == rank))
    draw = buffer.draw(5, 1)
    torch.save((draw.uids, draw.batch.uid), f"{folder}/{rank}.pt")
    assert buffer.total() == 12
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    (uids, first), (same, second) = (torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in range(2))
    assert torch.equal(uids, same)
    alone = RolloutReplayBuffer(ReplayConfig(), seed=1, arena_tokens=512)
    alone.push(batch([(2, 3)] * 12))
    assert alone.draw(5, 1).uids.tolist() == uids.tolist()
    assert sorted(first.tolist() + second.tolist()) == sorted(uids.tolist())
