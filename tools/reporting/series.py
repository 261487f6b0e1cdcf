"""Series: one metric of one run over its updates, and as many points of it as a curve needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .run_folder import Run, value

POINTS = 2000
# of rollouts: without one they are 0 for want of a value
OF_ROLLOUTS = frozenset(
    {
        *("ratio_mean", "ratio_max", "clip_fraction", "clip_fraction_low", "clip_fraction_high", "dual_clip_fraction"),
        *("ess", "kl_mean", "behavior_kl_mean", "entropy_mean", "advantage_abs_mean", "loss"),
        *("log_ratio_clamp_fraction", "logprob_abs_diff_mean", "logprob_abs_diff_max"),
    }
)
# what the others are about: where that is 0, so are they
ABOUT = {
    "replay/age_mean": "replay/draw_size",
    "replay/age_max": "replay/draw_size",
    "replay/drawn_length_mean": "replay/draw_size",
    "replay/priority_mean": "replay/size",
    "replay/stored_age_mean": "replay/size",
    "replay/stored_length_mean": "replay/size",
    # a length of 0 says that there was no such rollout
    "replay/evicted_length_mean": "replay/evicted_length_mean",
    "response_length_correct": "response_length_correct",
    "response_length_incorrect": "response_length_incorrect",
}


@dataclass(frozen=True)
class Series:
    """y over x. None: not a finite number."""

    x: Sequence[float]
    y: Sequence[float | None]

    @cached_property
    def points(self) -> list[tuple[float, float]]:
        return [(x, y) for x, y in zip(self.x, self.y, strict=True) if y is not None]

    def mean_of_last(self, count: int, until: float | None = None) -> float | None:
        """Mean of the last `count` finite values at or before `until`."""
        last = [y for x, y in self.points if until is None or x <= until][-count:]
        return sum(last) / len(last) if last else None


def series(run: Run, name: str) -> Series | None:
    """None where no row has the metric, or none has a rollout that it is about."""
    part, _, metric = name.partition("/")
    needs = f"{part}/rollouts" if metric in OF_ROLLOUTS else ABOUT.get(name)
    there = [
        (x, value(row, name)) for x, row in zip(run.x, run.rows, strict=True) if name in row and row.get(needs, 1) != 0
    ]
    return Series([x for x, _ in there], [y for _, y in there]) if there else None


def thinned(s: Series, limit: int = POINTS) -> Series:
    """At most `limit` points: the lowest and the highest of each stretch, and the gaps between them."""
    if len(s.x) <= limit:
        return s
    stretches = limit // 2
    x: list[float] = []
    y: list[float | None] = []
    for i in range(stretches):
        at = range(i * len(s.x) // stretches, (i + 1) * len(s.x) // stretches)
        known = [(s.y[j], j) for j in at if s.y[j] is not None]
        kept = sorted({min(known)[1], max(known)[1]}) if known else [at[0]]
        x += [s.x[j] for j in kept]
        y += [s.y[j] for j in kept]
    return Series(x, y)


def averaged(columns: Sequence[Sequence[float]], limit: int) -> list[list[float]]:
    """Columns of equal length, each as the means of at most `limit` stretches."""
    n = len(columns[0])
    stretches = min(n, limit)
    bounds = [i * n // stretches for i in range(stretches + 1)]
    return [[sum(c[a:b]) / (b - a) for a, b in pairwise(bounds)] for c in columns]
