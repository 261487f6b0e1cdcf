from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_replay import replay_buffer
from megatron_replay.config import ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_FIELDS, RolloutBatch
from tests.plain_buffer import PlainBuffer, Row
from tests.rollouts import batch
from tests.shards import run_ranks


def buffer(arena: int = 4096, group: DataParallelGroup | None = None, **config: Any) -> RolloutReplayBuffer:
    return RolloutReplayBuffer(ReplayConfig(**config), seed=7, arena_tokens=arena, group=group)


def rows(n: int, step: int, *, first: int | None = None, lengths: tuple[int, int] = (2, 3)) -> RolloutBatch:
    return batch([lengths] * n, birth_step=step, first_counter=100 * step if first is None else first, seed=step)


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def test_what_is_drawn_is_what_was_pushed() -> None:
    b = buffer()
    source = batch([(3, 4), (1, 1), (5, 2), (2, 9)], birth_step=0)
    b.push(source)
    drawn = b.draw(4, 1)
    order = torch.tensor([source.uid.tolist().index(u) for u in drawn.uids.tolist()])
    assert same(drawn.batch, source.select(order)) and drawn.requested == 4
    assert len(b) == 4, "drawing removes nothing"


def test_age_tau_max_is_drawn_and_one_more_is_gone_also_after_save_and_load() -> None:
    for reload in (False, True):
        b = buffer(tau_max=3)
        b.push(rows(5, 0))
        if reload:
            other = buffer(tau_max=3)
            other.load_state_dict([b.state_dict()])
            b = other
        assert b.evict(3) == 0 and len(b.draw(9, 3).batch) == 5
        assert b.evict(4) == 5 and len(b) == 0 and len(b.draw(9, 4).batch) == 0
        assert b.metrics(4)["replay/evicted_by_age"] == 5


def test_a_draw_before_the_eviction_is_refused() -> None:
    b = buffer(tau_max=2)
    b.push(rows(2, 0))
    b.push(rows(2, 1))  # young ones behind it hide nothing
    with pytest.raises(RuntimeError, match=r"evict\(3\) must run before draw: a rollout of age 3"):
        b.draw(1, 3)
    b.evict(3)
    with pytest.raises(RuntimeError, match="step must be at least every birth_step, got 0 for a rollout born 1 later"):
        b.draw(1, 0)


@pytest.mark.parametrize(("alpha", "odds"), [(1.0, 7.0), (0.5, 7.0**0.5)])
def test_odds_of_one_draw_in_closed_form(alpha: float, odds: float) -> None:
    """One correct of eight: A = 2.6458 / -0.3780; a single draw takes it with odds : 1 against each wrong one.

    Steps stand for seeds; chi-square over the eight rollouts, which also says that the wrong ones are alike.
    """
    b = buffer(priority_alpha=alpha)
    advantage = torch.tensor([7.0**0.5] + [-(7.0**-0.5)] * 7)
    b.push(rows(8, 0).replace(advantage=advantage))
    b.config = dataclasses.replace(b.config, tau_max=10**6)
    n = 1200
    seen = torch.bincount(torch.cat([b.draw(1, step).uids for step in range(n)]), minlength=8)
    expected = n * torch.tensor([odds] + [1.0] * 7) / (odds + 7)
    assert ((seen - expected) ** 2 / expected).sum() < 24.3  # 7 degrees of freedom, p = 0.001


def test_inclusion_without_replacement_is_exact() -> None:
    """Two of four: the pair frequencies are those of drawing one after another (chi-square)."""
    weights = [4.0, 2.0, 1.0, 0.5]
    b = buffer(priority_alpha=1.0, priority_eps=1e-12, tau_max=10**6)
    b.push(rows(4, 0).replace(advantage=torch.tensor(weights)))
    n, total = 1200, sum(weights)
    exact: Counter[frozenset[int]] = Counter()
    for i, j in permutations(range(4), 2):
        exact[frozenset((i, j))] += weights[i] / total * weights[j] / (total - weights[i])
    seen = Counter(frozenset(b.draw(2, step).uids.tolist()) for step in range(n))
    chi = sum((seen[k] - n * p) ** 2 / (n * p) for k, p in exact.items())
    assert chi < 20.5  # 5 degrees of freedom, p = 0.001


def test_draws_with_replacement_repeat_and_follow_the_weights() -> None:
    b = buffer(priority_alpha=1.0, priority_eps=1e-12, with_replacement=True)
    b.push(rows(3, 0).replace(advantage=torch.tensor([5.0, -3.0, 2.0])))
    drawn = b.draw(1500, 1)
    counts = torch.bincount(drawn.uids, minlength=3).double()
    expected = torch.tensor([750.0, 450.0, 300.0], dtype=torch.float64)
    assert len(drawn.batch) == 1500 and ((counts - expected) ** 2 / expected).sum() < 13.8
    assert torch.equal(drawn.batch.uid, drawn.uids)


@pytest.mark.parametrize(
    ("priority", "expected"), [("uniform", [1 / 3] * 3), ("group-std", [0.0, 0.25, 0.75])], ids=["uniform", "group-std"]
)
def test_baseline_priorities(priority: str, expected: list[float]) -> None:
    b = buffer(priority=priority, tau_max=10**6)
    b.push(rows(3, 0).replace(advantage=torch.tensor([9.0, 1.0, 1.0]), group_std=torch.tensor([0.0, 0.1, 0.3])))
    n = 1000
    seen = torch.bincount(torch.cat([b.draw(1, s).uids for s in range(n)]), minlength=3)
    p = torch.tensor(expected)
    assert not seen[p == 0].any()
    assert ((seen - n * p) ** 2 / (n * p))[p > 0].sum() < 13.8  # at most 2 degrees of freedom, p = 0.001


def test_equal_priorities_are_the_norm() -> None:
    b = buffer()
    b.push(rows(6, 0).replace(advantage=torch.full((6,), -0.5)))
    assert sorted(b.draw(6, 1).uids.tolist()) == list(range(6))
    assert b.metrics(1)["replay/priority_mean"] == pytest.approx(0.5**0.5, rel=1e-5)


@pytest.mark.parametrize("shards", [2, 4, 3])
@pytest.mark.parametrize("with_replacement", [False, True])
def test_draws_do_not_depend_on_the_sharding(shards: int, with_replacement: bool) -> None:
    steps, n = 6, 9

    def drawn(group: DataParallelGroup) -> list[tuple[list[int], list[int]]]:
        b = buffer(group=group, tau_max=2, with_replacement=with_replacement)
        out = []
        for step in range(steps):
            b.evict(step)
            draw = b.draw(n, step)
            out.append((draw.uids.tolist(), draw.batch.uid.tolist()))
            fresh = rows(8, step)
            b.push(fresh.select(fresh.group_ids % group.size == group.rank))
        return out

    alone = drawn(DataParallelGroup())
    ranks = run_ranks(shards, drawn)
    for step in range(steps):
        uids, local = alone[step]
        assert all(rank[step][0] == uids for rank in ranks)
        assert sorted(uid for rank in ranks for uid in rank[step][1]) == sorted(local)
        for rank in ranks:  # each shard's part keeps the order of the draw
            mine = iter(uids)
            assert all(any(u == v for v in mine) for u in rank[step][1])
    assert len(set(alone[5][0])) < 9 if with_replacement else len(alone[5][0]) == 9


def test_fresh_rollouts_come_first_and_are_left_as_they_are() -> None:
    b = buffer()
    b.push(rows(6, 0))
    fresh = rows(3, 1, lengths=(1, 2))
    alone, beside = b.draw(4, 1), b.draw(4, 1, fresh)
    assert torch.equal(beside.uids, alone.uids) and beside.moved == 0
    assert same(beside.batch, RolloutBatch.cat([fresh, alone.batch]))
    assert same(b.draw(0, 1, fresh).batch, fresh)


@pytest.mark.parametrize("with_replacement", [False, True])
def test_winners_move_to_the_ranks_with_few_tokens_and_arrive_whole(with_replacement: bool) -> None:
    """All rollouts lie on rank 0, and most fresh ones: ranks 1 and 2 train what was drawn."""
    stored = batch([(2, 3), (1, 6), (4, 1), (2, 2), (3, 9), (1, 1)])
    fresh = [rows(9, 1), rows(1, 1, first=300), RolloutBatch.empty()]

    def body(group: DataParallelGroup) -> Any:
        b = buffer(group=group, with_replacement=with_replacement, importance_beta=0.7, priority_alpha=1.0)
        b.push(stored if group.rank == 0 else RolloutBatch.empty())
        return b.draw(5, 1, fresh[group.rank])

    draws = run_ranks(3, body)
    single = buffer(with_replacement=with_replacement, importance_beta=0.7, priority_alpha=1.0)
    single.push(stored)
    expected = single.draw(5, 1)
    assert all(torch.equal(d.uids, expected.uids) and d.moved == 5 for d in draws)
    assert same(draws[0].batch, fresh[0])
    seen = []
    for d, first in zip(draws[1:], fresh[1:], strict=True):
        own = torch.arange(len(d.batch)) < len(first)
        assert same(d.batch.select(own), first)
        drawn = d.batch.select(~own)
        assert len(drawn)
        for i in range(len(drawn)):
            one = drawn.select(torch.tensor([i]))
            twin = expected.batch.select((expected.batch.uid == one.uid).nonzero()[0])
            assert same(one, twin), "with its importance weight"
            seen.append(int(one.uid))
        order = [expected.uids.tolist().index(u) for u in drawn.uid.tolist()]
        assert order == sorted(order), "in the order of the draw"
    assert sorted(seen) == sorted(expected.uids.tolist())


def test_more_tokens_than_a_batch_can_have_end_the_draw_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_buffer, "MOST_TOKENS", 49)

    def body(group: DataParallelGroup) -> None:
        b = buffer(arena=40, group=group)
        b.push(rows(4, 0, first=10 * group.rank))
        assert len(b.draw(8, 1, rows(5, 1)).batch) == 9
        with pytest.raises(OverflowError, match="fresh and drawn rollouts of a rank must have .* tokens, got 50"):
            b.draw(8, 1, rows(6, 1))

    run_ranks(2, body)


def test_a_rank_that_cannot_draw_ends_the_draw_on_all() -> None:
    def body(group: DataParallelGroup) -> str:
        b = buffer(group=group, tau_max=2)
        b.push(rows(2, group.rank * 3, first=10 * group.rank))
        with pytest.raises(RuntimeError) as error:
            b.draw(1, 3)  # rank 0 forgot to evict
        return str(error.value)

    first, second = run_ranks(2, body)
    assert first == "evict(3) must run before draw: a rollout of age 3 is stored"
    assert second == "data-parallel rank 0 cannot draw; its own error says why"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 1e4], ids=["", "every weight above 1"])
def test_importance_weights_are_those_of_prioritized_replay(shards: int, scale: float) -> None:
    """(N P(i))^-beta over the largest of the draw, times what the rollout's weight was."""
    beta, stored = 0.6, rows(6, 0).replace(importance_weight=torch.full((6,), 0.5))
    stored = stored.replace(advantage=scale * stored.advantage)
    p = (stored.advantage.abs().double() + 1e-6) / (stored.advantage.abs().double() + 1e-6).sum()
    fresh = rows(2, 1)

    def body(group: DataParallelGroup) -> Any:
        b = buffer(group=group, priority_alpha=1.0, importance_beta=beta)
        b.push(stored.select(stored.group_ids % group.size == group.rank))
        return b.draw(4, 1, fresh if group.rank == 0 else None)

    draws = run_ranks(shards, body)
    per = {u: float((6 * p[u]) ** -beta) for u in draws[0].uids.tolist()}
    for d in draws:
        for uid, weight in zip(d.batch.uid.tolist(), d.batch.importance_weight.tolist(), strict=True):
            expected = 0.5 * per[uid] / max(per.values()) if uid in per else 1.0
            assert weight == pytest.approx(expected, rel=1e-6)
    assert sorted(u for d in draws for u in d.batch.uid.tolist() if u < 100) == sorted(per)


def test_beyond_the_paper_is_off_by_default() -> None:
    c = ReplayConfig()
    assert (c.importance_beta, c.ess_floor, c.age_metrics, c.with_replacement) == (0, 0, False, False)
    b = buffer()
    b.push(rows(4, 0))
    assert b.draw(4, 1).batch.importance_weight.tolist() == [1] * 4
    for bad in ({"importance_beta": 1.5}, {"ess_floor": 1.0}, {"ess_floor": 0.5, "composition": "pool"}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be"):
            ReplayConfig(**bad)


@pytest.mark.parametrize("shards", [1, 2])
def test_the_ess_floor_shrinks_the_draw_and_the_scale_is_saved(shards: int) -> None:
    def body(group: DataParallelGroup) -> Any:
        b, other = (buffer(group=group, ess_floor=0.8) for _ in range(2))
        b.push(rows(20, 0, first=100 * group.rank))
        b.draw_size.observe(0.2)
        draw = b.draw(16, 1)
        assert (draw.uids.numel(), draw.requested, b.metrics(1)["replay/draw_scale"]) == (4, 16, 0.25)
        state = b.state_dict()
        other.load_state_dict([state | {"group_ids": torch.full((20,), group.rank)}])
        assert other.draw(16, 1).uids.tolist() == draw.uids.tolist()
        return len(draw.batch)

    assert sum(run_ranks(shards, body)) == 4


def test_the_least_scale_of_the_saved_shards_goes_on() -> None:
    states = []
    for uid, ess in ((0, 0.4), (1, 0.2), (2, 0.8)):
        b = buffer(ess_floor=0.8)
        b.push(rows(1, 0, first=uid))
        b.draw_size.observe(ess)
        states.append(b.state_dict())
    other = buffer(ess_floor=0.8)
    other.load_state_dict(states)
    assert other.metrics(0)["replay/draw_scale"] == 0.25


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


@pytest.mark.parametrize(("shards", "capacity"), [(2, 5), (2, 8), (3, 7), (4, 20)])
def test_the_capacity_is_that_of_all_shards_however_uneven_they_are(shards: int, capacity: int) -> None:
    """What is stored and drawn is what one rank stores and draws, though the first shard has most of it."""

    def filled(group: DataParallelGroup) -> Any:
        b, out = buffer(group=group, capacity=capacity, tau_max=50), []
        for step in range(6):
            fresh = rows(9, step, first=20 * step)
            owner = (fresh.uid % (2 * group.size)).clamp(max=group.size - 1)  # the last one has the others' too
            b.evict(step)
            b.push(fresh.select(owner == group.rank))
            out.append((b.draw(4, step).uids.tolist(), b.metrics(step)["replay/size"], b.state_dict()["uid"].tolist()))
        return out, b.metrics(6)["replay/evicted_by_capacity"]

    alone, counted = filled(DataParallelGroup())
    found = run_ranks(shards, filled)
    for step in range(6):
        assert alone[step][1] == min(capacity, 9 * (step + 1))
        assert all(rank[0][step][:2] == alone[step][:2] for rank in found)
        assert sorted(u for rank in found for u in rank[0][step][2]) == alone[step][2]
    assert all(rank[1] == counted == 54 - capacity for rank in found)


def test_a_rank_that_cannot_store_ends_the_push_on_all() -> None:
    def body(group: DataParallelGroup) -> str:
        b = buffer(group=group)
        bad = rows(2, 0, first=10 * group.rank)
        if group.rank == 1:
            bad.advantage[0] = float("nan")
        with pytest.raises((ValueError, RuntimeError)) as error:
            b.push(bad)
        return str(error.value)

    first, second = run_ranks(2, body)
    assert first == "another data-parallel rank cannot store its rollouts; its own error says why"
    assert second.startswith("advantage must be finite, got uid 10")


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


def test_a_load_that_fails_changes_nothing() -> None:
    b = buffer(arena=100)
    b.push(rows(4, 0))
    before, counters = b.state_dict(), dict(b.counters)
    other = buffer()
    other.push(batch([(50, 100)], first_counter=7))
    for change, words in (
        ({}, "shard 1 of the replay buffer: arena_tokens 100 must hold every rollout, got uid 7 with 150 tokens"),
        ({"draw_scale": torch.tensor(float("nan"))}, r"shard 1 .* draw_scale must be in \[0.0625, 1\], got nan"),
        ({"draw_scale": torch.tensor(1.5)}, r"shard 1 .* draw_scale must be in \[0.0625, 1\], got 1.5"),
        ({"cu_seqlens": torch.empty(0, dtype=torch.int32)}, r"shard 1 .* cu_seqlens must be int32 \[N\+1\], got"),
        ({"reward": torch.zeros(1, dtype=torch.float64)}, "shard 1 .* reward must be torch.float32"),
    ):
        with pytest.raises(ValueError, match=words):
            b.load_state_dict([rows_state(), other.state_dict() | change])
        assert all(torch.equal(x, b.state_dict()[name]) for name, x in before.items()) and b.counters == counters


def rows_state() -> dict[str, torch.Tensor]:
    b = buffer()
    b.push(rows(2, 0, first=500))
    return b.state_dict()


def test_a_state_is_saved_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    b = buffer(capacity=7, arena=40)
    for step in range(5):
        b.push(rows(3, step))
    whole = b.state_dict()
    monkeypatch.setattr(replay_buffer, "SAVED_AT_ONCE", 2)
    assert all(torch.equal(x, whole[name]) for name, x in b.state_dict().items()) and len(whole["uid"]) == 7


@pytest.mark.parametrize("backend", ["reference", "cpp"])
def test_both_backends_store_and_draw_the_same(backend: str) -> None:
    b = RolloutReplayBuffer(ReplayConfig(capacity=9, tau_max=4), seed=7, arena_tokens=40, backend=backend)
    plain = buffer(40, capacity=9, tau_max=4)
    for step in range(8):
        for x in (b, plain):
            x.evict(step)
            x.push(batch([(1 + step % 3, 2), (2, 3), (1, 1)], birth_step=step, first_counter=10 * step, seed=step))
        ours, theirs = b.draw(5, step), plain.draw(5, step)
        assert torch.equal(ours.uids, theirs.uids) and same(ours.batch, theirs.batch)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("with_replacement", [False, True])
def test_a_buffer_on_a_device_is_the_host_s(with_replacement: bool) -> None:
    def new(device: str) -> RolloutReplayBuffer:
        config = ReplayConfig(capacity=40, tau_max=4, with_replacement=with_replacement, importance_beta=0.4)
        return RolloutReplayBuffer(config, seed=7, arena_tokens=150, device=device)

    host, device = new("cpu"), new("cuda")
    for step in range(12):
        fresh = batch(
            [(1 + step % 3, 2), (2, 3), (1, 1 + step)] * 3, birth_step=step, first_counter=20 * step, seed=step
        )
        for b in (host, device):
            b.evict(step)
        expected, found = host.draw(7, step, fresh), device.draw(7, step, fresh)
        assert torch.equal(found.uids, expected.uids) and found.batch.device.type == "cuda"
        assert same(found.batch.to("cpu"), expected.batch)
        for b in (host, device):
            b.push(fresh)
        assert device.metrics(step) == host.metrics(step)
    saved = device.state_dict()
    assert all(torch.equal(x, saved[name]) for name, x in host.state_dict().items())
    again = new("cuda")
    again.load_state_dict([saved])
    assert torch.equal(again.draw(5, 12).uids, host.draw(5, 12).uids)


@pytest.mark.slow
def test_a_million_rollouts() -> None:
    n, each = 1_000_000, 50_000
    b = RolloutReplayBuffer(ReplayConfig(capacity=n, tau_max=100), seed=1, arena_tokens=3 * n)
    for step in range(22):
        uid = torch.arange(step * each, (step + 1) * each)
        b.push(
            RolloutBatch(
                tokens=uid.repeat_interleave(3),
                loss_mask=torch.ones(3 * each, dtype=torch.bool),
                behavior_logprobs=torch.zeros(3 * each),
                cu_seqlens=torch.arange(0, 3 * each + 1, 3, dtype=torch.int32),
                advantage=torch.randn(each),
                birth_step=torch.full((each,), step),
                uid=uid,
                group_ids=uid,
                prompt_id=uid,
                **dict.fromkeys(("reward", "group_std", "importance_weight"), torch.ones(each)),
            )
        )
    assert len(b) == n and b.counters["evicted_by_capacity"] == 2 * each
    draw = b.draw(4096, 22)
    assert draw.uids.unique().numel() == 4096 and int(draw.uids.min()) >= 2 * each
    assert torch.equal(draw.batch.tokens, draw.uids.repeat_interleave(3))


def test_reload_on_any_number_of_shards_keeps_the_union_and_the_next_draw() -> None:
    def filled(group: DataParallelGroup) -> Any:
        b = buffer(group=group, tau_max=4)
        for step in range(4):
            fresh = rows(10, step)
            b.push(fresh.select(fresh.group_ids % group.size == group.rank))
        b.evict(5)  # drops the ten of step 0
        draw = b.draw(7, 5)
        return b.state_dict(), draw.uids.tolist()

    def reloaded(states: list[Any]) -> Any:
        def body(group: DataParallelGroup) -> Any:
            b = buffer(group=group, tau_max=4)
            b.load_state_dict(states)
            counts = b.metrics(5)
            return b.state_dict(), b.draw(7, 5).uids.tolist(), counts

        return body

    states, uids = zip(*run_ranks(2, filled), strict=True)
    births = dict(zip(*(torch.cat([s[k] for s in states]).tolist() for k in ("uid", "birth_step")), strict=True))
    for size in (1, 4, 2):
        found = run_ranks(size, reloaded(list(states)))
        states = [f[0] for f in found]
        now = torch.cat([s["uid"] for s in states]).tolist()
        assert sorted(now) == sorted(births), "nothing lost, nothing twice"
        assert {u: births[u] for u in now} == dict(
            zip(now, torch.cat([s["birth_step"] for s in states]).tolist(), strict=True)
        )
        assert all(f[1] == uids[0] for f in found)
        assert all(f[2]["replay/evicted_by_age"] == 10 and f[2]["replay/size"] == 30 for f in found)


def test_groups_stay_whole_on_other_shards_in_order_of_birth_and_uid() -> None:
    saved = []
    for first in (40, 0):
        b = buffer()
        for step in range(2):  # the later ones have the smaller uids
            fresh = rows(8, step, first=first + 20 - 20 * step)
            b.push(fresh.replace(group_ids=fresh.uid // 4))
        saved.append(b.state_dict())
    uids = [*range(20, 28), *range(60, 68), *range(8), *range(40, 48)]

    def body(group: DataParallelGroup) -> list[int]:
        b = buffer(group=group)
        b.load_state_dict(saved)
        return b.state_dict()["uid"].tolist()

    assert run_ranks(2, body) == [[u for u in uids if u // 4 % 2 == rank] for rank in range(2)]


def test_loading_replaces_what_is_stored_and_a_bad_shard_changes_nothing() -> None:
    b, other = buffer(tau_max=2), buffer(tau_max=2)
    for step in range(1, 4):
        b.push(rows(3, step))
        b.evict(step + 1)
    other.push(rows(2, 2, first=7, lengths=(1, 1)))
    before, metrics, state = b.state_dict(), b.metrics(4), other.state_dict()
    assert metrics["replay/evicted_by_age"] == 3 and metrics["replay/stored_age_mean"] == 1.5
    with pytest.raises(ValueError, match="uid 7 stands in the replay buffer's shards more than once"):
        b.load_state_dict([state, state])
    assert b.metrics(4) == metrics and all(torch.equal(x, before[name]) for name, x in b.state_dict().items())
    b.load_state_dict([state])
    assert all(torch.equal(x, state[name]) for name, x in b.state_dict().items())
    b.evict(4)  # nothing: what the last step evicted is forgotten too
    assert b.metrics(4) == other.metrics(4)


def test_a_bad_shard_is_named() -> None:
    b = buffer()
    b.push(rows(2, 0))
    state = b.state_dict()
    with pytest.raises(ValueError, match="uid 0 stands in the replay buffer's shards more than once"):
        buffer().load_state_dict([state, state])
    with pytest.raises(ValueError, match="shards must hold every saved shard, got none"):
        buffer().load_state_dict([])
    with pytest.raises(
        ValueError, match=r"shard 0 of the replay buffer: cu_seqlens must rise from 0 to the 9 tokens, got \[0, 5, 10\]"
    ):
        buffer().load_state_dict([state | {name: state[name][:-1] for name in TOKEN_FIELDS}])
    del state["advantage"]
    with pytest.raises(ValueError, match="shard 0 of the replay buffer: must hold every tensor, lacks advantage"):
        buffer().load_state_dict([state])


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


def test_the_counts_are_ints() -> None:
    m = buffer().metrics(0)
    assert all(
        isinstance(m[f"replay/{k}"], int) for k in ("size", "tokens_stored", "evicted_by_age", "evicted_by_capacity")
    )


def test_memory_stays_flat_and_no_view_of_the_batch_is_kept() -> None:
    b = buffer(arena=300, capacity=40)

    def storages() -> dict[int, int]:
        owned = (*b.ring.arena.values(), b.ring.records, b.ring.log_weight, b.ring.uid)
        return {x.data_ptr(): x.untyped_storage().nbytes() for x in owned}

    before = storages()
    for step in range(200):
        source = rows(7, step)
        b.push(source)
        source.tokens.fill_(-1)
        b.evict(step)
    assert storages() == before
    assert bool((b.state_dict()["tokens"] >= 0).all())


def test_length_metrics_show_what_eviction_takes() -> None:
    b = buffer(tau_max=1)
    b.push(rows(2, 0, lengths=(1, 9)))
    b.push(rows(2, 1, lengths=(1, 1)))
    b.evict(2)
    m = b.metrics(2)
    assert (m["replay/evicted_length_mean"], m["replay/stored_length_mean"], m["replay/stored_age_mean"]) == (10, 2, 1)
    b.evict(3)
    assert b.metrics(3)["replay/evicted_length_mean"] == 2, "of the last step alone"
    b.evict(4)
    assert b.metrics(4)["replay/evicted_length_mean"] == 0 and b.metrics(4)["replay/evicted_by_age"] == 4


def test_empty_and_degenerate_draws() -> None:
    b = buffer()
    assert len(b.draw(5, 0).batch) == 0 and len(b.draw(0, 0).uids) == 0
    b.push(RolloutBatch.empty())
    assert len(b) == 0
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        b.draw(-1, 0)
    b = buffer(priority="group-std", with_replacement=True)
    b.push(rows(2, 0).replace(group_std=torch.zeros(2)))
    assert len(b.draw(3, 0).batch) == 0, "no weight above 0: nothing can be drawn"


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 8)), max_size=6)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("draw"), st.integers(0, 12)),
        st.tuples(st.just("reload"), st.none()),
    ),
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(1, 9), st.integers(12, 60), st.integers(0, 2**64 - 1))
def test_any_sequence_of_operations_equals_plain_python(operations: Any, capacity: int, arena: int, seed: int) -> None:
    config = ReplayConfig(capacity=capacity, tau_max=2)

    def new() -> RolloutReplayBuffer:
        return RolloutReplayBuffer(config, seed=seed, arena_tokens=arena)

    b = new()
    model = PlainBuffer(capacity, arena, config.tau_max, config.priority_alpha, config.priority_eps, seed)
    step = counter = 0
    for name, value in operations:
        if name == "push":
            source = batch(value, birth_step=step, first_counter=counter)
            counter += len(value)
            b.push(source)
            model.push(as_rows(source))
        elif name == "step":
            step += value
            b.evict(step)
            model.evict(step)
        elif name == "reload":
            saved, b = b.state_dict(), new()
            b.load_state_dict([saved])
        else:
            draw = b.draw(value, step)
            expected = model.draw(value, step)
            assert draw.uids.tolist() == [r.uid for r in expected]
            assert as_rows(draw.batch) == expected
        assert as_rows(b.ring.gather(b.ring.window().slots())) == model.rows


def as_rows(source: RolloutBatch) -> list[Row]:
    tokens, cu = source.tokens.tolist(), source.cu_seqlens.tolist()
    fields = zip(source.uid.tolist(), source.birth_step.tolist(), source.advantage.tolist(), cu, cu[1:], strict=False)
    return [Row(uid, birth, advantage, tuple(tokens[i:j])) for uid, birth, advantage, i, j in fields]
