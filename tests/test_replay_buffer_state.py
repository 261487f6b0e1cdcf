"""RolloutReplayBuffer saved and loaded, on any number of shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_replay import replay_buffer
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.rollout import TOKEN_FIELDS
from tests.buffers import buffer, rows
from tests.rollouts import batch
from tests.shards import run_ranks


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
