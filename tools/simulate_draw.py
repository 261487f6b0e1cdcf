"""Simulate the draw over many data-parallel ranks on one machine: bytes, rounds, modelled time, balance of tokens.

    python tools/simulate_draw.py --ranks 1024 --rollouts 30000 --drawn 8192 --json draw.json

Keys are the product's own. Each form of the exchange runs on the real shards, its messages are built and read, and its
winners are held to those of one machine that holds everything; where they differ, the exit code is 1. Bytes are
counted; the time of the network is an alpha-beta model whose constants are flags; the time of the selection is
measured here. Every list flag takes several values, and all combinations run. docs/scaling.md explains the columns.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch
from benchmarks.command_line import Parser
from benchmarks.environment import environment
from benchmarks.json_file import write_json
from simulation.exchange import BINS
from simulation.measure import Law, Setting, measure
from simulation.network import Link
from simulation.picture import draw as draw_picture
from simulation.stored import LAYOUTS, LengthLaw
from simulation.table import BALANCE, EXCHANGE, table

# nominal figures of one 400 Gb/s InfiniBand port for each H100, and a guess at a step between nodes
ALPHA_US = 5.0
GBIT_PER_S = 400.0


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    p = Parser(
        prog="simulate_draw.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    p.add_argument("--ranks", type=int, nargs="+", default=[1024], metavar="R", help="default: 1024")
    p.add_argument("--rollouts", type=int, nargs="+", default=[30000], metavar="N", help="stored; default: 30000")
    p.add_argument("--drawn", type=int, nargs="+", default=[8192], metavar="n", help="default: 8192")
    p.add_argument("--shards", nargs="+", choices=LAYOUTS, default=["even"], help="who holds what; default: even")
    p.add_argument("--seeds", type=int, default=20, metavar="S", help="draws of each setting; default: 20")
    p.add_argument("--bins", type=int, default=BINS, metavar="B", help=f"of the histogram; default: {BINS}")
    p.add_argument("--alpha", type=float, default=0.5, metavar="A", help="priority (|A| + 1e-6)^alpha; default: 0.5")
    p.add_argument("--replay-ratio", type=float, default=0.5, metavar="X", help="drawn per fresh one; default: 0.5")
    p.add_argument(
        "--informative", type=float, default=0.5, metavar="X", help="share of groups with variance; default: 0.5"
    )
    p.add_argument("--length-median", type=float, default=2048.0, metavar="T", help="tokens; default: 2048")
    p.add_argument("--length-sigma", type=float, default=1.0, metavar="X", help="of log length; default: 1")
    p.add_argument("--length-max", type=int, default=32768, metavar="T", help="tokens; default: 32768")
    p.add_argument(
        "--latency-us", type=float, default=ALPHA_US, metavar="X", help=f"a step, an assumption; default: {ALPHA_US:g}"
    )
    p.add_argument(
        "--gbit-per-s",
        type=float,
        default=GBIT_PER_S,
        metavar="X",
        help=f"bandwidth of a rank each way, an assumption; default: {GBIT_PER_S:g}",
    )
    p.add_argument("--json", type=Path, metavar="FILE", help="all numbers")
    p.add_argument("--picture", type=Path, metavar="FILE", help="bytes and modelled time against ranks, as PNG")
    args = p.parse_args(argv)
    for name in ("ranks", "rollouts", "drawn"):
        for value in getattr(args, name):
            if value < 1:
                p.error(f"--{name} must be at least 1, got {value}")
    for name in ("seeds", "bins", "length_max"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("replay_ratio", "length_median", "gbit_per_s"):
        if not 0 < getattr(args, name) < math.inf:
            p.error(f"--{name.replace('_', '-')} must be above 0 and finite, got {getattr(args, name)}")
    if not 0 < args.informative <= 1:
        p.error(f"--informative must be in (0, 1], got {args.informative}")
    for name in ("alpha", "length_sigma", "latency_us"):
        if not 0 <= getattr(args, name) < math.inf:
            p.error(f"--{name.replace('_', '-')} must be at least 0 and finite, got {getattr(args, name)}")
    for flag, path in (("--json", args.json), ("--picture", args.picture)):
        if path is not None and (path.is_dir() or not path.resolve().parent.is_dir()):
            p.error(f"{flag} must be a file in a folder that exists, got {path}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    torch.set_num_threads(1)
    law = Law(
        seeds=args.seeds,
        alpha=args.alpha,
        informative=args.informative,
        lengths=LengthLaw(args.length_median, args.length_sigma, args.length_max),
        replay_ratio=args.replay_ratio,
        bins=args.bins,
        link=Link(args.latency_us * 1e-6, args.gbit_per_s * 1e9 / 8),
    )
    exchange, balance = [], []
    for setting in (Setting(*x) for x in product(args.ranks, args.rollouts, args.drawn, args.shards)):
        try:
            forms, rules = measure(setting, law)
        except RuntimeError as error:
            print(f"simulate_draw.py: {error}", file=sys.stderr)
            return 1
        exchange += forms
        balance += rules
        print(f"{setting}: all forms find the winners of one machine, {args.seeds} seeds", flush=True)
    print(f"\n{table(exchange, EXCHANGE)}\n\n{table(balance, BALANCE)}")
    if args.json is not None:
        flags = {k: v for k, v in vars(args).items() if k not in ("json", "picture")}
        data = environment() | {"flags": flags, "exchange": exchange, "balance": balance}
        write_json(args.json, data)
    if args.picture is not None:
        draw_picture(exchange, args.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
