"""The numbers of a step and of a draw: equal on every rank, and of the rollouts they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.replay_buffer import Draw
from megatron_replay.rollout import RolloutBatch
from megatron_replay.step_metrics import draw_metrics, step_metrics
from tests.buffers import buffer
from tests.rollouts import batch
from tests.shards import run_ranks


def part(births: list[int], fresh: int = 0) -> RolloutBatch:
    """What one rank trains at step 7: `fresh` rollouts of step 2, and then those of `births`."""
    births = [2] * fresh + births
    return batch([(1, 1)] * len(births)).replace(birth_step=torch.tensor(births, dtype=torch.int64))


def test_ages_are_means_and_maxima_over_the_draw_of_all_ranks() -> None:
    """Ages 1 and 3 on rank 0, 4 on rank 1, none on rank 2; the fresh rollouts beside them do not count."""
    fresh = (5, 0, 2)
    parts = [part([6, 4], fresh=5), part([3]), part([], fresh=2)]

    def body(group: DataParallelGroup) -> dict[str, Any]:
        draw = Draw(parts[group.rank], torch.tensor([30, 10, 20]), requested=9, moved=2, fresh=fresh[group.rank])
        return draw_metrics(draw, 7, group)

    first, second, third = run_ranks(3, body)
    assert first == second == third
    assert first["replay/age_mean"] == pytest.approx(8 / 3) and first["replay/age_max"] == 4
    assert (first["replay/draw_size"], first["replay/draw_requested"], first["replay/moved"]) == (3, 9, 2)


def test_an_empty_draw_has_no_age() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for fresh in (0, 3):
        m = draw_metrics(Draw(part([], fresh), none, requested=0, fresh=fresh), 7, DataParallelGroup())
        assert (m["replay/draw_size"], m["replay/age_mean"], m["replay/age_max"], m["replay/moved"]) == (0, 0, 0, 0)
        assert m["replay/drawn_length_mean"] == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_priority_that_prefers_short_rollouts_shows_in_the_length_of_what_is_drawn(ranks: int) -> None:
    """Prompts of 2 and responses of 1 .. 8 tokens, |A| = 1 / response, alpha so high that the shorter half is drawn.
    Fresh rollouts beside the draw do not count, prompts do."""

    def body(group: DataParallelGroup) -> tuple[dict[str, Any], list[int]]:
        mine = torch.arange(group.rank, 8, ranks)
        stored = batch([(2, n) for n in range(1, 9)], birth_step=0).select(mine)
        b = buffer(group=group, priority_alpha=50.0, warmup_steps=0)
        b.push(stored.replace(advantage=1 / stored.response_lengths.float()))
        draw = b.draw(4, 1, batch([(9, 9)] * 2, birth_step=1, first_counter=100 + 10 * group.rank))
        return b.metrics(1) | draw_metrics(draw, 1, group), draw.uids.tolist()

    for m, uids in run_ranks(ranks, body):
        assert sorted(uids) == [0, 1, 2, 3]
        assert m["replay/drawn_length_mean"] == 2 + 2.5 < m["replay/stored_length_mean"] == 2 + 4.5


def test_the_hash_names_the_set_that_was_drawn() -> None:
    def hash_of(*uids: int) -> Any:
        return draw_metrics(Draw(part([]), torch.tensor(uids), len(uids)), 7, DataParallelGroup())["replay/draw_hash"]

    assert hash_of(3, 1, 2) == hash_of(1, 2, 3)
    assert len({hash_of(*u) for u in ((1, 2, 3), (1, 2), (1, 2, 4), (1, 2, 3, 3), (1, 2, 3 + 2**40))}) == 5


def test_lengths_and_solved_prompts_are_over_all_ranks() -> None:
    """Prompt 0 is solved once of twice, 1 never, 2 twice; an informative rollout is one of prompt 0."""
    # (prompt and response tokens, reward, group) of two ranks; the third has none
    rows = ([(2, 3, 1.0, 0), (2, 5, 0.0, 0), (1, 6, 0.25, 1)], [(1, 4, 1.0, 2), (1, 2, 0.75, 2)], [])

    def body(group: DataParallelGroup) -> dict[str, float]:
        own = rows[group.rank]
        rollouts = batch([row[:2] for row in own]).replace(
            reward=torch.tensor([row[2] for row in own], dtype=torch.float32),
            group_ids=torch.tensor([row[3] for row in own], dtype=torch.int64),
        )
        fresh = rollouts.select(rollouts.group_ids == 0)
        counts = {"rollouts": len(own), "dropped_logprobs": 0, "dropped_rewards": 0, "truncated": int(group.rank == 0)}
        return step_metrics(rollouts, fresh, counts, group)

    first, second, third = run_ranks(3, body)
    assert first == second == third
    expected = {
        "reward_mean": 3 / 5,
        "response_length": 20 / 5,
        "response_length_correct": 9 / 3,
        "response_length_incorrect": 11 / 2,
        "truncated_fraction": 1 / 5,
        "fresh/rollouts_generated": 5,
        "fresh/informative_fraction": 2 / 5,
        "fresh/solved_fraction": 2 / 3,
    }
    assert {name: first[name] for name in expected} == pytest.approx(expected)
