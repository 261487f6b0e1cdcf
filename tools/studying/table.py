"""The study's tables, in Markdown."""

from __future__ import annotations

import math
from typing import Any

from studying.comparison import mean


def markdown(found: dict[str, Any]) -> str:
    tables = [arms_table(found["arms"])]
    for basis in dict.fromkeys(row["equal"] for row in found["paired"]):
        tables.append(f"At equal {basis}:")
        tables.append(pairs_table([row for row in found["paired"] if row["equal"] == basis]))
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


def pairs_table(rows: list[dict[str, Any]]) -> str:
    lines = ["| a - b | accuracy | 95 % | p, Holm | pass@8 | 95 % | p, Holm |", "|---|---|---|---|---|---|---|"]
    pairs = dict.fromkeys((row["a"], row["b"]) for row in rows)
    for pair in pairs:
        of = {row["metric"]: row for row in rows if (row["a"], row["b"]) == pair}
        cells = [cell for metric in ("accuracy", "pass_at_8") for cell in difference(of[metric])]
        lines.append(f"| {' - '.join(pair)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def difference(row: dict[str, Any]) -> tuple[str, str, str]:
    low, high = row["ci95"]
    return f"{row['mean']:+.3f}", f"{low:+.3f} to {high:+.3f}", f"{row['p_holm']:.2g}"


def with_interval(value: float, ends: list[float]) -> str:
    if math.isnan(ends[0]):
        return f"{value:.3f}"
    return f"{value:.3f} +- {(ends[1] - ends[0]) / 2:.3f}"
