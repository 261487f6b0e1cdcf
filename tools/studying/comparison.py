"""What the records of a study say: the rate of each arm, its numbers over seeds, and differences in pairs of seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scipy import stats

from megatron_replay.evaluation.accuracy_efficiency import AccuracyEfficiency

Record = dict[str, Any]
METRICS: dict[str, Callable[[Record], float]] = {
    "accuracy": lambda r: r["accuracy"],
    "pass_at_8": lambda r: r["pass_at"]["8"],
    "length_mean": lambda r: r["length_mean"],
}


def chosen_rates(records: Iterable[Record]) -> dict[str, float]:
    """arm -> the rate with the highest mean accuracy over its seeds; of two that are equal the lower one.

    Raises ValueError where the rates of an arm were not tried on the same seeds.
    """
    tried: dict[str, dict[float, dict[int, float]]] = {}
    for r in records:
        at = r["settings"]
        tried.setdefault(at["arm"], {}).setdefault(at["rate"], {})[at["seed"]] = r["accuracy"]
    for arm, rates in tried.items():
        if len({frozenset(seeds) for seeds in rates.values()}) != 1:
            raise ValueError(f"arm {arm} must have the same seeds at each rate, got {rates}")
    return {arm: max(sorted(rates), key=lambda x: mean(rates[x].values())) for arm, rates in tried.items()}


def at_an_end(rates: dict[str, float], grid: Sequence[float]) -> list[str]:
    """The arms whose best rate is the lowest or the highest of the grid: a better one may lie beyond."""
    return [arm for arm, rate in rates.items() if rate in (min(grid), max(grid))]


def mean(values: Iterable[float]) -> float:
    known = list(values)
    return sum(known) / len(known)


def interval(values: Sequence[float]) -> list[float]:
    """Student's 95 % interval of the mean; of one value it is not known: NaN."""
    if len(values) < 2:
        return [math.nan, math.nan]
    found = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    return [float(found.low), float(found.high)]


def by_seed(records: Iterable[Record], arm: str, metric: str) -> dict[int, float]:
    value = METRICS[metric]
    return {r["settings"]["seed"]: value(r) for r in records if r["settings"]["arm"] == arm}


def paired(records: Sequence[Record], a: str, b: str, metric: str) -> dict[str, Any]:
    """a - b over the seeds that both have: mean, Student's 95 % interval, two-sided p."""
    of_a, of_b = (by_seed(records, arm, metric) for arm in (a, b))
    seeds = sorted(of_a.keys() & of_b.keys())
    if not seeds:
        raise ValueError(f"arms {a} and {b} must have a seed in common, got {sorted(of_a)} and {sorted(of_b)}")
    differences = [of_a[s] - of_b[s] for s in seeds]
    p = float(stats.ttest_1samp(differences, 0.0).pvalue) if len(seeds) > 1 else math.nan
    return {"a": a, "b": b, "metric": metric, "seeds": len(seeds), "mean": mean(differences),
            "ci95": interval(differences), "p": p}  # fmt: skip


def cost_ratio(records: Sequence[Record], a: str, b: str, cost: str | None) -> float | None:
    """Cost of a run of a over that of a run of b, of their means over the seeds; None where it is not counted."""
    if cost is None:
        return None
    of = {arm: mean(r[cost] for r in records if r["settings"]["arm"] == arm) for arm in (a, b)}
    return of[a] / of[b]


def holm(rows: Sequence[dict[str, Any]]) -> list[float]:
    """p of each row, adjusted for their number (Holm 1979): below 0.05 the family's error is below 0.05."""
    order = sorted(range(len(rows)), key=lambda i: rows[i]["p"])
    adjusted, least = [math.nan] * len(rows), 0.0
    for rank, i in enumerate(order):
        least = max(least, min(1.0, (len(rows) - rank) * rows[i]["p"]))
        adjusted[i] = least
    return adjusted


def arm_row(records: Sequence[Record], arm: str, baseline: str) -> dict[str, Any]:
    """Numbers of one arm over its seeds; `aes` is its score against the baseline's means."""
    own = sorted((r for r in records if r["settings"]["arm"] == arm), key=lambda r: r["settings"]["seed"])
    base = [r for r in records if r["settings"]["arm"] == baseline]
    score = AccuracyEfficiency().score(
        *(mean(r[key] for r in some) for some in (own, base) for key in ("accuracy", "length_mean"))
    )
    accuracy = [METRICS["accuracy"](r) for r in own]
    return {
        "name": arm,
        "rate": own[0]["settings"]["rate"],
        "seeds": [r["settings"]["seed"] for r in own],
        "accuracy": accuracy,
        "accuracy_ci95": interval(accuracy),
        "pass_at_8": [METRICS["pass_at_8"](r) for r in own],
        "length_mean": mean(r["length_mean"] for r in own),
        "length_correct": _known(r["length_correct"] for r in own),
        "length_incorrect": _known(r["length_incorrect"] for r in own),
        "aes": score.value,
        "fresh_rollouts": mean(r["fresh_rollouts"] for r in own),
        "trained_tokens": mean(r["trained_tokens"] for r in own),
        "cpu_seconds": mean(r["cpu_seconds"] for r in own),
        "curve": {name: _columns([r["curve"][name] for r in own]) for name in own[0]["curve"]},
        "ages": {
            age: {name: _known(r["ages"][age][name] for r in own if age in r["ages"]) for name in own[0]["ages"][age]}
            for age in own[0]["ages"]
        },
        "replay": {name: _known(r["replay"].get(name) for r in own) for name in own[0]["replay"]},
    }


def _known(values: Iterable[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return mean(known) if known else None


def _columns(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    return [_known(column) for column in zip(*rows, strict=True)]
