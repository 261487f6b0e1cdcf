"""What a step collected and drew, in numbers that are equal on every rank."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.replay_buffer import Draw
from megatron_replay.rollout import Completion, RolloutBatch


def score(completions: Sequence[Completion], rewards: Sequence[float | None]) -> tuple[RolloutBatch, dict[str, int]]:
    """Completions with finite log-probs and rewards as a batch; the others are dropped and counted."""
    usable = [(c, r) for c, r in zip(completions, rewards, strict=True) if c.problem() is None]
    kept = [(c, float(r)) for c, r in usable if r is not None and math.isfinite(r)]
    counts = {
        "rollouts": len(completions),
        "dropped_logprobs": len(completions) - len(usable),
        "dropped_rewards": len(usable) - len(kept),
        "truncated": sum(c.finish_reason == "length" for c in completions),
    }
    return RolloutBatch.from_completions([c for c, _ in kept], [r for _, r in kept]), counts


def step_metrics(
    rollouts: RolloutBatch, fresh: RolloutBatch, counts: dict[str, int], group: DataParallelGroup
) -> dict[str, float]:
    """Rewards and response lengths of one step over all ranks. Raises ValueError if no reward was usable."""
    lengths, correct = rollouts.response_lengths.double(), rollouts.reward > 0.5
    # a prompt's group is whole on one rank
    local = [
        *map(float, counts.values()),
        float(len(rollouts)),
        float(rollouts.reward.double().sum()),
        float(lengths.sum()),
        float(correct.sum()),
        float(lengths[correct].sum()),
        float(len(fresh)),
        float(rollouts.group_ids.unique().numel()),
        float(rollouts.group_ids[correct].unique().numel()),
    ]
    sums = group.sum(torch.tensor(local, dtype=torch.float64)).tolist()
    n, no_logprob, no_reward, truncated, usable, reward, tokens, n_correct, correct_tokens, n_fresh, groups, solved = (
        sums
    )
    if usable == 0:
        raise ValueError(
            f"reward must be a finite number for some rollout of a step, got none of {int(n)}: "
            f"{int(no_reward)} without a finite reward, {int(no_logprob)} without finite log-probs"
        )
    return {
        "reward_mean": reward / usable,
        "response_length": tokens / usable,
        "response_length_correct": correct_tokens / max(1.0, n_correct),
        "response_length_incorrect": (tokens - correct_tokens) / max(1.0, usable - n_correct),
        "truncated_fraction": truncated / n,
        "dropped_rewards": no_reward,
        "dropped_logprobs": no_logprob,
        "fresh/rollouts_generated": n,
        "fresh/informative_fraction": n_fresh / usable,
        "fresh/solved_fraction": solved / groups,
        "replay/degenerate_step": float(n_fresh == 0),
    }


def draw_metrics(draw: Draw, step: int, group: DataParallelGroup) -> dict[str, float | str]:
    """Size, ages and identity of one draw. `draw_hash` does not depend on the layout or the order of the draw."""
    age = (step - draw.batch.birth_step[draw.fresh :]).double()
    # of prompt and response, as `replay/stored_length_mean` is
    length = draw.batch.lengths[draw.fresh :].double()
    total_age, total_length = group.sum(torch.stack([age.sum(), length.sum()])).tolist()
    oldest = int(group.max(torch.tensor([int(age.max()) if len(age) else 0])))
    size = draw.uids.numel()
    return {
        "replay/draw_size": float(size),
        "replay/draw_requested": float(draw.requested),
        "replay/moved": float(draw.moved),
        "replay/age_mean": total_age / max(1, size),
        "replay/age_max": float(oldest),
        "replay/drawn_length_mean": total_length / max(1, size),
        "replay/draw_hash": hashlib.sha256(draw.uids.sort().values.numpy().tobytes()).hexdigest()[:16],
    }
