"""Bootstrap intervals against laws that are known: all resamples of few values, the normal law, coverage, pairing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_replay.evaluation import bootstrap
from megatron_replay.evaluation.bootstrap import difference_interval, mean_interval


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_resamples(values: list[float]) -> Tensor:
    """The mean of every one of the N^N resamples."""
    return torch.tensor([sum(x) / len(x) for x in product(values, repeat=len(values))], dtype=torch.float64)


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_the_ends_are_quantiles_of_all_resamples(level: float) -> None:
    values = [0.0, 1.0, 2.5, 7.25, 16.0]
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    truth = torch.quantile(all_resamples(values), ends).tolist()
    found = mean_interval(torch.tensor(values), generator=generator(), resamples=200_000, level=level)
    # the law has 126 distinct means: its quantiles are steps, and a seed is on one side or the other
    assert found == pytest.approx(truth, abs=0.1)


def test_many_values_give_the_normal_interval() -> None:
    x = torch.randn(2000, generator=generator(1), dtype=torch.float64) * 3 + 5
    low, high = mean_interval(x, generator=generator(2), resamples=20_000)
    half = 1.959964 * float(x.std(correction=0)) / 2000**0.5
    assert low == pytest.approx(float(x.mean()) - half, abs=0.05 * half)
    assert high == pytest.approx(float(x.mean()) + half, abs=0.05 * half)


def test_the_interval_covers_as_often_as_it_says() -> None:
    p, n, runs = 0.3, 80, 400
    draws = (torch.rand(runs, n, generator=generator(3)) < p).double()
    covered = sum(low <= p <= high for low, high in (
        mean_interval(x, generator=generator(4), resamples=1000) for x in draws
    )) / runs  # fmt: skip
    # four standard errors of 400 runs, and a percentile interval of 80 values is a little short
    assert 0.90 <= covered <= 0.99


def test_equal_generators_give_equal_intervals_whatever_is_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(37, generator=generator(5), dtype=torch.float64)
    once = mean_interval(x, generator=generator(6), resamples=999)
    assert once == mean_interval(x, generator=generator(6), resamples=999)
    assert once != mean_interval(x, generator=generator(7), resamples=999)
    monkeypatch.setattr(bootstrap, "BLOCK", 100)
    assert mean_interval(x, generator=generator(6), resamples=999) == pytest.approx(once, rel=1e-15)


def test_one_problem_and_equal_problems_have_no_width() -> None:
    assert mean_interval(torch.tensor([0.25]), generator=generator()) == (0.25, 0.25)
    assert mean_interval(torch.full((9,), 0.5), generator=generator()) == (0.5, 0.5)
    # nothing is rounded to float32 on the way
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert mean_interval(third, generator=generator()) == (1 / 3, 1 / 3)


def test_a_paired_difference_is_free_of_what_both_share() -> None:
    hardness = torch.rand(200, generator=generator(8), dtype=torch.float64)
    noise = 0.01 * torch.randn(200, generator=generator(9), dtype=torch.float64)
    low, high = difference_interval(hardness + 0.1 + noise, hardness, generator=generator())
    assert 0.095 < low < 0.1 + float(noise.mean()) < high < 0.105
    # each run alone is known ten times worse
    low, high = mean_interval(hardness, generator=generator())
    assert high - low > 0.06
    # a problem's two values go together: the same values in another order have the same means and a wide interval
    low, high = difference_interval(hardness + 0.1, hardness.flip(0), generator=generator())
    assert high - low > 0.06


def test_what_does_not_fit_is_named() -> None:
    for values, more, words in (
        (torch.zeros(0), {}, "values must be [N] with at least one problem, got [0]"),
        (torch.zeros(2, 2), {}, "values must be [N] with at least one problem, got [2, 2]"),
        (torch.tensor([1.0, float("nan")]), {}, "values must be finite, got nan"),
        (torch.ones(2), {"resamples": 0}, "resamples must be at least 1, got 0"),
        (torch.ones(2), {"level": 1.0}, "level must be in (0, 1), got 1.0"),
    ):
        with pytest.raises(ValueError) as error:
            mean_interval(values, generator=generator(), **more)
        assert str(error.value) == words
    with pytest.raises(ValueError, match=r"base must have the \[2\] of ours, got \[3\]"):
        difference_interval(torch.ones(2), torch.ones(3), generator=generator())
