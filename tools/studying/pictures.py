"""Pictures of a study: learning curves, accuracy against cost, differences with intervals, and what age does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from studying.arms import ARMS, COMPARISONS, GRPO, MAIN, OURS, SWEEPS, TWO_EPOCHS
from studying.comparison import mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SMOOTHED = 5  # steps
PROMINENT = (GRPO, OURS, TWO_EPOCHS, "two-epochs-replay")


def draw_pictures(found: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    arms = {arm["name"]: arm for arm in found["arms"]}
    _curves(arms, folder / "curves.png")
    _cost(arms, folder / "cost.png")
    _differences([r for r in found["paired"] if r["metric"] == "accuracy"], folder / "differences.png")
    if OURS in arms and arms[OURS]["ages"]:
        _ages(arms, folder / "ages.png")


def _figure(path: Path, draw: Any, columns: int, size: tuple[float, float]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=size, constrained_layout=True)
    draw(axes)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _curves(arms: dict[str, Any], path: Path) -> None:
    """Reward and solved prompts of the policy that samples, on prompts it meets for the first time."""

    def draw(axes: Any) -> None:
        panels = (("reward_mean", "accuracy (pass@1)"), ("fresh/solved_fraction", "pass@8"))
        for axis, (metric, title) in zip(axes, panels, strict=True):
            for name in (arm.name for arm in MAIN if arm.name in arms):
                values = arms[name]["curve"][metric]
                each = arms[name]["fresh_rollouts"] / len(values)
                spans = [values[max(0, i + 1 - SMOOTHED) : i + 1] for i in range(len(values))]
                style = {"linewidth": 2.2} if name in PROMINENT else {"linewidth": 0.9, "alpha": 0.7}
                axis.plot([each * (i + 1) for i in range(len(values))], [mean(s) for s in spans], label=name, **style)
            axis.set(xlabel="fresh rollouts", title=f"{title} on new prompts, mean of the seeds and {SMOOTHED} steps")
            axis.grid(alpha=0.3)
        axes[0].legend(fontsize=8)

    _figure(path, draw, 2, (13, 5))


def _cost(arms: dict[str, Any], path: Path) -> None:
    """Held-out accuracy of every arm, but for the sweeps of ours, against what a run cost, counted in three ways."""

    shown = sorted((a for a in arms.values() if ARMS[a["name"]].rate_of != OURS), key=lambda a: mean(a["accuracy"]))
    costs = (
        ("fresh_rollouts", "fresh rollouts"),
        ("trained_tokens", "trained tokens"),
        ("cpu_seconds", "processor seconds"),
    )

    def draw(axes: Any) -> None:
        lowest = min(arm["accuracy_ci95"][0] for arm in shown)
        span = max(arm["accuracy_ci95"][1] for arm in shown) - lowest
        heights = _apart([mean(arm["accuracy"]) for arm in shown], span / 24)
        for axis, (cost, label) in zip(axes, costs, strict=True):
            furthest = max(arm[cost] for arm in shown)
            for arm, height in zip(shown, heights, strict=True):
                color = "tab:red" if arm["name"] in PROMINENT else "tab:blue"
                _point(axis, arm[cost], arm, color)
                axis.annotate(
                    arm["name"], (arm[cost], mean(arm["accuracy"])), xytext=(1.1 * furthest, height), color=color,
                    fontsize=8, verticalalignment="center", arrowprops={"arrowstyle": "-", "color": "gray", "lw": 0.4},
                )  # fmt: skip
            axis.set(xlabel=f"{label} of a run", xlim=(0, 1.5 * furthest))
            axis.xaxis.set_major_formatter("{x:,.0f}")
            axis.grid(alpha=0.3)
        axes[0].set(ylabel="held-out accuracy, 95 % interval over seeds")

    _figure(path, draw, 3, (16, 6))


def _apart(values: list[float], gap: float) -> list[float]:
    """Rising values, moved so that any two are a gap apart; those that are too near stand around their mean."""
    groups: list[list[float]] = []
    for value in values:
        groups.append([value])
        while len(groups) > 1 and 2 * (mean(groups[-1]) - mean(groups[-2])) < gap * (len(groups[-1]) + len(groups[-2])):
            last = groups.pop()
            groups[-1] += last
    return [mean(group) + gap * (i - (len(group) - 1) / 2) for group in groups for i in range(len(group))]


def _differences(rows: list[dict[str, Any]], path: Path) -> None:
    def draw(axis: Any) -> None:
        colors = dict(zip(COMPARISONS, ("tab:blue", "tab:orange", "tab:green"), strict=True))
        for y, row in enumerate(reversed(rows)):
            axis.plot(row["ci95"], [y, y], color=colors[row["equal"]])
            axis.plot([row["mean"]], [y], "o", color=colors[row["equal"]])
        for basis, color in colors.items():
            axis.plot([], [], "o-", color=color, label=f"at equal {basis}")
        axis.set_yticks(range(len(rows)), [f"{r['a']} - {r['b']}" for r in reversed(rows)], fontsize=8)
        axis.axvline(0, color="black", linewidth=0.8)
        axis.set(xlabel="difference of held-out accuracy, pairs of seeds, 95 % interval")
        axis.grid(axis="x", alpha=0.3)
        axis.legend(fontsize=8)

    _figure(path, draw, 1, (9, 0.26 * len(rows) + 1.4))


def _ages(arms: dict[str, Any], path: Path) -> None:
    """What age does to our arm's rollouts, and accuracy against the bound on it."""
    of_age = {int(name.removeprefix("age_")): x for name, x in arms[OURS]["ages"].items()}
    ages = sorted(of_age)

    def draw(axes: Any) -> None:
        left, middle, right = axes
        for name, label in (("ess", "effective sample size"), ("ratio_mean", "ratio, mean")):
            left.plot(ages, [of_age[age][name] for age in ages], "o-", label=label)
        left.set(xlabel="age [steps]", title="off-policy drift by age, ours")
        left.legend(fontsize=8)
        middle.plot(ages, [of_age[age]["clip_fraction"] for age in ages], "o-")
        middle.set(xlabel="age [steps]", title="share of tokens whose gradient the clip removed")
        sweep = [arm.name for arm in SWEEPS if arm.name.startswith("tau-max-") and arm.name in arms]
        bounds = sorted([(int(name.rpartition("-")[2]), name) for name in sweep] + [(10, OURS)])
        for limit, name in bounds:
            _point(right, limit, arms[name], "tab:blue")
        if GRPO in arms:
            right.axhline(mean(arms[GRPO]["accuracy"]), color="black", linewidth=0.8, label="plain GRPO")
            right.legend(fontsize=8)
        right.set(xscale="log", xlabel="tau_max [steps]", title="held-out accuracy, 95 % interval over seeds")
        limits = [limit for limit, _ in bounds]
        right.set_xticks(limits, map(str, limits))
        right.minorticks_off()
        for axis in axes:
            axis.grid(alpha=0.3)

    _figure(path, draw, 3, (15, 4))


def _point(axis: Axes, x: float, arm: dict[str, Any], color: str) -> None:
    """The mean of an arm's accuracy and its interval."""
    axis.plot([x, x], arm["accuracy_ci95"], color=color, linewidth=1)
    axis.plot([x], [mean(arm["accuracy"])], "o", color=color, markersize=4)
