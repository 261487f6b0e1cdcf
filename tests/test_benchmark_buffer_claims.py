"""The check of tools/benchmark_buffer.py that an implementation draws from the distribution it claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tools.benchmarks.buffer.distribution import Verdict, judge, outcome_probabilities
from tools.benchmarks.buffer.measure import CHECKED
from tools.benchmarks.buffer.stock import Stock

# draws thousands of times, for tools that few changes touch
pytestmark = pytest.mark.slow

P = [0.5, 0.3, 0.2]
CLAIMS = ("without replacement", "with replacement", "with replacement, stratified")
WEIGHTS = Stock(CHECKED, torch.device("cpu")).weights(torch.arange(CHECKED.rollouts))


def test_outcomes_without_replacement_by_hand() -> None:
    found = outcome_probabilities("without replacement", P, 2)
    assert found == pytest.approx(
        {(0, 1): 0.3 + 0.3 * 5 / 7, (0, 2): 0.2 + 0.2 * 5 / 8, (1, 2): 0.3 * 2 / 7 + 0.2 * 3 / 8}
    )
    assert sum(found.values()) == pytest.approx(1)


def test_outcomes_with_replacement_by_hand() -> None:
    found = outcome_probabilities("with replacement", P, 2)
    assert len(found) == 9 and found[2, 0] == pytest.approx(0.1) and found[0, 0] == pytest.approx(0.25)
    # [0, 1/2) is all rollout 0's, so it is drawn first and never again
    stratified = outcome_probabilities("with replacement, stratified", P, 2)
    assert stratified == pytest.approx({(0, 1): 0.6, (0, 2): 0.4})


def sampler(draws: str, weights: Tensor) -> Callable[[int], Tensor]:
    """A plain one that draws as it says."""
    if draws == "with replacement, stratified":
        edges = weights.cumsum(0) / weights.sum()
        return lambda n: torch.searchsorted(edges, (torch.arange(n) + torch.rand(n).double()) / n)
    return lambda n: torch.multinomial(weights, n, replacement=draws == "with replacement")


@pytest.mark.parametrize("claim", CLAIMS)
@pytest.mark.parametrize("draws", CLAIMS)
def test_a_claim_passes_when_it_is_true_and_no_other(draws: str, claim: str) -> None:
    try:
        verdicts = judge(claim, WEIGHTS, sampler(draws, WEIGHTS), 2000)
    except ValueError as error:
        assert claim == "without replacement" != draws and "returned a rollout twice" in str(error)
        return
    assert verdicts[0].passed, "draws of one are the same under every claim"
    assert all(v.passed for v in verdicts) == (draws == claim)


@pytest.mark.parametrize("draws", CLAIMS)
@pytest.mark.parametrize("lie", [torch.ones_like, torch.square, lambda w: w.flip(0), lambda w: w * (w > w.min())])
def test_other_weights_are_seen(draws: str, lie: Callable[[Tensor], Tensor]) -> None:
    single, several = judge(draws, WEIGHTS, sampler(draws, lie(WEIGHTS)), 2000)
    assert not single.passed and not several.passed
    assert single.worst_deviation > 0.02 and "chi-square" in single.complaint


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (torch.tensor([1]), "a draw of 3 returned 1"),
        (torch.tensor([0, 1, 1]), "returned a rollout twice"),
        (torch.tensor([0, 1, 6]), "is not stored"),
        (torch.tensor([0, 1, -1]), "is not stored"),
    ],
)
def test_a_draw_of_wrong_positions_is_refused(drawn: Tensor, message: str) -> None:
    right = sampler("without replacement", WEIGHTS)
    with pytest.raises(ValueError, match=message):
        judge("without replacement", WEIGHTS, lambda n: right(1) if n == 1 else drawn, 50)


def test_one_outcome_that_has_no_chance_is_enough() -> None:
    right, calls = sampler("with replacement, stratified", WEIGHTS), iter(range(10_000))
    verdicts = judge(
        "with replacement, stratified", WEIGHTS, lambda n: right(n).flip(0) if next(calls) == 3000 else right(n), 2000
    )
    assert verdicts[0].passed and verdicts[1].p_value == 0


def test_a_verdict_that_is_no_number_fails() -> None:
    verdict = Verdict("test", 1, 2, float("nan"), float("nan"), 0.0)
    assert not verdict.passed and replace(verdict, p_value=0.5).passed
