"""The accuracy-efficiency score against its equation in exact fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_replay.evaluation.accuracy_efficiency import AccuracyEfficiency, Score


def approximately(value: float, gain: float, saved: float) -> Any:
    return pytest.approx((value, gain, saved), rel=1e-12, abs=1e-15)


def numbers(score: Score) -> tuple[float, float, float]:
    return score.value, score.delta_accuracy, score.delta_length


def test_by_hand() -> None:
    score = AccuracyEfficiency()
    # a quarter shorter and 10 % better: 0.25 + 3 * 0.1
    assert numbers(score.score(0.55, 750, 0.5, 1000)) == approximately(0.55, 0.1, 0.25)
    # a quarter shorter and 10 % worse: 0.25 - 5 * 0.1
    assert numbers(score.score(0.45, 750, 0.5, 1000)) == approximately(-0.25, -0.1, 0.25)
    # longer and as good
    assert numbers(score.score(0.5, 1500, 0.5, 1000)) == approximately(-0.5, 0.0, -0.5)
    # the baseline itself
    assert score.score(0.5, 1000, 0.5, 1000) == Score(0.0, 0.0, 0.0)
    # nothing right and no word
    assert score.score(0.0, 0, 0.5, 1000) == Score(1.0 - 5.0, -1.0, 1.0)


@given(
    st.fractions(0, 1, max_denominator=1000),
    st.integers(0, 5000),
    st.fractions(Fraction(1, 1000), 1, max_denominator=1000),
    st.integers(1, 5000),
    *(st.integers(0, 8) for _ in range(3)),
)
def test_it_is_the_equation(
    accuracy: Fraction, length: int, base: Fraction, base_length: int, alpha: int, beta: int, gamma: int
) -> None:
    gain, saved = (accuracy - base) / base, Fraction(base_length - length, base_length)
    truth = alpha * saved + (beta if gain >= 0 else -gamma) * abs(gain)
    found = AccuracyEfficiency(alpha, beta, gamma).score(float(accuracy), length, float(base), base_length)
    # a gain of 0 may round to either side; both give the same
    assert found.value == pytest.approx(float(truth), rel=1e-9, abs=1e-9)
    assert (found.delta_accuracy, found.delta_length) == pytest.approx((float(gain), float(saved)), abs=1e-9)


def test_a_baseline_of_nothing_and_constants_that_do_not_fit_are_named() -> None:
    score = AccuracyEfficiency()
    for given_numbers, words in (
        ((0.5, 10, 0.0, 10), "base_accuracy must be above 0 for an accuracy-efficiency score, got 0.0"),
        ((0.5, 10, 0.5, 0.0), "base_length must be above 0 for an accuracy-efficiency score, got 0.0"),
        ((-0.5, 10, 0.5, 10), "accuracy must be at least 0 and finite, got -0.5"),
        ((0.5, float("nan"), 0.5, 10), "length must be at least 0 and finite, got nan"),
    ):
        with pytest.raises(ValueError) as error:
            score.score(*given_numbers)
        assert str(error.value) == words
    with pytest.raises(ValueError, match="gamma must be at least 0 and finite, got -1"):
        AccuracyEfficiency(gamma=-1)
