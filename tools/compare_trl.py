"""This project beside TRL: speed, memory and accuracy on the quickstart's task, the same everything else.

    python tools/compare_trl.py --json tools/baselines/compare_trl_cpu.json       # needs `make trl`
    python tools/compare_trl.py --json compare.json --steps 20 --warmup 5 --seeds 1 --arms ours trl

Each run is a process of its own with --threads threads: for each seed every arm trains --steps updates of the same
prompts, group size, response length, optimizer and rate. Then the weights that each has saved are measured on held-out
problems by tools/evaluate.py. Rates count rollouts that went through an update for each second of generation and update
after --warmup steps; docs/benchmarks.md has the definitions.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command_line import Parser
from benchmarks.environment import environment
from benchmarks.json_file import write_json
from comparing_trl.runs import accuracies, require_trl, train
from comparing_trl.setting import ADAM, ARMS, CLIP_HIGH, CLIP_LOW, RESPONSE, Setting
from comparing_trl.summary import of_arm, of_run, table
from studying.trial import EVALUATION_SEED, PROBLEMS, SAMPLES


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--json", type=Path, required=True, metavar="FILE", help="what the comparison came to")
    p.add_argument("--steps", type=int, default=100, metavar="N", help="updates of a run; default: 100")
    p.add_argument("--warmup", type=int, default=10, metavar="N", help="first steps that are not measured; default: 10")
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="default: 1 2 3")
    p.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM", help=f"of {', '.join(ARMS)}")
    p.add_argument("--lr", type=float, default=3e-4, metavar="X", help="of every arm; default: 3e-4, the quickstart's")
    p.add_argument("--arm-lr", nargs="+", default=[], metavar="ARM=X", help="another rate for an arm")
    p.add_argument("--prompts", type=int, default=16, metavar="N", help="of a step; default: 16")
    p.add_argument("--group-size", type=int, default=8, metavar="N", help="rollouts of a prompt; default: 8")
    p.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="default: all cores")
    p.add_argument("--problems", type=int, default=PROBLEMS, metavar="N", help=f"held out; default: {PROBLEMS}")
    p.add_argument("--samples", type=int, default=SAMPLES, metavar="K", help=f"of each; default: {SAMPLES}")
    args = p.parse_args(argv)
    for name, least in (("steps", 2), ("warmup", 1), ("prompts", 1), ("group_size", 2), ("threads", 1)):
        if getattr(args, name) < least:
            p.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    for name in ("problems", "samples"):
        if getattr(args, name) < 1:
            p.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.warmup >= args.steps:
        p.error(f"--warmup must be below --steps {args.steps}, got {args.warmup}")
    for flag, given in (("--seeds", args.seeds), ("--arms", args.arms)):
        if len(set(given)) < len(given):
            p.error(f"{flag} must give each once, got {' '.join(map(str, given))}")
    args.rates = rates(p, args)
    if not args.json.resolve().parent.is_dir():
        p.error(f"--json must be in a folder that exists, got {args.json}")
    return args


def rates(p: Parser, args: argparse.Namespace) -> dict[str, float]:
    found = dict.fromkeys(args.arms, args.lr)
    for given in args.arm_lr:
        arm, _, rate = given.partition("=")
        try:
            value = float(rate)
        except ValueError:
            value = 0.0
        if arm not in found or not 0 < value < math.inf:
            p.error(f"--arm-lr must be ARM=X with an arm that runs and a positive rate, got {given!r}")
        found[arm] = value
    if not 0 < args.lr < math.inf:
        p.error(f"--lr must be positive and finite, got {args.lr}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    try:
        if any(arm.startswith("trl") for arm in args.arms):
            require_trl()
        with tempfile.TemporaryDirectory(prefix="compare_trl") as folder:
            found = compare(args, Path(folder))
    except (ValueError, RuntimeError) as error:
        print(f"compare_trl.py: {error}", file=sys.stderr)
        return 1
    write_json(args.json, found)
    print(table({arm: found[arm] for arm in args.arms}, found["details"], args.steps - args.warmup))
    return 0


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that is written. Arms take turns seed by seed, so that what disturbs the machine disturbs all alike."""
    settings = [
        Setting(
            arm=arm, seed=seed, lr=args.rates[arm], steps=args.steps, warmup=args.warmup, prompts=args.prompts,
            group_size=args.group_size, threads=args.threads, folder=str(folder / f"{arm}_{seed}"),
        )
        for seed in args.seeds
        for arm in args.arms
    ]  # fmt: skip
    records, runs = [], []
    for number, setting in enumerate(settings, 1):
        began = time.perf_counter()
        records.append(train(setting))
        runs.append(of_run(records[-1], warmup=args.warmup, fresh=setting.rollouts))
        print(
            f"[{number}/{len(settings)}] {setting.arm}, seed {setting.seed}: "
            f"{runs[-1]['rollouts_per_second']:.0f} rollouts/s, reward {runs[-1]['reward_last']:.3f}, "
            f"{time.perf_counter() - began:.0f} s with its start",
            flush=True,
        )
    print(f"measuring {len(settings)} runs on {args.problems} held-out problems", flush=True)
    for run, accuracy in zip(runs, accuracies(settings, args.problems, args.samples), strict=True):
        run["accuracy"] = accuracy
    arms: dict[str, Any] = {}
    details: dict[str, Any] = {}
    for arm in args.arms:
        own = [i for i, s in enumerate(settings) if s.arm == arm]
        arms[arm], details[arm] = of_arm([runs[i] for i in own])
        extra = {"ties", "replayed_groups"} & records[own[0]].keys()
        details[arm] |= {
            "about": ARMS[arm],
            "lr": args.rates[arm],
            "seeds": args.seeds,
            "versions": records[own[0]]["versions"],
            "threads": records[own[0]]["threads"],
            **{name: [records[i][name] for i in own] for name in sorted(extra)},
        }
    return arms | {"details": details, "settings": settings_of(args), "environment": environment()}


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    names = ("steps", "warmup", "seeds", "prompts", "group_size", "threads", "problems", "samples")
    fixed = {"response_tokens": RESPONSE, "temperature": 1.0, "clip": [CLIP_LOW, CLIP_HIGH], "adam": ADAM}
    return {name: getattr(args, name) for name in names} | fixed | {"evaluation_seed": EVALUATION_SEED}


if __name__ == "__main__":
    sys.exit(main())
