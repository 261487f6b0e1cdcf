"""Time of the replay buffer's operations against other replay buffers, and against torch.multinomial.

Every implementation is held to the distribution that it claims first; one that draws from another gets no time, and
the exit code is 1. docs/benchmarks.md explains the operations.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from benchmarks.buffer.measure import CALLS, measure, nothing
from benchmarks.buffer.report import Report
from benchmarks.buffer.roster import add_installed, available
from benchmarks.buffer.stock import BufferSize
from benchmarks.command_line import Parser
from benchmarks.environment import environment
from benchmarks.host_memory import host_memory

# by device and --quick; the help text shows them
DEFAULTS = {
    ("cpu", False): {"rollouts": [30_000, 1_000_000], "tokens_per_rollout": [64, 16], "drawn": 1024, "repeats": 9},
    ("cpu", True): {"rollouts": [3000, 30_000], "tokens_per_rollout": [64], "drawn": 256, "repeats": 5},
    ("cuda", False): {
        "rollouts": [30_000, 30_000, 1_000_000],
        "tokens_per_rollout": [64, 2048, 64],
        "drawn": 1024,
        "repeats": 20,
    },
    ("cuda", True): {"rollouts": [30_000, 30_000], "tokens_per_rollout": [64, 2048], "drawn": 1024, "repeats": 5},
}
SEED = 1234


def parser() -> Parser:
    def default(name: str) -> str:
        values = [f"{d}{' --quick' if quick else ''} {row[name]}" for (d, quick), row in DEFAULTS.items()]
        return "default: " + "; ".join(values).replace("[", "").replace("]", "")

    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    p.add_argument("--quick", action="store_true", help="smaller sizes, fewer repeats")
    p.add_argument("--json", type=Path, metavar="FILE", help="all numbers; each row is written as it is finished")
    p.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads of torch and of this project, default: 1"
    )
    p.add_argument("--rollouts", type=int, nargs="+", metavar="N", help="stored rollouts, " + default("rollouts"))
    p.add_argument(
        "--tokens-per-rollout",
        type=int,
        nargs="+",
        metavar="L",
        help="one for all, or one for each of --rollouts; 64 where those are given, else "
        + default("tokens_per_rollout"),
    )
    p.add_argument("--drawn", type=int, metavar="N", help="rollouts of one draw, " + default("drawn"))
    p.add_argument("--repeats", type=int, metavar="N", help="timed turns of each, " + default("repeats"))
    return p


def arguments() -> tuple[argparse.Namespace, list[BufferSize]]:
    p = parser()
    args = p.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        p.error("--device cuda needs a CUDA device, and torch finds none")
    # the default lengths belong to the default sizes
    if args.rollouts is not None and args.tokens_per_rollout is None:
        args.tokens_per_rollout = [64]
    for name, value in DEFAULTS[args.device, args.quick].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    lengths = args.tokens_per_rollout
    if len(lengths) == 1:
        lengths = lengths * len(args.rollouts)
    if len(lengths) != len(args.rollouts):
        p.error(f"--tokens-per-rollout must be one, or one for each of {len(args.rollouts)} --rollouts, got {lengths}")
    for name in ("repeats", "threads"):
        if getattr(args, name) < 1:
            p.error(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        p.error(f"--json must be in a folder that exists, got {args.json}")
    try:
        return args, [BufferSize(n, args.drawn, L) for n, L in zip(args.rollouts, lengths, strict=True)]
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        p.error(f"--{field.replace('_', '-')} {rest}")


def main() -> int:
    args, sizes = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    device = torch.device(args.device)
    add_installed()
    header = environment() | {"quick": args.quick, "repeats": args.repeats, "calls_per_repeat": CALLS}
    report = Report(args.device, header, args.json)
    usable, report.skipped = available(device)
    for s in report.skipped:
        report.say(f"{s['implementation']}: not measured, {s['why']}")
    after_turns = nothing
    if device.type == "cuda":
        # it imports Triton, which a CPU need not have
        from benchmarks.buffer.device_time import DeviceTime

        after_turns = DeviceTime(args.repeats, device)
        header["copy_bandwidth"] = after_turns.large_copy_gb_per_s  # GB/s
    measure(sizes, usable, args.repeats, device, report, after_turns)
    header["peak_host_bytes"] = host_memory("VmHWM")
    report.finish()
    print(report.table())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
