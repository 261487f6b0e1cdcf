"""pass@k and avg@k against exact fractions, subsets that are all looked at, and the binomial law they estimate."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_replay.evaluation.pass_at_k import avg_at_k, doubling, pass_at_k


def exact(n: int, c: int, k: int) -> Fraction:
    return 1 - Fraction(math.comb(n - c, k), math.comb(n, k))


def counts(most: int) -> st.SearchStrategy[tuple[int, int, int]]:
    return st.integers(1, most).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_it_is_the_share_of_subsets_with_a_correct_sample(n: int) -> None:
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([i < c for i in range(n)], k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), rel=1e-15)


@given(counts(3000))
def test_it_is_the_fraction_to_the_last_digits(count: tuple[int, int, int]) -> None:
    truth = exact(*count)
    # also where it is tiny: the error is relative
    assert abs(Fraction(pass_at_k(*count)) - truth) <= truth * Fraction(1, 10**12)


@pytest.mark.parametrize("k", [2, 3, 1000, 10**6])
def test_large_numbers_stay_exact(k: int) -> None:
    n = 10**9
    # one correct sample is among the k taken with probability k / n
    assert pass_at_k(n, 1, k) == pytest.approx(k / n, rel=1e-14, abs=0)
    assert pass_at_k(n, k, 1) == k / n
    # 1 - (1 - c / n)(1 - c / (n - 1))
    assert pass_at_k(n, 7, 2) == pytest.approx(14 / n, rel=1e-7, abs=0)


@given(counts(40))
def test_ends_order_and_symmetry(count: tuple[int, int, int]) -> None:
    n, c, k = count
    value = pass_at_k(n, c, k)
    assert 0 <= value <= 1
    assert (value == 0) == (c == 0) and (value == 1) == (k > n - c)
    assert pass_at_k(n, c, 1) == avg_at_k(n, c) == c / n
    if k > 1:
        assert value >= pass_at_k(n, c, k - 1)
    if c > 0:
        # c correct among k taken, or k taken among c correct
        assert value == pytest.approx(pass_at_k(n, k, c), rel=1e-12)


@pytest.mark.parametrize(("n", "k", "p"), [(8, 4, 0.3), (16, 16, 0.05), (5, 2, 0.9)])
def test_its_mean_over_draws_is_the_chance_itself(n: int, k: int, p: float) -> None:
    """Unbiased: over c ~ Binomial(n, p) it is 1 - (1 - p)^k. The plug-in estimate 1 - (1 - c / n)^k is not."""
    law = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert math.fsum(w * pass_at_k(n, c, k) for c, w in enumerate(law)) == pytest.approx(truth, rel=1e-12)
    assert abs(math.fsum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(law)) - truth) > 1e-4


def test_which_k_are_reported() -> None:
    assert doubling(1) == [1] and doubling(2) == [1, 2] and doubling(8) == [1, 2, 4, 8]
    assert doubling(12) == [1, 2, 4, 8, 12]
    with pytest.raises(ValueError, match="most must be at least 1, got 0"):
        doubling(0)


def test_numbers_that_do_not_fit_are_named() -> None:
    for count, words in (
        ((4, 1, 5), "k must be in [1, 4], the samples, got 5"),
        ((4, 1, 0), "k must be in [1, 4], the samples, got 0"),
        ((4, 5, 1), "correct must be in [0, 4], the samples, got 5"),
        ((4, -1, 1), "correct must be in [0, 4], the samples, got -1"),
        ((0, 0, 1), "samples must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError) as error:
            pass_at_k(*count)
        assert str(error.value) == words
