"""The study's tables, in Markdown."""

from __future__ import annotations

import math
from typing import Any

from studying.comparison import mean


def markdown(found: dict[str, Any]) -> str:
    return f"{arms_table(found['arms'])}\n\n{pairs_table(found['paired'], 'accuracy')}"


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


def pairs_table(rows: list[dict[str, Any]], metric: str) -> str:
    lines = [f"| {metric}: a - b | mean | 95 % | p | p, Holm |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['a']} - {r['b']} | {r['mean']:+.3f} | {r['ci95'][0]:+.3f} to {r['ci95'][1]:+.3f} | {r['p']:.2g} | "
        f"{r['p_holm']:.2g} |"
        for r in rows
        if r["metric"] == metric
    ]
    return "\n".join(lines)


def with_interval(value: float, ends: list[float]) -> str:
    if math.isnan(ends[0]):
        return f"{value:.3f}"
    return f"{value:.3f} +- {(ends[1] - ends[0]) / 2:.3f}"
