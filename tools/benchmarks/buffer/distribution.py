"""Does an implementation draw from the distribution that it claims? Chi-square tests against exact probabilities.

A few rollouts of a small stock are drawn many times over; all possible outcomes are enumerated.

Dims: K rollouts, n of them asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor

from .implementation import Draws

ROLLOUTS = 6
DRAWN = 3
REPEATS = 5000
# of a right implementation, one test in so many fails
LEAST_P_VALUE = 1e-5
LEAST_EXPECTED = 5.0  # below it, a count is not near enough to normal

Outcome = tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    """One chi-square test. worst_deviation is of P(rollout is in the draw), or of the share of the draws it has."""

    test: str
    repeats: int
    outcomes: int
    statistic: float
    p_value: float
    worst_deviation: float

    @property
    def passed(self) -> bool:
        # false for a NaN
        return self.p_value >= LEAST_P_VALUE

    @property
    def complaint(self) -> str:
        return f"{self.test}: chi-square {self.statistic:.1f} over {self.outcomes} outcomes, p {self.p_value:.1e}"


def judge(draws: Draws, weights: Tensor, draw: Callable[[int], Tensor], repeats: int) -> list[Verdict]:
    """Tests of single draws and of draws of DRAWN; `draw` takes n and returns positions [n] in weights [K].

    Raises ValueError for a draw of another number, with a position outside, or twice the same where none may be.
    """
    p = (weights.double() / weights.double().sum()).tolist()
    verdicts = []
    for n in (1, DRAWN):
        exact = outcome_probabilities(draws, p, n)
        seen = Counter(_outcome(draws, draw(n), n, len(p)) for _ in range(repeats))
        verdicts.append(_chi_square(f"{repeats} draws of {n}", exact, seen, repeats, len(p)))
    return verdicts


def outcome_probabilities(draws: Draws, p: list[float], n: int) -> dict[Outcome, float]:
    """Every outcome that has a chance: sorted positions without replacement, else positions in the order drawn.

    Without replacement one rollout after another is drawn, by its share of what is left. Stratified means that draw j
    of n falls into the j-th of n equal parts of [0, 1), where rollout i owns a stretch of length p_i.
    """
    found: dict[Outcome, float] = {}
    if draws == "without replacement":
        for order in permutations(range(len(p)), n):
            left, chance = 1.0, 1.0
            for i in order:
                chance *= p[i] / left
                left -= p[i]
            outcome = tuple(sorted(order))
            found[outcome] = found.get(outcome, 0.0) + chance
        return found
    parts = [p] * n if draws == "with replacement" else [_stratum(p, j, n) for j in range(n)]
    for outcome in product(range(len(p)), repeat=n):
        chance = 1.0
        for part, i in zip(parts, outcome, strict=True):
            chance *= part[i]
        if chance > 0:
            found[outcome] = chance
    return found


def _stratum(p: list[float], j: int, n: int) -> list[float]:
    """The chances of the rollouts in [j/n, (j+1)/n)."""
    low, found = 0.0, []
    for share in p:
        overlap = min(low + share, (j + 1) / n) - max(low, j / n)
        # a sliver is a rounding
        found.append(n * overlap if overlap > 1e-9 else 0.0)
        low += share
    return found


def _outcome(draws: Draws, positions: Tensor, n: int, rollouts: int) -> Outcome:
    found = positions.tolist()
    if len(found) != n:
        raise ValueError(f"a draw of {n} returned {len(found)}")
    if not all(0 <= i < rollouts for i in found):
        raise ValueError(f"a draw returned a rollout that is not stored: {found} of {rollouts}")
    if draws != "without replacement":
        return tuple(found)
    if len(set(found)) != n:
        raise ValueError(f"a draw without replacement returned a rollout twice: {found}")
    return tuple(sorted(found))


def _chi_square(test: str, exact: dict[Outcome, float], seen: Counter[Outcome], repeats: int, rollouts: int) -> Verdict:
    statistic, cells, rare, rare_seen = 0.0, 0, 0.0, 0
    for outcome, chance in exact.items():
        if (expected := chance * repeats) < LEAST_EXPECTED:
            rare, rare_seen = rare + expected, rare_seen + seen[outcome]
        else:
            statistic += (seen[outcome] - expected) ** 2 / expected
            cells += 1
    if rare > 0:
        statistic += (rare_seen - rare) ** 2 / max(rare, LEAST_EXPECTED)
        cells += 1
    if any(outcome not in exact for outcome in seen):
        statistic = float("inf")
    half = torch.tensor([(cells - 1) / 2, statistic / 2], dtype=torch.float64)
    p_value = 0.0 if statistic == float("inf") else float(torch.special.gammaincc(half[0], half[1]))
    deviation = max(
        abs(
            sum(chance * outcome.count(i) for outcome, chance in exact.items())
            - sum(count * outcome.count(i) for outcome, count in seen.items()) / repeats
        )
        for i in range(rollouts)
    )
    return Verdict(test, repeats, len(exact), statistic, p_value, deviation)
