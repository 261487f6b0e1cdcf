"""Time and peak memory of the GRPO loss, forward and backward, against other ways to compute it.

Every implementation is held to a float64 truth first; one that does not agree gets no time, and the exit code is 1.
docs/benchmarks.md explains the columns.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from benchmarks import measure_cpu
from benchmarks.command_line import Parser
from benchmarks.environment import environment
from benchmarks.implementations import Settings
from benchmarks.picture import draw
from benchmarks.problem import Size
from benchmarks.report import MIB, Report

from megatron_replay.ops.launch import KERNELS, launch_config

VOCAB_SIZE = 151936  # Qwen3's
# by device and --quick; the help text shows them
DEFAULTS = {
    ("cpu", False): {"tokens": [2048], "vocab_size": VOCAB_SIZE, "hidden": 256, "repeats": 3, "logits_memory_mib": 64},
    ("cpu", True): {"tokens": [256], "vocab_size": 32000, "hidden": 64, "repeats": 3, "logits_memory_mib": 4},
    ("cuda", False): {
        "tokens": [4096, 8192, 32768],
        "vocab_size": VOCAB_SIZE,
        "hidden": 2560,
        "repeats": 20,
        "logits_memory_mib": 1024,
    },
    ("cuda", True): {
        "tokens": [8192],
        "vocab_size": VOCAB_SIZE,
        "hidden": 2560,
        "repeats": 5,
        "logits_memory_mib": 1024,
    },
}
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def parser() -> Parser:
    def default(name: str) -> str:
        values = [f"{d}{' --quick' if quick else ''} {row[name]}" for (d, quick), row in DEFAULTS.items()]
        return "default: " + ", ".join(values).replace("[", "").replace("]", "")

    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--device", required=True, choices=("cpu", "cuda"))
    p.add_argument("--quick", action="store_true", help="one size, fewer repeats")
    p.add_argument("--json", type=Path, metavar="FILE", help="all numbers; each row is written as it is finished")
    p.add_argument("--picture", type=Path, metavar="FILE", help="bars of time and peak memory, as PNG")
    p.add_argument("--tokens", type=int, nargs="+", metavar="T", help=default("tokens"))
    p.add_argument("--vocab-size", type=int, metavar="V", help=default("vocab_size"))
    p.add_argument("--hidden", type=int, metavar="H", help=default("hidden"))
    p.add_argument("--tp", type=int, nargs="+", metavar="N", help="measure one shard of N, on cuda; default: 1 8")
    p.add_argument("--repeats", type=int, metavar="N", help="timed calls of each, " + default("repeats"))
    p.add_argument(
        "--logits-memory-mib",
        type=int,
        metavar="N",
        help="logits of one chunk of linear_grpo_loss, " + default("logits_memory_mib"),
    )
    p.add_argument("--tune", action="store_true", help="also sweep launch configurations of the kernels, on cuda")
    return p


def arguments() -> tuple[argparse.Namespace, list[Size]]:
    p = parser()
    args = p.parse_args()
    if args.device == "cuda":
        if not torch.cuda.is_available():
            p.error("--device cuda needs a CUDA device, and torch finds none")
        if os.environ.get("TRITON_INTERPRET") == "1":
            p.error("--device cuda needs compiled kernels, got TRITON_INTERPRET=1")
    for flag, given in (("--tune", args.tune), ("--tp", args.tp)):
        if given and args.device != "cuda":
            p.error(f"{flag} needs --device cuda, got {args.device}")
    for name, value in DEFAULTS[args.device, args.quick].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.tp is None:
        args.tp = [1, 8] if args.device == "cuda" else [1]
    for name in ("repeats", "logits_memory_mib"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for flag, path in (("--json", args.json), ("--picture", args.picture)):
        if path is not None and not path.resolve().parent.is_dir():
            p.error(f"{flag} must be in a folder that exists, got {path}")
    try:
        dtype = DTYPES[args.device]
        return args, [Size(t, args.vocab_size, args.hidden, dtype, n) for n in args.tp for t in args.tokens]
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        p.error(f"--{field.replace('_', '-')} {rest}")


def main() -> int:
    args, sizes = arguments()
    settings = Settings(args.logits_memory_mib * MIB)
    header = environment() | {
        "quick": args.quick,
        "repeats": args.repeats,
        "logits_memory_bytes": settings.logits_memory,
    }
    report = Report(args.device, header, args.json)
    if args.device == "cpu":
        try:
            measure_cpu.check()
        except RuntimeError as error:
            parser().error(f"--device cpu: {error}")
        for size in sizes:
            measure_cpu.measure(size, settings, args.repeats, report)
    else:
        _cuda(sizes, settings, args, report)
    report.finish()
    print(report.table())
    if args.picture is not None:
        draw(report, args.picture)
    return 0 if report.passed else 1


def _cuda(sizes: list[Size], settings: Settings, args: argparse.Namespace, report: Report) -> None:
    # these import Triton, which a CPU need not have
    from benchmarks import measure_cuda, tuning

    device = torch.device("cuda")
    clock = measure_cuda.Clock(args.repeats)
    report.header["copy_bandwidth"] = measure_cuda.copy_bandwidth(clock)  # GB/s
    report.header["launch_configs"] = {name: asdict(launch_config(name, device)) for name in KERNELS}
    report.say(f"{report.header['card']}: a copy reaches {report.header['copy_bandwidth']:.0f} GB/s")
    measure_cuda.measure(sizes, settings, clock, report)
    if args.tune:
        tuning.tune(sizes, clock, report)


if __name__ == "__main__":
    sys.exit(main())
