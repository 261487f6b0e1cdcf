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

LENGTHS = [(2, 3), (1, 1), (4, 2)] * 4


def test_one_rank_needs_no_process_group() -> None:
    group = DataParallelGroup()
    assert (group.rank, group.size) == (0, 1)
    assert group.shard([1, 2, 3]) == [1, 2, 3] and group.total(4) == 4
    rows = torch.arange(6).view(3, 2)
    assert torch.equal(group.all_gather(rows), rows[None])
    assert torch.equal(group.all_to_all([rows], [6])[0], rows)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    group = DataParallelGroup(dist.group.WORLD)
    assert group.shard(list(range(5))) == [[0, 2, 4], [1, 3]][rank]
    assert group.total(rank + 3) == 7
    assert group.sum(torch.tensor([1.5, rank])).tolist() == [3.0, 1.0]
    assert group.max(torch.tensor([rank, -rank])).tolist() == [1, 0]
    assert group.all_gather(torch.tensor([rank, 5])).tolist() == [[0, 5], [1, 5]]
    blocks = [torch.full((n,), 10 * rank + n, dtype=torch.uint8) for n in ((2, 0), (3, 1))[rank]]
    received = group.all_to_all(blocks, ((2, 3), (0, 1))[rank])
    assert [x.tolist() for x in received] == [[[2, 2], [13, 13, 13]], [[], [11]]][rank]
    value = torch.tensor([rank + 1.0])
    assert group.sum(value).tolist() == [3.0] and group.max(value).tolist() == [2.0]
    assert value.tolist() == [rank + 1.0], "the input is left as it was"

    buffer = RolloutReplayBuffer(ReplayConfig(), seed=1, arena_tokens=512, group=group)
    whole = batch(LENGTHS)
    buffer.push(whole.select(whole.group_ids % 2 == rank))
    # rank 0 has all the fresh tokens: what it stores and was drawn moves to rank 1
    draw = buffer.draw(5, 1, batch([(30, 30)], first_counter=100) if rank == 0 else None)
    torch.save((draw.uids, draw.batch.uid, draw.batch.tokens, draw.moved), f"{folder}/{rank}.pt")
    assert buffer.metrics(1)["replay/size"] == 12
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=2)
    (uids, first, _, moved), (same, second, tokens, _) = (
        torch.load(tmp_path / f"{r}.pt", weights_only=True) for r in range(2)
    )
    assert torch.equal(uids, same)
    alone = RolloutReplayBuffer(ReplayConfig(), seed=1, arena_tokens=512)
    alone.push(batch(LENGTHS))
    expected = alone.draw(5, 1)
    assert expected.uids.tolist() == uids.tolist()
    assert first.tolist() == [100] and torch.equal(second, expected.batch.uid), "in the order of the draw"
    assert torch.equal(tokens, expected.batch.tokens) and moved == int((expected.batch.group_ids % 2 == 0).sum()) > 0
