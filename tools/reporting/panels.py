"""Panels: which metrics stand together in which chart, for one run or for several, one over the other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from .element import Markup, element
from .line_chart import Curve, Mark, line_chart
from .run_folder import Run, value
from .series import Series, series

Line = tuple[str, str]  # metric, what its curve is called
BOTH = ("fresh", "replay")


@dataclass(frozen=True)
class Panel:
    title: str
    lines: tuple[Line, ...]
    about: str = ""
    log: bool = False


def both(metric: str) -> tuple[Line, ...]:
    return tuple((f"{part}/{metric}", part) for part in BOTH)


LEARNING = (
    Panel("Reward", (("reward_mean", "training prompts"),), "mean over the fresh rollouts of a step"),
    Panel("Loss", (("loss", "global batch"), *both("loss")), "whose gradient was taken"),
    Panel("Gradient norm", (("grad_norm", "before clipping"),)),
    Panel("Learning rate", (("lr", "learning rate"),)),
    Panel(
        "Response length",
        (
            ("response_length", "all"),
            ("response_length_correct", "correct"),
            ("response_length_incorrect", "incorrect"),
        ),
        "tokens",
    ),
    Panel(
        "Shares of the fresh rollouts",
        (("truncated_fraction", "truncated"), ("fresh/informative_fraction", "in groups with variance")),
    ),
    Panel("Entropy", both("entropy_mean"), "nats, at trained tokens"),
    Panel("|Advantage|", both("advantage_abs_mean"), "mean over trained rollouts"),
)
OFF_POLICY = (
    Panel("Ratio, mean", both("ratio_mean"), "exp(policy - behavior log-prob)"),
    Panel("Ratio, largest", both("ratio_max"), "of any trained token", log=True),
    Panel("Clip fraction", both("clip_fraction"), "tokens whose gradient the clip removed"),
    Panel(
        "Clip fraction of the replay, by side",
        (("replay/clip_fraction_low", "low"), ("replay/clip_fraction_high", "high")),
    ),
    Panel("Effective sample size", both("ess"), "share of the rollouts; 1 is on-policy"),
    Panel("KL from the behavior policy", both("behavior_kl_mean"), "k3 estimate", log=True),
    Panel("KL to the reference model", both("kl_mean")),
    Panel(
        "Trainer against engine",
        (("train_rollout_logprob_abs_diff", "mean"), ("train_rollout_logprob_abs_diff_max", "largest")),
        "|log-ratio| of fresh tokens",
        log=True,
    ),
)
BUFFER = (
    Panel("Rollouts in the buffer", (("replay/size", "stored at the draw"),)),
    Panel("Tokens in the buffer", (("replay/tokens_stored", "stored at the draw"),)),
    Panel("Drawn", (("replay/draw_requested", "asked for"), ("replay/draw_size", "drawn")), "rollouts of a step"),
    Panel("Replayed share", (("replay/fraction", "replay"),), "of the trained rollouts"),
    Panel(
        "Age",
        (
            ("replay/stored_age_mean", "stored, mean"),
            ("replay/age_mean", "drawn, mean"),
            ("replay/age_max", "drawn, oldest"),
        ),
        "steps",
    ),
    Panel(
        "Evicted",
        (("replay/evicted_by_age", "by age"), ("replay/evicted_by_capacity", "by capacity")),
        "rollouts since the start",
    ),
    Panel(
        "Length of stored, drawn and evicted rollouts",
        (
            ("replay/stored_length_mean", "stored"),
            ("replay/drawn_length_mean", "drawn"),
            ("replay/evicted_length_mean", "evicted last"),
        ),
        "tokens, mean",
    ),
    Panel("Priority", (("replay/priority_mean", "mean weight of the stored"),)),
    Panel("Draw scale", (("replay/draw_scale", "scale"),), "what --rl-replay-ess-floor leaves"),
    Panel("Moved between ranks", (("replay/moved", "drawn rollouts"),)),
)
ENGINE = (
    Panel("Weight sync", (("sync/seconds", "pause to resume"),), "seconds of the last push"),
    Panel("Bytes of a push", (("sync/bytes", "bytes"),)),
    Panel("Speed of a push", (("sync/gigabytes_per_second", "GB/s"),)),
    Panel("Tokens sampled", (("engine/tokens", "tokens"),), "for a step, over all ranks"),
    Panel(
        "Samples lost",
        (
            ("engine/retried", "prompts again"),
            ("engine/dropped_groups", "groups dropped"),
            ("engine/discarded_samples", "discarded"),
            ("engine/timed_out", "late"),
        ),
    ),
    Panel(
        "Failures",
        (
            ("engine/restarts", "restarts"),
            ("engine/failed_syncs", "pushes"),
            ("engine/server_failures", "servers"),
            ("engine/aborted", "aborted"),
            ("engine/wrong_version", "wrong version"),
        ),
    ),
    Panel("Tokens a second", (("tokens_per_second", "trained tokens"),), "of the time of training"),
)
AGES = (
    ("ratio_mean", "Ratio, mean, by age"),
    ("clip_fraction", "Clip fraction by age"),
    ("ess", "Effective sample size by age"),
)
AGE = re.compile(r"age_(\d+)/(\w+)")


def charts(panels: Sequence[Panel], runs: Sequence[Run]) -> list[Markup]:
    """A figure for each panel that has something to show, and at the end a word on what has not."""
    figures, flat, absent = [], [], []
    for panel in panels:
        found = [(r, m, label, series(run, m)) for r, run in enumerate(runs) for m, label in panel.lines]
        there = [(r, m, label, s) for r, m, label, s in found if s is not None and s.points]
        present = {m for _, m, _, _ in there}
        absent += [m for m, _ in panel.lines if m not in present]
        absent += [f"{m} of {runs[r].name}" for r, m, _, s in found if s is None and m in present]
        values = {y for _, _, _, s in there for _, y in s.points}
        if len(values) == 1 and len(there[0][3].points) > 1:
            flat.append(f"{', '.join(sorted(present))} ({values.pop():g})")
            continue
        if there:
            curves = [curve(runs, panel, r, m, label, s) for r, m, label, s in there]
            marks = heldout(runs) if panel.title == "Reward" else []
            figures.append(line_chart(panel.title, curves, about=panel.about, log=panel.log, marks=marks))
    if flat:
        figures.append(element("p", f"The same at every update, so without a chart: {'; '.join(flat)}.", class_="note"))
    if absent:
        figures.append(element("p", f"Not in this run, or about no rollout of it: {', '.join(absent)}.", class_="note"))
    return figures


def curve(runs: Sequence[Run], panel: Panel, r: int, metric: str, label: str, s: Series) -> Curve:
    """One run: a colour for each line. Several: a colour for each run, a dash for each line."""
    line = [m for m, _ in panel.lines].index(metric)
    if len(runs) == 1:
        return Curve(label, s, line, line)
    alone = len(panel.lines) == 1
    return Curve(runs[r].name if alone else f"{runs[r].name}: {label}", s, r, line)


def heldout(runs: Sequence[Run]) -> list[Mark]:
    """Held-out accuracy before and after, where summary.json has it."""
    marks = []
    for r, run in enumerate(runs):
        whose = f"{run.name}: " if len(runs) > 1 else ""
        color = r if len(runs) > 1 else 1
        for name, x in (("before", run.rows[0]["step"]), ("after", run.last_step)):
            if (y := value(run.summary, f"accuracy_{name}")) is not None:
                marks.append(Mark(f"{whose}held-out accuracy {name}", x, y, color))
    return marks


def ages(run: Run) -> list[int]:
    return sorted({int(m[1]) for name in run.names if (m := AGE.fullmatch(name))})


def age_profiles(runs: Sequence[Run]) -> list[Markup]:
    """What each age of rollouts is like: of one run in its first and its last third, of several over all steps."""
    known = [(r, run) for r, run in enumerate(runs) if ages(run)]
    if not known:
        return [element("p", "No run has metrics by age; --rl-replay-age-metrics writes them.", class_="note")]
    figures = []
    for metric, title in AGES:
        curves = []
        for r, run in known:
            n = len(run.rows)
            parts = [("whole run", 0, n)]
            if len(runs) == 1 and n >= 3:
                parts = [("first third", 0, n // 3), ("last third", n - n // 3, n)]
            for k, (label, start, end) in enumerate(parts):
                means = [(age, mean_of(run, f"age_{age:02d}/{metric}", start, end)) for age in ages(run)]
                there = [(float(age), y) for age, y in means if y is not None]
                if there:
                    s = Series([a for a, _ in there], [y for _, y in there])
                    name = run.name if len(runs) > 1 else label
                    curves.append(Curve(name, s, r if len(runs) > 1 else k, k))
        if curves:
            figures.append(line_chart(title, curves, about="mean over updates", x_label="age"))
    missing = [run.name for run in runs if not ages(run)]
    if missing:
        figures.append(element("p", f"No metrics by age in {', '.join(missing)}.", class_="note"))
    return figures


def mean_of(run: Run, name: str, start: int, end: int) -> float | None:
    values = [y for row in run.rows[start:end] if (y := value(row, name)) is not None]
    return sum(values) / len(values) if values else None


def stored_and_drawn(runs: Sequence[Run]) -> Markup | None:
    """Mean |advantage| of what was stored and what was drawn, over the steps."""
    curves = []
    for r, run in enumerate(runs):
        for k, part in enumerate(("stored", "drawn")):
            there = [row for row in run.draws if isinstance(row.get(part), dict) and value(row[part], "rollouts")]
            if there:
                s = Series([row["step"] for row in there], [value(row[part], "advantage_abs_mean") for row in there])
                name = part if len(runs) == 1 else f"{run.name}: {part}"
                curves.append(Curve(name, s, k if len(runs) == 1 else r, k))
    return line_chart("Mean |advantage| of the stored and the drawn", curves) if curves else None
