"""RolloutReplayBuffer.push on one rank: what is stored, in which order, and what goes for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_FIELDS, RolloutBatch
from tests.buffers import buffer, rows, same
from tests.rollouts import batch


def test_a_batch_is_stored_in_the_order_of_its_uids_and_after_what_is_stored() -> None:
    b = buffer()
    source = rows(4, 0, first=50)
    b.push(source.select(torch.tensor([2, 0, 3, 1])))
    assert b.state_dict()["uid"].tolist() == [50, 51, 52, 53]
    with pytest.raises(
        ValueError, match="birth_step and uid must not come before the newest stored, 0 and 53, got uid 10"
    ):
        b.push(rows(3, 0, first=10))
    b.push(rows(3, 1, first=10))  # a later step may have smaller uids
    assert b.state_dict()["uid"].tolist() == [50, 51, 52, 53, 10, 11, 12]
    with pytest.raises(ValueError, match="uid must be stored once, got uid 51"):
        b.push(rows(1, 2, first=51))
    b.push(rows(1, 2, first=0))  # what an unused slot holds is no uid


@pytest.mark.parametrize(
    ("uids", "repeated"),
    [([52], 52), ([60, 51], 51), ([10, 10], 10), ([60, 60], 60)],
    ids=["the largest", "below the largest, beside one above", "twice below the largest", "twice above"],
)
def test_a_uid_is_stored_once_wherever_it_stands(uids: list[int], repeated: int) -> None:
    b = buffer()
    b.push(rows(3, 0, first=50))
    again = rows(len(uids), 1).replace(uid=torch.tensor(uids))
    with pytest.raises(ValueError, match=f"uid must be stored once, got uid {repeated}"):
        b.push(again)
    assert len(b) == 3


def test_birth_steps_are_sorted_within_a_batch_and_never_fall_from_one_to_the_next() -> None:
    def born(*steps: int) -> RolloutBatch:
        return rows(len(steps), 9, first=100 * steps[0]).replace(birth_step=torch.tensor(steps))

    b = buffer()
    b.push(born(4, 2))
    assert b.state_dict()["birth_step"].tolist() == [2, 4]
    for bad, uid in ((born(9, 3), 901), (born(3, 9), 300)):
        with pytest.raises(ValueError, match=f"must not come before the newest stored, 4 and 400, got uid {uid}"):
            b.push(bad)
    b.push(born(7, 4))
    assert b.state_dict()["uid"].tolist() == [401, 400, 701, 700]
    with pytest.raises(RuntimeError, match="step must be at least every birth_step, got 6 for a rollout born 1 later"):
        b.draw(1, 6)
    assert b.evict(13) == 1 and b.evict(15) == 2 and b.metrics(15)["replay/stored_age_mean"] == 8


def test_the_largest_id_comes_back_as_it_was() -> None:
    b = buffer()
    source = rows(1, 0).replace(tokens=torch.tensor([0, 2**31 - 1, 1, 2**31 - 2, 5]))
    b.push(source)
    assert same(b.draw(1, 0).batch, source)


@pytest.mark.parametrize("bounds", [[0, 9, 5, 14], [1, 7, 14], [0, 7, 13], [0, 7, 15]])
def test_bounds_that_do_not_fit_the_tokens_are_refused_and_nothing_changes(bounds: list[int]) -> None:
    b = buffer(capacity=3)
    b.push(rows(3, 0))
    before = b.state_dict()
    source = batch([(3, 4)] * 2, birth_step=1, first_counter=9)
    n = len(bounds) - 1
    fields = {name: torch.cat([getattr(source, name)] * 2)[:n] for name in ROLLOUT_DTYPES}
    bad = source.replace(
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32), **(fields | {"uid": torch.arange(9, 9 + n)})
    )
    for call in (lambda: b.push(bad), lambda: b.draw(1, 1, bad)):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to the 14 tokens, got"):
            call()
    assert all(torch.equal(x, b.state_dict()[name]) for name, x in before.items())


def test_fields_may_be_columns_of_something_else() -> None:
    b, twin = buffer(capacity=3), buffer(capacity=3)
    source = rows(4, 0)
    strided = {f.name: torch.stack([getattr(source, f.name)] * 2, 1)[:, 0] for f in dataclasses.fields(source)}
    b.push(RolloutBatch(**strided))
    twin.push(source)
    assert all(torch.equal(x, b.state_dict()[name]) for name, x in twin.state_dict().items())
    b.push(twin.draw(2, 0).batch.replace(birth_step=torch.full((2,), 1), uid=torch.tensor([90, 91])))
    assert b.state_dict()["uid"].tolist()[1:] == [90, 91]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"behavior_logprobs": float("nan")}, "behavior_logprobs must be finite, got uid 101"),
        ({"tokens": 2**31}, r"tokens must be ids in \[0, 2\^31\), got uid 101"),
        ({"tokens": -1}, r"tokens must be ids in \[0, 2\^31\), got uid 101"),
        ({"advantage": float("inf")}, "advantage must be finite, got uid 101"),
        ({"uid": 100}, "uid must be stored once, got uid 100"),
        ({"birth_step": 0}, "birth_step and uid must not come before the newest stored, 1 and 2, got uid 101"),
        ({"reward": float("nan")}, "reward must be finite, got uid 101 .* reward nan"),
        ({"group_std": float("inf")}, "group_std must be finite, got uid 101 .* group_std inf"),
        ({"importance_weight": float("nan")}, "importance_weight must be finite, got uid 101"),
    ],
)
def test_a_bad_rollout_is_refused_and_nothing_stored(change: dict[str, float], words: str) -> None:
    b = buffer()
    b.push(rows(3, 1, first=0))
    bad = rows(3, 1)
    for name, value in change.items():
        x = getattr(bad, name).clone()
        x[int(bad.cu_seqlens[2]) - 1 if name in TOKEN_FIELDS else 1] = value
        bad = bad.replace(**{name: x})
    with pytest.raises(ValueError, match=words):
        b.push(bad)
    assert len(b) == 3


def test_a_logprob_that_is_not_finite_is_refused_on_a_prompt_token_too() -> None:
    bad = rows(2, 0)
    bad.behavior_logprobs[0] = float("nan")
    b = buffer()
    with pytest.raises(ValueError, match="behavior_logprobs must be finite, got uid 0"):
        b.push(bad)
    assert len(b) == 0


def test_a_rollout_longer_than_the_arena_names_it() -> None:
    b = buffer(arena=8)
    with pytest.raises(ValueError, match="arena_tokens 8 must hold every rollout, got uid 0 with 9 tokens"):
        b.push(rows(1, 0, lengths=(4, 5)))
    with pytest.raises(ValueError, match=r"arena_tokens must be in \[1, 2\^31\), got 0"):
        buffer(arena=0)
    with pytest.raises(ValueError, match=r"arena_tokens must be in \[1, 2\^31\), got 2147483648"):
        buffer(arena=2**31)


def test_capacity_is_a_fifo_backstop_over_slots_and_tokens() -> None:
    b = buffer(capacity=5)
    for step in range(3):
        b.push(rows(3, step))
    assert b.state_dict()["uid"].tolist() == [101, 102, 200, 201, 202]
    assert b.metrics(2)["replay/evicted_by_capacity"] == 4
    full = buffer(arena=10, capacity=2)
    for step in range(2):
        full.push(rows(1, step))
    assert len(full) == 2 and full.counters["evicted_by_capacity"] == 0, "what fits to the last token stays"
    tokens = buffer(arena=12)  # two rollouts of five tokens
    for step in range(3):
        tokens.push(rows(1, step))
    assert tokens.state_dict()["uid"].tolist() == [100, 200]
    tokens.push(rows(4, 3))
    assert tokens.state_dict()["uid"].tolist() == [302, 303] and tokens.counters["evicted_by_capacity"] == 5


def test_a_batch_that_overflows_evicts_all_older_rollouts_before_its_own() -> None:
    """Of lengths 2 | 3, 2, 8 the last two fill 10 of 12 tokens: the stored 2 would fit, but is older than the 3."""
    b = buffer(arena=12)
    b.push(batch([(1, 1)]))
    b.push(batch([(1, 2), (1, 1), (1, 7)], first_counter=1))
    assert b.state_dict()["uid"].tolist() == [2, 3]
    assert b.metrics(0)["replay/evicted_by_capacity"] == 2


def test_what_fits_of_a_batch_is_counted_from_its_newest_whatever_its_order() -> None:
    b = buffer(arena=12)
    b.push(batch([(1, 1), (1, 8), (1, 7)]).select(torch.tensor([2, 1, 0])))
    assert b.state_dict()["uid"].tolist() == [2], "the 9 tokens before its 8 do not fit, though those of uid 0 would"
    assert b.metrics(0)["replay/evicted_by_capacity"] == 2


def test_a_batch_larger_than_the_capacity_keeps_its_newest() -> None:
    b = buffer(capacity=3)
    b.push(rows(2, 0))
    b.push(rows(5, 1))
    assert b.state_dict()["uid"].tolist() == [102, 103, 104]
    assert b.metrics(1)["replay/evicted_by_capacity"] == 4


def test_rows_that_wrap_around_an_arena_filled_to_the_last_token_come_back_whole() -> None:
    b = buffer(arena=10)
    b.push(rows(1, 0, lengths=(1, 2)))  # from here on rows of 5 start at 3 and at 8, and the second kind wraps
    pushed = []
    for step in range(1, 15):
        pushed.append(rows(1, step, lengths=(2, 3)))
        b.push(pushed[-1])
        live, state = RolloutBatch.cat(pushed[-2:]), b.state_dict()
        for name in (*TOKEN_FIELDS, "uid"):
            assert torch.equal(state[name][-getattr(live, name).numel() :], getattr(live, name))
    assert b.ring.live(b.ring.fields["start"]).tolist() == [3, 8] and state["tokens"].numel() == 10
