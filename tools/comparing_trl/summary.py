"""What the runs of an arm come to, and the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.command_line import aligned

KEYS = ("rollouts_per_second", "generate_seconds", "update_seconds", "peak_bytes", "accuracy")
OF_A_RUN = (*KEYS, "fresh_per_second", "informative_per_second", "wall_seconds", "reward_last")
LAST = 10  # steps of which the reward is averaged at the end of a run


def of_run(record: Mapping[str, Any], *, warmup: int, fresh: int) -> dict[str, float]:
    """One run after its first `warmup` steps; `fresh` rollouts are sampled in a step. Rates are per second of
    generation and update. Raises ValueError where nothing is left to measure."""
    # the first step has no row
    rows = record["rows"][max(0, warmup - 1) :]
    if not rows:
        raise ValueError(f"warmup must leave a step, got {warmup} of {len(record['rows']) + 1} steps")
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    seconds = total["generate"] + total["update"]
    return {
        "rollouts_per_second": total["trained"] / seconds,
        "generate_seconds": total["generate"],
        "update_seconds": total["update"],
        "peak_bytes": record["peak_bytes"],
        "fresh_per_second": fresh * len(rows) / seconds,
        "informative_per_second": total["informative"] / seconds,
        "wall_seconds": total["wall"],
        "reward_last": mean(row["reward_mean"] for row in record["rows"][-LAST:]),
    }


def of_arm(runs: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, Any]]:
    """The five numbers that are compared, as means over runs (the peak: the largest), and all numbers of each run."""
    means = {name: mean(run[name] for run in runs) for name in OF_A_RUN}
    means["peak_bytes"] = max(run["peak_bytes"] for run in runs)
    spread = {name: stdev(run[name] for run in runs) if len(runs) > 1 else None for name in OF_A_RUN}
    details = {
        "runs": [dict(run) for run in runs],
        "std_over_seeds": spread,
        **{name: means[name] for name in OF_A_RUN if name not in KEYS},
    }
    return {name: means[name] for name in KEYS}, details


def table(arms: Mapping[str, Mapping[str, float]], details: Mapping[str, Mapping[str, Any]], steps: int) -> str:
    """One line for each arm; times are those of a step."""
    rows = [["arm", "trained/s", "fresh/s", "generate ms", "update ms", "peak MiB", "accuracy", "+- std"]]
    for name, arm in arms.items():
        found = details[name]
        std = found["std_over_seeds"]["accuracy"]
        rows.append(
            [
                name,
                f"{arm['rollouts_per_second']:.0f}",
                f"{found['fresh_per_second']:.0f}",
                f"{1000 * arm['generate_seconds'] / steps:.0f}",
                f"{1000 * arm['update_seconds'] / steps:.0f}",
                f"{arm['peak_bytes'] / 2**20:.0f}",
                f"{arm['accuracy']:.3f}",
                "-" if std is None else f"{std:.3f}",
            ]
        )
    return "\n".join(aligned(rows, left=1))
