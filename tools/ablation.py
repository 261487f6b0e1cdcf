"""The study: arms against each other over seeds, each at its best tried learning rate, as docs/study.md planned it.

    python tools/ablation.py --out runs/study --json docs/study.json --pictures docs/study
    python tools/ablation.py --quick --out /tmp/study --json study.json       # two arms, two seeds, a few steps

First every arm that is tuned runs at every rate on the tuning seeds; then each runs at its best rate on the test seeds.
Trials run side by side, one core each; a second start with the same --out goes on where the first one was stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command_line import Parser
from benchmarks.environment import environment
from benchmarks.json_file import write_json
from studying.arms import ARMS, COMPARISONS, COSTS, GRPO, OURS, RATES, TEST_SEEDS, TUNING_SEEDS, Arm, tuned
from studying.comparison import METRICS, arm_row, at_an_end, chosen_rates, cost_ratio, holm, paired
from studying.pictures import draw_pictures
from studying.table import markdown
from studying.trial import Trial
from studying.trials import perform_all

from megatron_replay.run.lock import RunLock

QUICK = (
    "--train-iters",
    "4",
    "--rl-replay-warmup-steps",
    "1",
    "--grpo-prompts-per-step",
    "8",
    "--grpo-group-size",
    "4",
)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="a record of each trial; kept and gone on with"
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="what the study came to")
    p.add_argument("--pictures", type=Path, metavar="DIR", help="curves, differences, ages, as PNG")
    p.add_argument("--arms", nargs="+", choices=ARMS, metavar="NAME", help=f"default: all; of {', '.join(ARMS)}")
    p.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="trials at a time; default: a core each",
    )
    p.add_argument("--tune-only", action="store_true", help="stop when the rates are known")
    p.add_argument("--quick", action="store_true", help="grpo and ours on two seeds, a few steps: does it run?")
    args = p.parse_args(argv)
    if args.workers < 1:
        p.error(f"--workers must be at least 1, got {args.workers}")
    for flag, path in (("--json", args.json), ("--pictures", args.pictures)):
        if path is not None and not path.resolve().parent.is_dir():
            p.error(f"{flag} must be in a folder that exists, got {path}")
    if args.quick and args.arms:
        p.error(f"--arms must not be given with --quick, got {' '.join(args.arms)}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    names = [GRPO, OURS] if args.quick else [n for n in ARMS if n in (args.arms or ARMS)]
    arms = [ARMS[name] for name in names]
    rates, tuning, test = (
        (RATES[1:3], TUNING_SEEDS[:1], TEST_SEEDS[:2]) if args.quick else (RATES, TUNING_SEEDS, TEST_SEEDS)
    )
    shorter = QUICK if args.quick else ()
    lock = RunLock()
    try:
        lock.take(args.out, "--out")
        to_tune = [arm for arm in tuned() if arm in arms or arm.name in {a.rate_of for a in arms}]
        tried = perform_all(
            [Trial(arm.name, rate, seed, shorter) for seed in tuning for arm in to_tune for rate in rates],
            args.out,
            args.workers,
        )
        best = chosen_rates(tried)
        print("\n".join(f"{arm}: rate {rate:g}" for arm, rate in best.items()))
        if ends := at_an_end(best, rates):
            print(f"at an end of the rates that were tried: {', '.join(ends)}")
        if args.tune_only:
            return 0
        trials = [Trial(arm.name, best[arm.rate_of or arm.name], seed, shorter) for seed in test for arm in arms]
        records = perform_all(trials, args.out, args.workers)
    except (ValueError, RuntimeError) as error:
        print(f"ablation.py: {error}", file=sys.stderr)
        return 1
    finally:
        lock.release()
    found = study(records, tried, arms)
    print(markdown(found))
    if args.json is not None:
        write_json(args.json, environment() | {"quick": args.quick, **found})
    if args.pictures is not None:
        args.pictures.mkdir(exist_ok=True)
        draw_pictures(found, args.pictures)
    return 0


def study(records: list, tried: list, arms: Sequence[Arm]) -> dict:
    """All that is written: arms, differences, and what was tried for the rates."""
    names = [arm.name for arm in arms]
    baseline = GRPO if GRPO in names else names[0]
    rows = []
    for metric in METRICS:
        family = [
            paired(records, a, b, metric) | {"equal": basis, "cost_ratio": cost_ratio(records, a, b, COSTS.get(basis))}
            for basis, pairs in COMPARISONS.items()
            for a, b in pairs
            if a in names and b in names
        ]
        rows += [row | {"p_holm": p} for row, p in zip(family, holm(family), strict=True)]
    return {
        "arms": [arm_row(records, name, baseline) | {"about": ARMS[name].about} for name in names],
        "paired": rows,
        # of the code that the runs had: commit -> runs
        "commits": dict(Counter(r.get("commit") or "not recorded" for r in records + tried)),
        "tuning": [
            {**{k: r["settings"][k] for k in ("arm", "rate", "seed")}, "accuracy": r["accuracy"]} for r in tried
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
