"""What the study compares: arms, as flags of the entry script, and how their learning rates are found."""

from __future__ import annotations

from dataclasses import dataclass

# beside examples/quickstart/flags.txt; every run has these
SETTING = (
    *("--tensor-model-parallel-size", "1", "--train-iters", "100", "--lr-decay-style", "linear"),
    *("--grpo-prompts-per-step", "16", "--grpo-group-size", "8"),
    *("--rl-replay-warmup-steps", "10", "--rl-replay-tau-max", "10", "--rl-replay-alpha", "0.5"),
    *("--rl-replay-ratio", "0.5", "--rl-replay-age-metrics"),
    *("--eval-prompts", "0", "--rl-log-rollouts-interval", "0", "--save-interval", "1000000"),
)
RATES = (2e-4, 3e-4, 4.5e-4, 7e-4, 1e-3)
TUNING_SEEDS = tuple(range(1001, 1007))
TEST_SEEDS = tuple(range(1, 17))
GRPO, OURS, TWO_EPOCHS = "grpo", "ours", "two-epochs"


@dataclass(frozen=True)
class Arm:
    """`flags` come behind the setting's. With `rate_of` the arm takes another's rate, and is not tuned itself."""

    name: str
    about: str
    flags: tuple[str, ...] = ()
    rate_of: str = ""


NO_REPLAY = ("--rl-replay-ratio", "0")
POOL = ("--rl-replay-composition", "pool")
EPOCHS = ("--grpo-iterations", "2")
# what the paper's table compares, and what a sceptic asks for
MAIN = (
    Arm(GRPO, "plain GRPO", NO_REPLAY),
    Arm("uniform-pool", "uniform draw, fresh and stored rollouts mixed", ("--rl-replay-priority", "uniform", *POOL)),
    Arm("group-std-pool", "by the group's std, mixed", ("--rl-replay-priority", "group-std", *POOL)),
    Arm("abs-advantage-pool", "by absolute advantage, mixed", POOL),
    Arm("uniform-anchored", "uniform draw beside the whole fresh batch", ("--rl-replay-priority", "uniform")),
    Arm("group-std-anchored", "by the group's std, beside the fresh batch", ("--rl-replay-priority", "group-std")),
    Arm(OURS, "by absolute advantage, beside the whole fresh batch"),
    Arm(TWO_EPOCHS, "GRPO, two updates on each fresh batch", (*NO_REPLAY, *EPOCHS)),
    Arm("fresh-1.5x", "GRPO with 1.5 times the fresh rollouts", (*NO_REPLAY, "--grpo-prompts-per-step", "24")),
    Arm("two-epochs-replay", "ours, two updates on each batch", EPOCHS),
)
SWEEPS = (
    Arm(
        "fresh-1.5x-short", "GRPO, 24 prompts a step, as many fresh rollouts in all as the others",
        (*NO_REPLAY, "--grpo-prompts-per-step", "24", "--train-iters", "67"), "fresh-1.5x",
    ),
    # for as many seconds as 100 steps with replay, which are known to some steps only (docs/study.md)
    *(Arm(f"grpo-{n}", f"GRPO, {n} steps", (*NO_REPLAY, "--train-iters", str(n)), GRPO) for n in (120, 125)),
    *(
        Arm(f"two-epochs-{n}", f"two updates on each fresh batch, {n} steps",
            (*NO_REPLAY, *EPOCHS, "--train-iters", str(n)), TWO_EPOCHS)
        for n in (116, 128)
    ),
    *(Arm(f"tau-max-{n}", f"ours, tau_max {n}", ("--rl-replay-tau-max", str(n)), OURS) for n in (1, 3, 30, 100)),
    *(Arm(f"ratio-{x}", f"ours, replay ratio {x}", ("--rl-replay-ratio", str(x)), OURS) for x in (0.25, 1.0)),
    *(Arm(f"alpha-{x}", f"ours, alpha {x}", ("--rl-replay-alpha", str(x)), OURS) for x in (1.0, 2.0)),
)  # fmt: skip
ARMS = {arm.name: arm for arm in (*MAIN, *SWEEPS)}
# what two arms have in common -> (a, b): what is asked of a - b
COMPARISONS = {
    "fresh rollouts": (
        *((OURS, arm.name) for arm in MAIN if arm.name not in (OURS, "fresh-1.5x")),
        *((arm.name, GRPO) for arm in MAIN if arm.name not in (GRPO, OURS, "fresh-1.5x")),
        ("two-epochs-replay", TWO_EPOCHS),
        (OURS, "fresh-1.5x-short"),
        *((arm.name, OURS) for arm in SWEEPS if arm.rate_of == OURS),
    ),
    "trained rollouts": ((OURS, "fresh-1.5x"), ("ratio-1.0", TWO_EPOCHS)),
    "processor seconds": (
        *((OURS, f"grpo-{n}") for n in (120, 125)),
        *(("two-epochs-replay", f"two-epochs-{n}") for n in (116, 128)),
    ),
}
# what can be counted of that: the numbers of an arm; seconds are too noisy
COSTS = {"fresh rollouts": "fresh_rollouts", "trained rollouts": "trained_tokens"}
PAIRS = tuple(pair for pairs in COMPARISONS.values() for pair in pairs)


def tuned() -> list[Arm]:
    """The arms that have a rate of their own."""
    return [arm for arm in ARMS.values() if not arm.rate_of]
