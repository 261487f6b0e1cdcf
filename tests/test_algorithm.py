"""The loop by itself: what reaches the policy and the buffer, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_replay.algorithm import compose, replay_grpo
from megatron_replay.config import GrpoConfig, ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.engines.embedded import Sampled
from megatron_replay.importance import ImportanceOptions
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import Completion, Prompt, RolloutBatch
from tests.rollouts import batch as packed
from tests.rollouts import completion
from tests.shards import run_ranks

PROMPTS, GROUP = 4, 4


@dataclass
class ListPolicy:
    """Keeps what it is trained on."""

    batches: list[tuple[int, RolloutBatch]] = field(default_factory=list)

    def train(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        self.batches.append((step, batch))
        return {"loss": 0.0}

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        return torch.where(batch.loss_mask, batch.behavior_logprobs + 0.25, 0.0)


@dataclass
class ListEngine:
    """Random completions; remembers the order of its calls."""

    calls: list[str] = field(default_factory=list)
    version: int = -1
    spoil: Callable[[Completion], Completion] = lambda c: c
    lost: Callable[[Prompt], bool] = lambda p: False  # groups that were dropped

    def load_weights(self, policy: Any, version: int) -> None:
        self.calls.append(f"load {version}")
        self.version = version

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> Sampled:
        self.calls.append("generate")
        return Sampled(self._sample(prompts, group_size))

    def metrics(self) -> dict[str, float]:
        return {"engine/calls": float(len(self.calls))}

    def _sample(self, prompts: Sequence[Prompt], group_size: int) -> list[Completion]:
        return [
            self.spoil(
                completion(p.counter, s, response=1 + (p.counter + s) % 6, group_size=group_size, version=self.version)
            )
            for p in prompts
            if not self.lost(p)
            for s in range(group_size)
        ]


class CountingPrompts:
    cursor = 0

    def take(self, n: int) -> list[Prompt]:
        taken = [Prompt((1,), c, c) for c in range(self.cursor, self.cursor + n)]
        self.cursor += n
        return taken


def one_correct(completions: Sequence[Completion]) -> list[float | None]:
    """Binary rewards: one of each group is right; the group of prompt 0 of every step is all wrong."""
    return [float(c.uid % GROUP == 1 and c.prompt.counter % PROMPTS != 0) for c in completions]


def run(
    steps: int = 6,
    reward: Any = one_correct,
    engine: ListEngine | None = None,
    policy: ListPolicy | None = None,
    **changes: Any,
) -> Any:
    replay = ReplayConfig(**({"warmup_steps": 2, "tau_max": 2} | changes.pop("replay", {})))
    config = GrpoConfig(train_iters=steps, prompts_per_step=PROMPTS, group_size=GROUP, replay=replay, **changes)
    policy, engine, rows = policy or ListPolicy(), engine or ListEngine(), []
    group = DataParallelGroup()
    buffer = RolloutReplayBuffer(replay, seed=3, arena_tokens=4096, group=group)
    replay_grpo(
        policy,
        engine,
        CountingPrompts(),
        reward,
        buffer,
        config,
        group=group,
        phase=lambda _: nullcontext(),
        report=lambda step, iteration, metrics: rows.append({"step": step, "iteration": iteration, **metrics}),
        end_step=lambda _: False,
    )
    return policy, engine, buffer, rows


def test_fresh_is_anchored_and_replay_is_half_of_it_after_warm_up() -> None:
    policy, engine, _, rows = run()
    assert engine.calls == [x for s in range(6) for x in (f"load {s}", "generate")]
    for step, batch in policy.batches:
        fresh = batch.select(batch.birth_step == step)
        replay = batch.select(batch.birth_step < step)
        # 3 of 4 groups have variance: all their rollouts are there, each once, in front
        assert len(fresh) == 3 * GROUP and fresh.uid.unique().numel() == len(fresh)
        assert torch.equal(batch.birth_step[: len(fresh)], fresh.birth_step)
        assert len(replay) == (0 if step < 2 else 6)
        assert replay.uid.unique().numel() == len(replay)
        ages = step - replay.birth_step
        assert bool(((ages >= 1) & (ages <= 2)).all())
    assert [r["replay/draw_size"] for r in rows] == [0, 0, 6, 6, 6, 6]
    assert {int(s - b.birth_step.min()) for s, b in policy.batches[3:]} == {2}, "age tau_max is still drawn"


def test_advantages_are_frozen_at_birth_and_closed_form() -> None:
    policy, *_ = run()
    expected = {True: 0.75 / (math.sqrt(3) / 4 + 1e-6), False: -0.25 / (math.sqrt(3) / 4 + 1e-6)}
    for _, batch in policy.batches:
        for uid, reward, advantage in zip(
            batch.uid.tolist(), batch.reward.tolist(), batch.advantage.tolist(), strict=True
        ):
            assert reward == float(uid % GROUP == 1)
            assert advantage == pytest.approx(expected[reward > 0], rel=1e-6)


def test_replayed_rows_are_what_was_pushed() -> None:
    policy, *_ = run()
    born = {}
    for step, batch in policy.batches:
        for i, uid in enumerate(batch.uid.tolist()):
            row = batch.select(torch.tensor([i]))
            if int(row.birth_step) == step:
                born[uid] = row
            else:
                assert torch.equal(row.tokens, born[uid].tokens)
                assert torch.equal(row.behavior_logprobs, born[uid].behavior_logprobs)
                assert torch.equal(row.advantage, born[uid].advantage)


def test_ratio_zero_is_plain_grpo_and_keeps_nothing() -> None:
    policy, _, buffer, rows = run(replay={"replay_ratio": 0.0})
    assert len(buffer) == 0 and all(len(b) == 12 for _, b in policy.batches)
    assert all(r["replay/draw_size"] == 0 for r in rows)


def test_pool_draws_as_many_as_fresh_from_both() -> None:
    policy, _, _, rows = run(steps=12, replay={"composition": "pool", "priority": "uniform"})
    later = [(s, b) for s, b in policy.batches if s >= 2]
    assert all(len(b) == 12 for _, b in policy.batches)
    replayed = sum(int((b.birth_step < s).sum()) for s, b in later) / sum(len(b) for _, b in later)
    assert 0.45 < replayed < 0.9, "about two thirds of the pool are older than the step"
    assert all(r["replay/draw_size"] == 12 for r in rows[2:])


def test_iterations_repeat_the_same_batch() -> None:
    policy, _, _, rows = run(iterations=3)
    assert [(r["step"], r["iteration"]) for r in rows] == [(s, i) for s in range(6) for i in range(3)]
    for i in range(0, 18, 3):
        assert torch.equal(policy.batches[i][1].uid, policy.batches[i + 2][1].uid)


def test_all_groups_degenerate_trains_on_nothing_and_ages_go_on() -> None:
    def reward(completions: Sequence[Completion]) -> list[float | None]:
        step = completions[0].prompt.counter // PROMPTS
        return one_correct(completions) if step < 3 else [0.35] * len(completions)

    policy, _, buffer, rows = run(steps=7, reward=reward)
    assert [len(b) for _, b in policy.batches] == [12, 12, 18, 0, 0, 0, 0]
    assert [r["replay/degenerate_step"] for r in rows] == [0, 0, 0, 1, 1, 1, 1]
    assert [r["replay/size"] for r in rows] == [0, 12, 24, 24, 12, 0, 0]
    assert len(buffer) == 0


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_bad_reward_drops_its_rollout_alone(bad: float | None) -> None:
    def reward(completions: Sequence[Completion]) -> list[float | None]:
        return [bad if c.uid % 8 == 6 else r for c, r in zip(completions, one_correct(completions), strict=True)]

    policy, _, _, rows = run(reward=reward)
    assert all(r["dropped_rewards"] == 2 and r["dropped_logprobs"] == 0 for r in rows)
    seen = torch.cat([b.uid for _, b in policy.batches])
    assert not bool((seen % 8 == 6).any())
    assert bool(torch.isfinite(torch.cat([b.advantage for _, b in policy.batches])).all())
    # the baseline is that of the three that are left: mean 1/3
    _, first = policy.batches[0]
    spoiled = first.select(first.group_ids % 2 == 1)
    assert spoiled.advantage.max().item() == pytest.approx((2 / 3) / (math.sqrt(2) / 3 + 1e-6), rel=1e-5)


@pytest.mark.parametrize("bad", [None, float("nan")])
def test_a_bad_logprob_drops_its_rollout_and_is_counted(bad: float | None) -> None:
    def spoil(c: Completion) -> Completion:
        return Completion(**{**c.__dict__, "logprobs": (*c.logprobs[:-1], bad)}) if c.uid % 8 == 6 else c

    policy, _, _, rows = run(engine=ListEngine(spoil=spoil))
    assert all(r["dropped_logprobs"] == 2 and r["dropped_rewards"] == 0 for r in rows)
    assert not bool((torch.cat([b.uid for _, b in policy.batches]) % 8 == 6).any())


def test_a_step_goes_on_without_the_groups_that_the_engine_dropped() -> None:
    policy, _, _, rows = run(engine=ListEngine(lost=lambda p: p.counter % PROMPTS == 2))
    assert all(r["fresh/rollouts_generated"] == 12 and r["dropped_logprobs"] == 0 for r in rows)
    assert [len(b) for _, b in policy.batches] == [8, 8, 12, 12, 12, 12]
    assert not bool((torch.cat([b.group_ids for _, b in policy.batches]) % PROMPTS == 2).any())


def test_no_usable_reward_at_all_is_an_error() -> None:
    with pytest.raises(
        ValueError, match="reward must be a finite number .* got none of 16: 16 without a finite reward"
    ):
        run(reward=lambda completions: [None] * len(completions))


def test_recomputed_logprobs_replace_the_engine_s_and_weigh_rollouts() -> None:
    policy, *_ = run(steps=1, old_logprobs="recomputed", importance=ImportanceOptions(enabled=True, cap=2.0))
    _, batch = policy.batches[0]
    n = batch.response_lengths.double()
    assert batch.importance_weight.tolist() == pytest.approx((0.25 * n).exp().clamp(max=2.0).tolist(), rel=1e-5)
    assert {1.0, 2.0} != set(batch.importance_weight.tolist())
    masked, *_ = run(
        steps=1, old_logprobs="recomputed", importance=ImportanceOptions(enabled=True, cap=2.0, mode="mask")
    )
    over = 0.25 * n > math.log(2)
    assert bool(over.any()) and not bool(over.all())
    assert bool((masked.batches[0][1].importance_weight[over] == 0).all())
    plain, *_ = run(steps=1)
    assert torch.allclose(
        batch.behavior_logprobs[batch.loss_mask], plain.batches[0][1].behavior_logprobs[batch.loss_mask] + 0.25
    )


def test_a_correction_without_recomputed_logprobs_is_refused() -> None:
    with pytest.raises(ValueError, match="old_logprobs must be recomputed"):
        run(importance=ImportanceOptions(enabled=True))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"group_size": 1}, "group_size must be at least 2 .*got 1"),
        ({"prompts_per_step": 0}, "prompts_per_step must be at least 1, got 0"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"advantage_std": "batch"}, "advantage_std must be one of population, sample, none, got 'batch'"),
    ],
)
def test_bad_settings_name_field_and_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GrpoConfig(**({"train_iters": 1, "prompts_per_step": 1, "group_size": 2} | changes))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tau_max", 0, "tau_max must be at least 1 step, got 0"),
        ("tau_max", -3, "tau_max must be at least 1 step, got -3"),
        ("replay_ratio", -0.5, "replay_ratio must be at least 0 and finite, got -0.5"),
        ("priority_alpha", -1.0, "priority_alpha must be at least 0 and finite, got -1.0"),
        ("capacity", 0, "capacity must be at least 1 rollout, got 0"),
        ("priority", "rank", "priority must be one of abs-advantage, group-std, uniform, got 'rank'"),
    ],
)
def test_bad_replay_settings_name_field_and_value(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ReplayConfig(**{name: value})


class DriftingPolicy(ListPolicy):
    """Reports the effective sample size of the replayed rollouts as the trainer does: 0 where there are none."""

    def train(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        replayed = bool((batch.birth_step < step).any())
        return super().train(batch, step) | {"replay/ess": 0.25 if replayed else 0.0}


def test_the_ess_floor_draws_less_once_replayed_ratios_have_drifted() -> None:
    _, _, _, rows = run(policy=DriftingPolicy(), replay={"ess_floor": 0.5})
    assert [r["replay/draw_size"] for r in rows] == [0, 0, 6, 3, 2, 1]
    assert [r["replay/draw_requested"] for r in rows] == [0, 0, 6, 6, 6, 6]
    assert [r["replay/draw_scale"] for r in rows] == [1, 1, 1, 0.5, 0.25, 0.125]
    _, _, _, rows = run(policy=DriftingPolicy())
    assert [r["replay/draw_size"] for r in rows] == [0, 0, 6, 6, 6, 6]


def test_importance_weights_reach_the_policy_on_replayed_rollouts_alone() -> None:
    policy, _, _, _ = run(replay={"importance_beta": 1.0, "priority_alpha": 1.0})
    for step, batch in policy.batches:
        replayed = batch.birth_step < step
        weight, size = batch.importance_weight, batch.advantage.abs() + 1e-6
        assert bool((weight[~replayed] == 1).all())
        if step >= 2:
            assert torch.allclose(weight[replayed], size[replayed].min() / size[replayed], rtol=1e-5)
            assert weight[replayed].unique().numel() > 1


def test_the_draw_is_the_rounded_share_of_the_fresh_rollouts_of_all_ranks() -> None:
    """Ranks with 3 and 4 fresh rollouts: round(0.5 * 7) = 4 on both, where a rank by itself would find 2."""
    config = GrpoConfig(train_iters=1, prompts_per_step=2, group_size=2, replay=ReplayConfig(warmup_steps=0))

    def body(group: DataParallelGroup) -> Any:
        b = RolloutReplayBuffer(config.replay, seed=3, arena_tokens=512, group=group)
        b.push(packed([(1, 2)] * 6, first_counter=10 * group.rank))
        fresh = packed([(1, 2)] * (3 + group.rank), birth_step=1, first_counter=100 + 10 * group.rank)
        mixed, draw = compose(fresh, b, 1, group)
        assert torch.equal(mixed.uid[: len(fresh)], fresh.uid)
        return draw.requested, draw.uids.tolist(), mixed.uid[len(fresh) :].tolist()

    (requested, uids, first), (same_requested, same_uids, second) = run_ranks(2, body)
    assert requested == same_requested == 4 == len(uids)
    assert uids == same_uids and sorted(first + second) == sorted(uids)
