"""RolloutReplayBuffer over several ranks: the same draws and the same content as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_replay import replay_buffer
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.rollout import RolloutBatch
from tests.buffers import buffer, rows, same
from tests.rollouts import batch
from tests.shards import run_ranks


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
