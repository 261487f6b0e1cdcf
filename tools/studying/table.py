"""The study's tables, in Markdown."""

from __future__ import annotations

import math
from typing import Any

from studying.arms import OURS
from studying.comparison import mean


def markdown(found: dict[str, Any]) -> str:
    tables = [arms_table(found["arms"])]
    for basis in dict.fromkeys(row["equal"] for row in found["paired"]):
        tables.append(f"At equal {basis}:")
        tables.append(pairs_table([row for row in found["paired"] if row["equal"] == basis], basis))
    if replaying := [arm for arm in found["arms"] if arm["replay"].get("ess") is not None]:
        tables += ["Replayed rollouts, mean of the steps:", replay_table(replaying)]
    for arm in found["arms"]:
        if arm["name"] == OURS and arm["ages"]:
            tables += [f"Trained tokens of {OURS} by age, mean of the updates:", ages_table(arm["ages"])]
    if found["tuning"]:
        tables += ["Accuracy on the tuning seeds by rate, mean:", tuning_table(found["tuning"])]
    return "\n\n".join(tables)


def arms_table(arms: list[dict[str, Any]]) -> str:
    lines = [
        "| arm | rate | accuracy | pass@8 | length, right / wrong | AES | fresh rollouts | trained tokens | CPU s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms:
        lengths = " / ".join("-" if x is None else f"{x:.2f}" for x in (arm["length_correct"], arm["length_incorrect"]))
        lines.append(
            f"| {arm['name']} | {arm['rate']:g} | {with_interval(mean(arm['accuracy']), arm['accuracy_ci95'])} | "
            f"{mean(arm['pass_at_8']):.3f} | {lengths} | {arm['aes']:+.3f} | {arm['fresh_rollouts']:,.0f} | "
            f"{arm['trained_tokens']:,.0f} | {arm['cpu_seconds']:.1f} |"
        )
    return "\n".join(lines)


def pairs_table(rows: list[dict[str, Any]], basis: str) -> str:
    """`basis` is what is equal: where it is counted, the last column shows how equal it is."""
    counted = rows[0]["cost_ratio"] is not None
    heads = ["a - b", *("accuracy", "95 %", "p, Holm"), *("pass@8", "95 %", "p, Holm"), *[f"{basis}, a / b"] * counted]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    pairs = dict.fromkeys((row["a"], row["b"]) for row in rows)
    for pair in pairs:
        of = {row["metric"]: row for row in rows if (row["a"], row["b"]) == pair}
        cells = [cell for metric in ("accuracy", "pass_at_8") for cell in difference(of[metric])]
        ratio = [f"{of['accuracy']['cost_ratio']:.2f}"] if counted else []
        lines.append(f"| {' | '.join([' - '.join(pair), *cells, *ratio])} |")
    return "\n".join(lines)


def replay_table(arms: list[dict[str, Any]]) -> str:
    lines = ["| arm | accuracy | age, steps | clipped | effective sample size |", "|---|---|---|---|---|"]
    for arm in arms:
        of, accuracy = arm["replay"], mean(arm["accuracy"])
        cells = f"{of['age_mean']:.1f} | {of['clip_fraction']:.3f} | {of['ess']:.3f}"
        lines.append(f"| {arm['name']} | {accuracy:.3f} | {cells} |")
    return "\n".join(lines)


def ages_table(ages: dict[str, dict[str, float]]) -> str:
    """What is drawn at each age: `age_00` is the fresh batch."""
    lines = ["| age, steps | ratio, mean | clipped | effective sample size |", "|---|---|---|---|"]
    for name, of in sorted(ages.items()):
        cells = [f"{of[key]:.3f}" for key in ("ratio_mean", "clip_fraction", "ess")]
        lines.append(f"| {int(name.removeprefix('age_'))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tuning_table(rows: list[dict[str, Any]]) -> str:
    rates, arms = sorted({row["rate"] for row in rows}), dict.fromkeys(row["arm"] for row in rows)
    lines = [f"| arm | {' | '.join(f'{rate:g}' for rate in rates)} |", f"|---{'|---' * len(rates)}|"]
    for arm in arms:
        cells = [mean(row["accuracy"] for row in rows if (row["arm"], row["rate"]) == (arm, rate)) for rate in rates]
        lines.append(f"| {arm} | {' | '.join(f'{x:.3f}' for x in cells)} |")
    return "\n".join(lines)


def difference(row: dict[str, Any]) -> tuple[str, str, str]:
    low, high = row["ci95"]
    return f"{row['mean']:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{row['p_holm']:.2g}"


def with_interval(value: float, ends: list[float]) -> str:
    if math.isnan(ends[0]):
        return f"{value:.3f}"
    return f"{value:.3f} +- {(ends[1] - ends[0]) / 2:.3f}"
