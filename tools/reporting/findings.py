"""Findings: what a reader should know before trusting the curves: skipped updates, losses, numbers out of place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from .element import number
from .run_folder import Row, Run, moment, value

# metric, what it means where it is above 0; sums over the run
COUNTS = (
    ("update_skipped", "updates skipped: no rollout, or the optimizer refused the gradient"),
    ("replay/degenerate_step", "steps without a group that has variance: nothing drawn, nothing trained"),
    ("dropped_rewards", "rollouts without a finite reward: not trained on, not stored"),
    ("dropped_logprobs", "rollouts without finite log-probs: not trained on, not stored"),
    ("engine/dropped_groups", "groups that came in none of their tries: not trained on, not stored"),
    ("engine/failed_syncs", "pushes of weights that did not complete"),
    ("engine/restarts", "engines started again"),
    ("engine/server_failures", "requests without a usable answer"),
    ("engine/wrong_version", "answers sampled by other weights"),
    ("engine/timed_out", "answers that came late"),
    ("engine/discarded_samples", "samples that were not used"),
    ("train_rollout_logprob_outliers", "fresh tokens whose log-ratio exceeds 1: trainer and engine disagree"),
)
SHARES = (("train/log_ratio_clamp_fraction", "updates with tokens whose log-ratio was clamped before exp"),)


@dataclass(frozen=True)
class Finding:
    what: str
    count: float
    where: str  # steps


def findings(run: Run) -> list[Finding]:
    """Those of one run, in the order of COUNTS; nothing where all is well."""
    found = []
    for name, meaning in COUNTS:
        hits = rows_where(run, lambda row, n=name: (value(row, n) or 0) > 0)
        if hits:
            found.append(Finding(f"{meaning} ({name})", sum(value(row, name) or 0 for row in hits), steps_of(hits)))
    for name, meaning in SHARES:
        hits = rows_where(run, lambda row, n=name: (value(row, n) or 0) > 0)
        if hits:
            found.append(Finding(f"{meaning} ({name})", len(hits), steps_of(hits)))
    short = rows_where(run, drew_short)
    if short:
        found.append(Finding("updates that drew fewer rollouts than asked for", len(short), steps_of(short)))
    for name, hits in sorted(not_finite(run).items()):
        found.append(Finding(f"updates whose {name} is not a finite number", len(hits), steps_of(hits)))
    lost = missing_steps(run)
    if lost:
        found.append(Finding("steps without a row", len(lost), ranges(lost)))
    again = repeated(run)
    if again:
        found.append(Finding("updates that stand more than once", len(again), ranges(again)))
    return found


def rows_where(run: Run, test: Callable[[Row], bool]) -> list[Row]:
    return [row for row in run.rows if test(row)]


def drew_short(row: Row) -> bool:
    return (value(row, "replay/draw_size") or 0) < (value(row, "replay/draw_requested") or 0)


def not_finite(run: Run) -> dict[str, list[Row]]:
    """The rows of each metric that is NaN, infinite or null in some."""
    found: dict[str, list[Row]] = {}
    for row in run.rows:
        for name, x in row.items():
            if x is None or (isinstance(x, float) and not math.isfinite(x)):
                found.setdefault(name, []).append(row)
    return found


def missing_steps(run: Run) -> list[int]:
    """Between the first row and the last. A list of steps as long as a gap could be anything, so it is cut."""
    steps = sorted({row["step"] for row in run.rows})
    gaps = [range(a + 1, b) for a, b in pairwise(steps) if b > a + 1]
    return [step for gap in gaps for step in gap[:1000]]


def repeated(run: Run) -> list[int]:
    moments = [moment(row) for row in run.rows]
    return sorted({a[0] for a, b in pairwise(moments) if a == b})


def steps_of(rows: Sequence[Row]) -> str:
    return ranges(sorted({row["step"] for row in rows}))


def ranges(steps: Sequence[int], most: int = 8) -> str:
    """3-5, 9, ...; the first `most` stretches of sorted steps."""
    stretches: list[list[int]] = []
    for step in steps:
        if stretches and step == stretches[-1][1] + 1:
            stretches[-1][1] = step
        else:
            stretches.append([step, step])
    said = [number(a) if a == b else f"{number(a)}-{number(b)}" for a, b in stretches[:most]]
    return ", ".join([*said, f"and {len(stretches) - most} more"] if len(stretches) > most else said)
