from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_replay.load_balance import assign


def balanced(lengths: list[int], owner: list[int], load: list[int]) -> list[int]:
    as_tensor = [torch.tensor(x, dtype=torch.int64) for x in (lengths, owner, load)]
    return assign(*as_tensor).tolist()


def totals(lengths: list[int], rank: list[int], load: list[int]) -> list[int]:
    out = load.copy()
    for n, r in zip(lengths, rank, strict=True):
        out[r] += n
    return out


def test_winners_stay_where_the_loads_allow_it() -> None:
    assert balanced([5, 5, 5, 5], [0, 1, 0, 1], [10, 10]) == [0, 1, 0, 1]
    assert balanced([], [], [3, 8]) == []


def test_the_short_ones_of_an_overloaded_rank_go_to_the_least_loaded() -> None:
    # 4 ranks, 40 tokens: 10 each; rank 0 keeps its longest
    assert balanced([10, 9, 8, 3], [0, 0, 0, 0], [0, 0, 2, 8]) == [0, 1, 2, 3]


def test_the_fresh_batch_counts() -> None:
    assert balanced([6, 6], [0, 1], [20, 0]) == [1, 1]


def test_no_more_moves_than_the_load_that_cannot_be_lowered_asks_for() -> None:
    assert balanced([4, 4, 4, 4], [0, 0, 0, 0], [0, 1, 12]) == [0, 0, 0, 1], "up to 12, not to the mean of 10"


def test_the_share_is_rounded_up() -> None:
    # 7 tokens on 3 ranks: a share of 2 would send a second one away for nothing
    assert balanced([1] * 7, [2, 2, 2, 2, 0, 1, 1], [0, 0, 0]) == [2, 2, 2, 0, 0, 1, 1]


def test_nothing_moves_where_that_lowers_no_largest_load() -> None:
    assert balanced([9], [0], [0, 0]) == [0], "one rollout cannot be shared"
    assert balanced([1, 1], [0, 0], [0, 50]) == [0, 0]


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 6))
def test_no_load_is_above_the_share_by_more_than_a_rollout(data: st.DataObject, ranks: int) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(1, 50), st.integers(0, ranks - 1)), max_size=30))
    load = data.draw(st.lists(st.integers(0, 60), min_size=ranks, max_size=ranks))
    lengths, owner = [n for n, _ in rows], [r for _, r in rows]
    destination = balanced(lengths, owner, load)
    before, after = totals(lengths, owner, load), totals(lengths, destination, load)
    share = -(-sum(after) // ranks)
    assert max(after) <= max(before) and sum(after) == sum(before)
    assert max(after) <= max(share + max(lengths, default=0), *load)
    if destination != owner:
        assert max(after) < max(before)
