"""One draw over shards: the same winners as one rank that holds everything, whatever the shards look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_replay import global_draw as module
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.global_draw import Candidates, Winners, first_round, global_draw
from megatron_replay.ops.priority_draw import largest
from tests.shards import run_ranks


def shard(keys: Tensor, uids: Tensor, n: int, problem: str | None = None) -> Candidates:
    best = largest(keys, uids, n)
    return Candidates(keys[best], uids[best], uids[best] % 17 + 1, int(uids.sum()) % 5, problem)


def drawn(parts: list[tuple[Tensor, Tensor]], n: int) -> list[Winners]:
    def body(group: DataParallelGroup) -> Winners:
        return global_draw(shard(*parts[group.rank], n), n, group, with_replacement=False)

    return run_ranks(len(parts), body)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(0, 60), st.integers(1, 40), st.integers(0, 10**6), st.booleans())
def test_the_winners_are_those_of_one_rank(ranks: int, rows: int, n: int, seed: int, sorted_shards: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, 30, (rows,), generator=g).double() / 4  # with ties
    keys[torch.rand(rows, generator=g) < 0.1] = -torch.inf
    uids = torch.randperm(10 * rows + 1, generator=g)[:rows]
    owner = torch.randint(0, ranks, (rows,), generator=g)
    if sorted_shards:  # the last ranks hold the largest keys
        owner = keys.argsort().argsort() * ranks // max(1, rows)
    parts = [(keys[owner == r], uids[owner == r]) for r in range(ranks)]
    expected = uids[largest(keys, uids, n)].tolist()
    for winners in drawn(parts, n):
        assert winners.uids.tolist() == expected
        assert winners.owner.tolist() == [int(owner[uids == u]) for u in expected]
        assert winners.lengths.tolist() == [u % 17 + 1 for u in expected]
        for uid, rank, place in zip(expected, winners.owner.tolist(), winners.place.tolist(), strict=True):
            assert shard(*parts[rank], n).uids[place] == uid
        assert winners.loads.tolist() == [int(u.sum()) % 5 for _, u in parts]


def test_even_shards_need_one_round_and_a_lopsided_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    exchange = module._exchange

    def counted(own: Candidates, k: int, group: DataParallelGroup) -> Any:
        if group.rank == 0:
            sent.append(k)
        return exchange(own, k, group)

    monkeypatch.setattr(module, "_exchange", counted)
    n, rows = 256, 4096
    keys, uids = torch.rand(rows, dtype=torch.float64), torch.arange(rows)
    drawn([(keys[r::4], uids[r::4]) for r in range(4)], n)
    assert sent == [first_round(n, 4)] == [104]
    sent.clear()
    order = keys.argsort(descending=True)
    drawn([(keys[part], uids[part]) for part in order.chunk(4)], n)
    assert sent == [104, 208, 256], "rank 0 holds them all: it must send all"


def test_the_first_round_is_the_fair_share_and_four_standard_deviations() -> None:
    assert first_round(8192, 1024) == 8 + 12 + 8
    assert first_round(10, 2) == 10 and first_round(0, 8) == 0
    assert first_round(65536, 1024) == 64 + 32 + 8


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_problem_of_one_rank_ends_the_draw_on_all(ranks: int) -> None:
    words = {}

    def body(group: DataParallelGroup) -> None:
        last = group.rank == group.size - 1
        own = shard(torch.rand(4).double(), torch.arange(4) + 10 * group.rank, 3, "evict first" if last else None)
        with pytest.raises(RuntimeError) as error:
            global_draw(own, 3, group, with_replacement=False)
        words[group.rank] = str(error.value)

    run_ranks(ranks, body)
    assert words.pop(ranks - 1) == "evict first"
    assert set(words.values()) <= {f"data-parallel rank {ranks - 1} cannot draw; its own error says why"}
    assert len(words) == ranks - 1


def test_each_repeat_goes_to_the_largest_key_and_then_to_the_smaller_uid() -> None:
    keys = [[3.0, 1.0, 2.0], [], [2.0, 1.0, 5.0]]
    uids = [[5, 9, 5], [], [4, 8, 6]]

    def body(group: DataParallelGroup) -> Winners:
        k, u = torch.tensor(keys[group.rank], dtype=torch.float64), torch.tensor(uids[group.rank], dtype=torch.int64)
        return global_draw(Candidates(k, u, u * 2, 0), 3, group, with_replacement=True)

    for winners in run_ranks(3, body):
        assert winners.uids.tolist() == [5, 8, 6] and winners.owner.tolist() == [0, 2, 2]
        assert winners.place.tolist() == [0, 1, 2] and winners.lengths.tolist() == [10, 16, 12]


def test_nothing_to_draw_on_any_rank() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for with_replacement in (False, True):

        def body(group: DataParallelGroup, flag: bool = with_replacement) -> Winners:
            return global_draw(Candidates(none.double(), none, none, 3), 4, group, with_replacement=flag)

        for winners in run_ranks(2, body):
            assert winners.uids.numel() == winners.owner.numel() == 0 and winners.loads.tolist() == [3, 3]
