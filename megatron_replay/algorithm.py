"""Rollout-level, advantage-prioritized experience replay for GRPO: the loop.

Follows Algorithm 1 of "Rollout-Level Advantage-Prioritized Experience Replay for GRPO" (arXiv 2606.04560),
whose full text was not at hand. Where this loop departs from it, or decides what its summary leaves open:

1. Zero-variance groups are neither trained on, nor stored, nor counted in the loss denominators.
2. The draw is without replacement unless `with_replacement`; n = round(replay_ratio * |F|), |F| over all ranks.
3. A step whose groups are all degenerate trains on nothing: |F| = 0 gives n = 0. Weights stay, age goes on.
4. A rollout without a finite reward or log-prob is dropped and counted; its group's baseline is that of the rest. So
   is a group that an engine could not sample.
5. `iterations` > 1 repeats the update on the same batch: the fresh-only control that replay is held against.
6. `composition="pool"` pushes first and draws |F| from buffer and fresh together: a baseline, not the method. It
   has no ratio.
7. `old_logprobs="recomputed"` takes the trainer's own log-probs at birth for the ratio, instead of the engine's.
8. `replay_ratio=0` is plain GRPO; the buffer then stays empty.
9. Not from the paper, and off unless asked for: `importance_beta` weighs drawn rollouts as prioritized replay does,
   `ess_floor` draws fewer of them while their ratios have drifted.
10. `generation_lag=1` samples the next batch while this one trains. A rollout's birth is the step whose weights sampled
    it, so a fresh one then has age 1 where it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from megatron_replay.advantage import informative, with_group_advantages
from megatron_replay.config import GrpoConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.importance import rollout_importance_weight
from megatron_replay.replay_buffer import Draw, RolloutReplayBuffer
from megatron_replay.rollout import Completion, Prompt, RolloutBatch
from megatron_replay.step_metrics import draw_metrics, score, step_metrics


class Policy(Protocol):
    """The model being trained. In a distributed run each rank passes its data-parallel shard of the batch."""

    def train(self, batch: RolloutBatch, step: int) -> dict[str, float]:
        """One clipped update on the global batch; returns metrics, equal on every rank."""

    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Log-probs [T] of the batch's trained tokens under the current weights."""


class Pending(Protocol):
    def result(self, version: int) -> list[Completion]:
        """Wait for the completions. What an engine lost is sampled again with the policy's weights of now, `version`; a
        group that stays lost is left out. In a distributed run every rank calls it."""


class Engine(Protocol):
    """Where rollouts come from."""

    def load_weights(self, policy: Any, version: int) -> None:
        """Sample with the policy's current weights from now on. `version` names them and tags what is sampled:
        asked for the version that it has, an engine does nothing."""

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> Pending:
        """Begin to sample `group_size` completions of each prompt, with behavior log-probs. Only where the engine has
        a device of its own does this go on while the policy trains."""

    def metrics(self) -> dict[str, float]:
        """What happened since the last call, equal on every rank."""


class Prompts(Protocol):
    def take(self, n: int) -> list[Prompt]: ...


Reward = Callable[[Sequence[Completion]], Sequence[float | None]]
Phase = Callable[[str], AbstractContextManager[None]]  # times a named part of a step
Report = Callable[[int, int, dict[str, Any]], None]  # step, iteration, metrics of one update
Watch = Callable[[int, RolloutBatch, Draw], None]  # step, the batch before it is trained on, the draw in it


def replay_grpo(
    policy: Policy,
    engine: Engine,
    prompts: Prompts,
    reward: Reward,
    buffer: RolloutReplayBuffer,
    config: GrpoConfig,
    *,
    group: DataParallelGroup,
    phase: Phase,
    report: Report,
    watch: Watch | None = None,
    end_step: Callable[[int], bool],
    start_step: int = 0,
) -> None:
    """Run steps start_step .. train_iters - 1; `end_step(step)` runs after each and returns True to stop."""

    def sample(step: int) -> Pending:
        with phase("sync"):
            engine.load_weights(policy, version=step)
        with phase("generate"):
            return engine.submit(group.shard(prompts.take(config.prompts_per_step)), config.group_size)

    ahead: Pending | None = None
    for step in range(start_step, config.train_iters):
        sampled = ahead or sample(step)
        with phase("generate"):
            completions = sampled.result(step)
        if config.generation_lag and step + 1 < config.train_iters:
            ahead = sample(step)
        with phase("reward"):
            rollouts, counts = score(completions, reward(completions))
            rollouts = with_group_advantages(rollouts, std=config.advantage_std)
            fresh = informative(rollouts)
        if config.old_logprobs == "recomputed":
            with phase("logprobs"):
                fresh = with_trainer_logprobs(fresh, policy, config)

        with phase("draw"):
            buffer.evict(step)
            batch, draw = compose(fresh, buffer, step, group)
        if watch is not None:
            with phase("log"):
                watch(step, batch, draw)
        metrics = step_metrics(rollouts, fresh, counts, group) | buffer.metrics(step) | draw_metrics(draw, step, group)
        metrics |= engine.metrics()
        for iteration in range(config.iterations):
            with phase("train"):
                update = policy.train(batch, step)
            buffer.draw_size.observe(update.get("replay/ess") if draw.uids.numel() else None)
            report(step, iteration, metrics | update)
        if config.replay.enabled and config.replay.composition == "fresh-anchored":
            with phase("push"):
                buffer.push(fresh)
        if end_step(step):
            return


def compose(
    fresh: RolloutBatch, buffer: RolloutReplayBuffer, step: int, group: DataParallelGroup
) -> tuple[RolloutBatch, Draw]:
    """The batch of one update: all of `fresh`, and single rollouts drawn again from the buffer behind it."""
    replay, total = buffer.config, group.total(len(fresh))
    warm = replay.enabled and step >= replay.warmup_steps
    if replay.composition == "pool":
        buffer.push(fresh)
        draw = buffer.draw(total if warm else 0, step)
        return (draw.batch if warm else fresh), draw
    draw = buffer.draw(round(replay.replay_ratio * total) if warm else 0, step, fresh)
    return draw.batch, draw


def with_trainer_logprobs(fresh: RolloutBatch, policy: Policy, config: GrpoConfig) -> RolloutBatch:
    """`fresh` with the trainer's log-probs as behavior log-probs, and the engine's gap as an importance weight."""
    own = policy.logprobs(fresh)
    weight = rollout_importance_weight(fresh, own, config.importance)
    return fresh.replace(behavior_logprobs=own, importance_weight=weight)
