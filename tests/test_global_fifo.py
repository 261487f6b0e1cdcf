"""The oldest over shards: those that a sort of all rollouts puts first, whatever the shards look like."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.global_fifo import oldest_of_all
from tests.shards import run_ranks


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 40), st.data())
def test_every_rank_drops_its_part_of_the_oldest(ranks: int, rows: int, data: st.DataObject) -> None:
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 10**6)))
    birth = torch.randint(0, data.draw(st.sampled_from([1, 4, 1000])), (rows,), generator=g) - 2
    uid = (torch.randperm(2 * rows, generator=g)[:rows] - rows) * data.draw(st.sampled_from([1, 2**50]))
    owner = torch.randint(0, ranks, (rows,), generator=g)
    count = data.draw(st.integers(1, rows))
    oldest = sorted(range(rows), key=lambda i: (int(birth[i]), int(uid[i])))[:count]

    def body(group: DataParallelGroup) -> int:
        mine = owner == group.rank
        return oldest_of_all(birth[mine], uid[mine], count, group)

    assert run_ranks(ranks, body) == [sum(int(owner[i]) == rank for i in oldest) for rank in range(ranks)]
