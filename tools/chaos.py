"""Kill a training run again and again, resume it each time, and hold what comes out to a run that nobody killed.

    python tools/chaos.py --steps 300 --json chaos.json
    python tools/chaos.py --quick -- --grpo-prompts-per-step 8      # behind -- stand flags of the entry script

The quickstart runs once to its end. Then it runs again, and a random process of it, a trainer rank, the launcher or,
where vLLM samples, an engine's process, is ended with SIGKILL every --min-gap to --max-gap steps, at a random moment
of a step; --load resumes it from its last checkpoint. Then all of this must hold, or the exit code is 1:

every number of every row of metrics.jsonl is that of the uninterrupted run, bit for bit, but for the clock's (with vLLM
also but for engine/ and sync/, which count the restarts); so is summary.json. No process of a killed run lives longer
than --settle seconds. No file is left that the uninterrupted run does not have, and no segment in /dev/shm. The memory
of the ranks grows by at most --max-bytes-per-step, by the median slope (Theil-Sen) behind the first --memory-skip steps
of a process, in which buffer and allocator fill up; of a process with fewer than 10 steps more it is not fitted.

Ended by a signal it ends all that it started and removes its folder; the exit code is then 128 + the signal's number.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from benchmarks.command_line import Parser
from benchmarks.environment import environment
from benchmarks.json_file import write_json
from soak.life import ROOT, ChaosError
from soak.plan import plan
from soak.processes import adopt_orphans, end_all
from soak.soak import Settings, Soak

QUICKSTART = ROOT / "examples" / "quickstart" / "flags.txt"
ENGINES = ("embedded", "vllm-server", "vllm-colocated")
# by --quick; the help text shows them
DEFAULTS = {
    False: {"steps": 300, "min_gap": 20, "max_gap": 40, "save_interval": 10},
    True: {"steps": 14, "min_gap": 4, "max_gap": 5, "save_interval": 2},
}
OWN = (
    *("--run-dir", "--load", "--save", "--save-interval", "--train-iters", "--rl-engine"),
    *("--tensor-model-parallel-size", "--save-hf"),
)


class Interrupted(BaseException):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def parser() -> Parser:
    def default(name: str) -> str:
        return f"default: {DEFAULTS[False][name]}, --quick {DEFAULTS[True][name]}"

    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--quick", action="store_true", help="few steps, a small task")
    p.add_argument("--json", type=Path, metavar="FILE", help="all that was seen; written also where a run fails")
    p.add_argument("--steps", type=int, metavar="N", help="steps of either run, " + default("steps"))
    p.add_argument("--min-gap", type=int, metavar="N", help="fewest steps between two kills, " + default("min_gap"))
    p.add_argument("--max-gap", type=int, metavar="N", help="most steps between two kills, " + default("max_gap"))
    p.add_argument("--save-interval", type=int, metavar="N", help="steps of a checkpoint, " + default("save_interval"))
    p.add_argument("--seed", type=int, default=0, metavar="N", help="of the kills: when and what; default: 0")
    p.add_argument("--engine", default="embedded", choices=ENGINES, help="default: embedded")
    p.add_argument("--tp", type=int, default=2, metavar="N", help="tensor parallelism; default: 2")
    p.add_argument("--processes", type=int, metavar="N", help="trainer ranks; default: those of --tp")
    p.add_argument("--settle", type=float, default=45.0, metavar="S", help="seconds for a killed run to end; 45")
    p.add_argument("--stall-timeout", type=float, default=300.0, metavar="S", help="seconds without a step; 300")
    p.add_argument("--memory-skip", type=int, default=50, metavar="N", help="first steps not fitted, default: 50")
    p.add_argument("--max-bytes-per-step", type=float, default=65536.0, metavar="B", help="default: 65536")
    p.add_argument("--work-dir", type=Path, metavar="DIR", help="keep the runs in this new folder")
    p.add_argument("flags", nargs="*", metavar="-- FLAG", help="further flags of the entry script; they win")
    return p


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    p = parser()
    args = p.parse_args(argv)
    for name, value in DEFAULTS[args.quick].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.processes is None:
        args.processes = args.tp
    for name in ("save_interval", "tp", "settle", "stall_timeout"):
        if getattr(args, name) <= 0:
            p.error(f"--{name.replace('_', '-')} must be above 0, got {getattr(args, name):g}")
    if args.memory_skip < 0:
        p.error(f"--memory-skip must be at least 0, got {args.memory_skip}")
    if args.min_gap <= args.save_interval:
        p.error(f"--min-gap must be above --save-interval {args.save_interval}: a kill needs a checkpoint before it, "
                f"got {args.min_gap}")  # fmt: skip
    if args.max_gap < args.min_gap:
        p.error(f"--max-gap must be at least --min-gap {args.min_gap}, got {args.max_gap}")
    if args.steps <= args.max_gap + 1:
        p.error(f"--steps must be above --max-gap {args.max_gap} + 1, got {args.steps}")
    if args.processes < 1 or args.processes % args.tp:
        p.error(f"--processes must be a multiple of --tp {args.tp}, got {args.processes}")
    for flag in args.flags:
        if flag.partition("=")[0] in OWN:
            p.error(f"{flag.partition('=')[0]} is set by this program, got it behind --")
    if args.work_dir is not None and args.work_dir.exists():
        p.error(f"--work-dir must not exist, got {args.work_dir}")
    for flag, path in (("--json", args.json), ("--work-dir", args.work_dir)):
        if path is not None and not path.resolve().parent.is_dir():
            p.error(f"{flag} must be in a folder that exists, got {path}")
    return args


def settings(args: argparse.Namespace) -> Settings:
    flags = [f"@{QUICKSTART}", "--tensor-model-parallel-size", str(args.tp)]
    if args.quick:
        flags += ["--grpo-prompts-per-step", "8", "--grpo-group-size", "4", "--rl-replay-warmup-steps", "1"]
        flags += ["--rl-replay-tau-max", "3", "--eval-prompts", "16", "--eval-samples", "1"]
    if args.engine != "embedded":
        flags += ["--rl-vllm-memory-gib", "0.25", "--rl-vllm-startup-timeout", "400"]
    return Settings(
        steps=args.steps,
        save_interval=args.save_interval,
        engine=args.engine,
        processes=args.processes,
        flags=(*flags, *args.flags),
        settle=args.settle,
        stall_timeout=args.stall_timeout,
        memory_skip=args.memory_skip,
        most_bytes_per_step=args.max_bytes_per_step,
    )


def main() -> int:
    args = arguments()
    kinds = ("trainer", "launcher") if args.engine == "embedded" else ("trainer", "launcher", "engine")
    kills = plan(args.steps, args.min_gap, args.max_gap, kinds, args.seed)
    header = environment() | {"seed": args.seed, "quick": args.quick, "gap": [args.min_gap, args.max_gap]}
    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _interrupt)
    keep = args.work_dir is not None
    if keep:
        args.work_dir.mkdir()
    folder = args.work_dir.resolve() if keep else Path(tempfile.mkdtemp(prefix="chaos-"))
    soak = Soak(settings(args), kills, folder)
    try:
        try:
            soak.run()
        except ChaosError as error:
            soak.problems.append(str(error))
        finally:
            _without_signals()
            end_all()
    except Interrupted as ended:
        print(f"chaos.py: ended by {signal.Signals(ended.number).name}", file=sys.stderr)
        shutil.rmtree(folder)
        return 128 + ended.number
    if args.json is not None:
        write_json(args.json, header | soak.data())
    return _verdict(soak, keep)


def _verdict(soak: Soak, keep: bool) -> int:
    if not soak.problems:
        slopes = [x["bytes_per_step"] for x in soak.memory["uninterrupted"].values()]
        grown = "not fitted, a run is too short" if None in slopes else f"{max(slopes):.0f} bytes per step"
        print(f"passed: {len(soak.events)} kills, {soak.rows} rows equal, nothing left; growth of memory: {grown}")
        if not keep:
            shutil.rmtree(soak.folder)
        return 0
    print(f"FAILED: {'; '.join(soak.problems)}; see {soak.folder}")
    return 1


def _interrupt(number: int, frame: object) -> NoReturn:
    _without_signals()
    raise Interrupted(number)


def _without_signals() -> None:
    """A second signal must not cut the cleaning short."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
