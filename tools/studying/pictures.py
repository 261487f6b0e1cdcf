"""Three pictures of a study: reward against fresh rollouts, differences with intervals, and what age does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from studying.arms import MAIN, OURS, SWEEPS
from studying.comparison import mean

SMOOTHED = 5  # steps


def draw_pictures(found: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    arms = {arm["name"]: arm for arm in found["arms"]}
    _curves(arms, folder / "curves.png")
    _differences([r for r in found["paired"] if r["metric"] == "accuracy"], folder / "differences.png")
    if OURS in arms and arms[OURS]["ages"]:
        _ages(arms, folder / "ages.png")


def _curves(arms: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5), constrained_layout=True)
    for name in (arm.name for arm in MAIN if arm.name in arms):
        rewards = arms[name]["curve"]["reward_mean"]
        each = arms[name]["fresh_rollouts"] / len(rewards)
        spans = [rewards[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(rewards))]
        style = {"linewidth": 2.5} if name == OURS else {"linewidth": 1.0}
        axis.plot([each * (i + 1) for i in range(len(rewards))], [mean(s) for s in spans], label=name, **style)
    axis.set(xlabel="fresh rollouts", ylabel=f"reward on new prompts, mean of {SMOOTHED} steps and of all seeds")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _differences(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 0.3 * len(rows) + 1.2), constrained_layout=True)
    for y, row in enumerate(reversed(rows)):
        low, high = row["ci95"]
        axis.plot([low, high], [y, y], color="tab:blue")
        axis.plot([row["mean"]], [y], "o", color="tab:blue")
    axis.set_yticks(range(len(rows)), [f"{r['a']} - {r['b']}" for r in reversed(rows)], fontsize=8)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set(xlabel="difference of held-out accuracy, pairs of seeds, 95 % interval")
    axis.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _ages(arms: dict[str, Any], path: Path) -> None:
    """Left: effective sample size and clipped share by age, of our arm. Right: accuracy against tau_max."""
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    of_age = {int(name.removeprefix("age_")): x for name, x in sorted(arms[OURS]["ages"].items())}
    for name, label in (("ess", "effective sample size"), ("clip_fraction", "clipped tokens")):
        left.plot(of_age.keys(), [x[name] for x in of_age.values()], "o-", label=label)
    left.set(xlabel="age [steps]", title="by age")
    sweep = [arm.name for arm in SWEEPS if arm.name.startswith("tau-max-") and arm.name in arms]
    limits = sorted([(int(name.rpartition("-")[2]), name) for name in sweep] + [(10, OURS)])
    for limit, name in limits:
        low, high = arms[name]["accuracy_ci95"]
        right.plot([limit, limit], [low, high], color="tab:blue")
        right.plot([limit], [mean(arms[name]["accuracy"])], "o", color="tab:blue")
    right.set(xscale="log", xlabel="tau_max [steps]", title="held-out accuracy, 95 % interval over seeds")
    for axis in (left, right):
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)
