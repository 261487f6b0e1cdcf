from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_replay.config import ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import TOKEN_FIELDS, RolloutBatch
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
    with pytest.raises(RuntimeError, match=r"evict\(3\) must run before draw: a rollout of age 3"):
        b.draw(1, 3)
    with pytest.raises(RuntimeError, match="step must be at least every birth_step, got -1 for a rollout born 1 later"):
        b.draw(1, -1)


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


def test_a_bad_shard_is_named() -> None:
    b = buffer()
    b.push(rows(2, 0))
    state = b.state_dict()
    with pytest.raises(ValueError, match="uid 0 stands in the replay buffer's shards more than once"):
        buffer().load_state_dict([state, state])
    with pytest.raises(ValueError, match="shards must hold every saved shard, got none"):
        buffer().load_state_dict([])
    with pytest.raises(ValueError, match="shard 0 of the replay buffer must hold 10 tokens, got 9"):
        buffer().load_state_dict([state | {name: state[name][:-1] for name in TOKEN_FIELDS}])
    del state["advantage"]
    with pytest.raises(ValueError, match="shard 0 of the replay buffer lacks advantage"):
        buffer().load_state_dict([state])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"behavior_logprobs": float("nan")}, "behavior_logprobs must be finite, got uid 101"),
        ({"tokens": 2**31}, r"tokens must be ids in \[0, 2\^31\), got uid 101"),
        ({"tokens": -1}, r"tokens must be ids in \[0, 2\^31\), got uid 101"),
        ({"advantage": float("inf")}, "advantage must be finite, got uid 101"),
        ({"uid": 100}, "uid must be stored once, got uid 100"),
        ({"birth_step": 0}, "birth_step must not fall below that of the rollout before, 1 .*, got uid 101"),
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
    with pytest.raises(ValueError, match="arena_tokens must be at least 1, got 0"):
        buffer(arena=0)


def test_capacity_is_a_fifo_backstop_over_slots_and_tokens() -> None:
    b = buffer(capacity=5)
    for step in range(3):
        b.push(rows(3, step))
    assert b.state_dict()["uid"].tolist() == [101, 102, 200, 201, 202]
    assert b.metrics(2)["replay/evicted_by_capacity"] == 4
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
    assert b.ring.live("start").tolist() == [3, 8] and state["tokens"].numel() == 10


def test_the_counts_are_ints() -> None:
    m = buffer().metrics(0)
    assert all(
        isinstance(m[f"replay/{k}"], int) for k in ("size", "tokens_stored", "evicted_by_age", "evicted_by_capacity")
    )


def test_memory_stays_flat_and_no_view_of_the_batch_is_kept() -> None:
    b = buffer(arena=300, capacity=40)

    def storages() -> dict[int, int]:
        owned = (*b.ring.arena.values(), *b.ring.rows.values(), *b.ring.ledger.values())
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


class ListModel:
    """The buffer in plain Python."""

    def __init__(self, capacity: int, arena: int, tau_max: int) -> None:
        self.capacity, self.arena, self.tau_max = capacity, arena, tau_max
        self.rows: list[tuple[int, int, list[int]]] = []  # uid, birth_step, tokens

    def push(self, new: list[tuple[int, int, list[int]]]) -> None:
        for row in new:
            while len(self.rows) >= self.capacity or sum(len(t) for *_, t in self.rows) + len(row[2]) > self.arena:
                self.rows.pop(0)
            self.rows.append(row)

    def evict(self, step: int) -> None:
        self.rows = [r for r in self.rows if step - r[1] <= self.tau_max]


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
@given(OPERATIONS, st.integers(1, 9), st.integers(12, 60))
def test_any_sequence_of_operations_equals_a_list(operations: Any, capacity: int, arena: int) -> None:
    b, model = buffer(arena, capacity=capacity, tau_max=2), ListModel(capacity, arena, 2)
    step = counter = 0
    for name, value in operations:
        if name == "push":
            source = batch(value, birth_step=step, first_counter=counter)
            counter += len(value)
            cu = source.cu_seqlens.tolist()
            b.push(source)
            model.push(
                [
                    (u, step, source.tokens[i:j].tolist())
                    for u, i, j in zip(source.uid.tolist(), cu, cu[1:], strict=False)
                ]
            )
        elif name == "step":
            step += value
            b.evict(step)
            model.evict(step)
        elif name == "reload":
            other = buffer(arena, capacity=capacity, tau_max=2)
            other.load_state_dict([b.state_dict()])
            b = other
        else:
            draw = b.draw(value, step)
            alive = {u: t for u, _, t in model.rows}
            uids = draw.uids.tolist()
            assert len(uids) == min(value, len(alive)) == len(set(uids))
            cu = draw.batch.cu_seqlens.tolist()
            for u, i, j in zip(uids, cu, cu[1:], strict=False):
                assert draw.batch.tokens[i:j].tolist() == alive[u]
        state = b.state_dict()
        assert state["uid"].tolist() == [u for u, *_ in model.rows]
        assert state["birth_step"].tolist() == [s for _, s, _ in model.rows]
        assert state["tokens"].tolist() == [x for *_, t in model.rows for x in t]
