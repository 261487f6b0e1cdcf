"""BenchmarkResult: the metrics of records that are counted by hand, and what is not judged."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from megatron_replay.evaluation.benchmark_result import BenchmarkResult
from megatron_replay.evaluation.bootstrap import mean_interval
from megatron_replay.evaluation.pass_at_k import pass_at_k
from tests.evaluation_records import records

REWARDS: list[list[float | None]] = [[1.0, 0.0, 0.0, 1.0], [0.0] * 4, [1.0] * 4]


def found(rewards: list[list[float | None]], **more: float) -> dict[str, Any]:
    return BenchmarkResult(records(rewards), len(rewards[0]), **more).to_json(seed=3, resamples=500)


def test_counted_by_hand() -> None:
    r = found(REWARDS)
    assert (r["problems"], r["samples"], r["unjudged"]) == (3, 4, 0)
    assert r["avg_at_k"] == r["pass_at_k"]["1"] == r["reward_mean"] == 0.5
    # of the first problem: 1 - C(2, 2) / C(4, 2)
    assert r["pass_at_k"]["2"] == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert r["pass_at_k"]["4"] == pytest.approx(2 / 3)
    assert r["judged_problems"] == {"1": 3, "2": 3, "4": 3}
    # tokens: 10 .. 13, 20 .. 23, 30 .. 33
    assert r["length_mean"] == 21.5
    assert r["length_correct"] == pytest.approx((10 + 13 + 30 + 31 + 32 + 33) / 6)
    assert r["length_incorrect"] == pytest.approx((11 + 12 + 20 + 21 + 22 + 23) / 6)
    assert r["truncated_fraction"] == 0.5
    assert r["per_problem"] == {
        "problem": [0, 1, 2], "judged": [4, 4, 4], "correct": [2, 0, 4], "tokens": [46, 86, 126],
    }  # fmt: skip
    assert json.loads(json.dumps(r)) == r


def test_intervals_are_those_of_means_over_problems() -> None:
    r = found(REWARDS)

    def interval(values: list[float]) -> list[float]:
        x, g = torch.tensor(values, dtype=torch.float64), torch.Generator().manual_seed(3)
        return list(mean_interval(x, generator=g, resamples=500))

    assert r["ci95"]["avg_at_k"] == r["ci95"]["pass_at_k"]["1"] == interval([0.5, 0.0, 1.0])
    assert r["ci95"]["pass_at_k"]["2"] == interval([pass_at_k(4, 2, 2), 0.0, 1.0])
    assert r["ci95"]["length_mean"] == interval([11.5, 21.5, 31.5])
    assert r["ci95"]["truncated_fraction"] == [0.5, 0.5]


def test_what_nobody_judged_is_neither_right_nor_wrong() -> None:
    r = found([[1.0, None, 0.0, None], [None] * 4, [1.0, 1.0, 1.0, None]])
    assert r["unjudged"] == 7
    # the second problem is in no accuracy, and pass@k needs k judged samples: the first has two, the third three
    assert r["judged_problems"] == {"1": 2, "2": 2, "4": 0}
    assert r["avg_at_k"] == (0.5 + 1.0) / 2 and r["reward_mean"] == 4 / 5
    assert r["pass_at_k"]["2"] == 1.0 and r["pass_at_k"]["4"] is None
    assert r["ci95"]["pass_at_k"]["4"] is None
    # lengths are of all responses, those by class of judged ones
    assert r["length_mean"] == 21.5
    assert r["length_correct"] == (10 + 30 + 31 + 32) / 4 and r["length_incorrect"] == 12


def test_a_class_without_a_response_has_no_length() -> None:
    assert found([[0.0, 0.0]])["length_correct"] is None
    assert found([[1.0, 1.0]])["length_incorrect"] is None
    nothing = found([[None, None]])
    assert nothing["avg_at_k"] is nothing["reward_mean"] is nothing["ci95"]["avg_at_k"] is None
    assert nothing["length_mean"] == 10.5


def test_a_reward_in_parts_is_correct_from_where_one_says() -> None:
    rewards: list[list[float | None]] = [[0.4, 0.5, 1.0, 2.0]]
    assert found(rewards)["avg_at_k"] == 0.5
    assert found(rewards, correct_at=0.5)["avg_at_k"] == 0.75
    assert found(rewards)["reward_mean"] == pytest.approx(3.9 / 4)


def test_records_that_are_not_whole_are_refused() -> None:
    whole = records(REWARDS)
    for rows, words in (
        ([], "records must have at least one sample, got none"),
        (whole[:-1], "samples must be 4 of problem 2, got 3"),
        ([*whole, whole[0]], "records must name each sample once, got 13 of 12 samples"),
    ):
        with pytest.raises(ValueError) as error:
            BenchmarkResult(rows, 4)
        assert str(error.value) == words
