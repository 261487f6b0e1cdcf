"""RolloutReplayBuffer on one rank: what is drawn and evicted."""

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
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import RolloutBatch
from tests.buffers import buffer, rows, same
from tests.plain_buffer import PlainBuffer, Row
from tests.rollouts import batch


def test_what_is_drawn_is_what_was_pushed() -> None:
    b = buffer()
    source = batch([(3, 4), (1, 1), (5, 2), (2, 9)], birth_step=0)
    b.push(source)
    drawn = b.draw(4, 1)
    order = torch.tensor([source.uid.tolist().index(u) for u in drawn.uids.tolist()])
    assert same(drawn.batch, source.select(order)) and drawn.requested == 4
    assert len(b) == 4, "drawing removes nothing"


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


def test_fresh_rollouts_come_first_and_are_left_as_they_are() -> None:
    b = buffer()
    b.push(rows(6, 0))
    fresh = rows(3, 1, lengths=(1, 2))
    alone, beside = b.draw(4, 1), b.draw(4, 1, fresh)
    assert torch.equal(beside.uids, alone.uids) and beside.moved == 0
    assert same(beside.batch, RolloutBatch.cat([fresh, alone.batch]))
    assert same(b.draw(0, 1, fresh).batch, fresh)


def test_beyond_the_paper_is_off_by_default() -> None:
    c = ReplayConfig()
    assert (c.importance_beta, c.ess_floor, c.age_metrics, c.with_replacement) == (0, 0, False, False)
    b = buffer()
    b.push(rows(4, 0))
    assert b.draw(4, 1).batch.importance_weight.tolist() == [1] * 4
    for bad in ({"importance_beta": 1.5}, {"ess_floor": 1.0}, {"ess_floor": 0.5, "composition": "pool"}):
        with pytest.raises(ValueError, match=f"^{next(iter(bad))} must be"):
            ReplayConfig(**bad)


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
        # a device adds float64 up in another order
        near = {"replay/priority_mean": pytest.approx(host.metrics(step)["replay/priority_mean"], rel=1e-12)}
        assert device.metrics(step) == host.metrics(step) | near
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
