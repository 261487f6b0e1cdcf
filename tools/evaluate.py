"""Measure a checkpoint on benchmarks: avg@k, pass@k, lengths, with intervals, and against a baseline.

    evaluate.py --load-hf MODEL --benchmark MATH-500=math500.jsonl AIME25=aime25.jsonl --samples 8 --out DIR ...
    evaluate.py --load-hf BASE --load RUN/checkpoints --benchmark heldout=task:sort-digits --problems 256 --out DIR ...

Takes every flag of examples/pretrain_replay_grpo.py in the same words, files of flags too, and those below; flags that
are about training do nothing. --load takes the weights of a training checkpoint, on any layout. A model too large for
one process is spread over several: torchrun --nproc-per-node N tools/evaluate.py ... A second start with the same
--out goes on where the first one was stopped. DIR gets samples.jsonl, evaluation.json and pass_at_k.png; the table is
printed. docs/evaluation.md has the fields of a benchmark file and the equations. Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# it prepares megatron-core for a machine without CUDA
from convert_checkpoint import OneLine  # isort: skip

import torch.distributed as dist
from evaluating.evaluation import Evaluation

from megatron_replay import arguments
from megatron_replay.evaluation.accuracy_efficiency import AccuracyEfficiency
from megatron_replay.evaluation.benchmark_run import MOST_SAMPLES
from megatron_replay.evaluation.bootstrap import RESAMPLES
from megatron_replay.run.launcher import end_with_launcher
from megatron_replay.trainer.parallel import initialize, shutdown

# of the flags that a run must have; later ones win
DEFAULTS = [
    *("--run-dir", "none", "--train-iters", "1", "--lr", "0"),
    *("--grpo-prompts-per-step", "1", "--grpo-group-size", "2", "--eval-samples", "1"),
]
# nothing is trained, so no ratio is biased by it
ALWAYS = ["--rl-allow-truncated-sampling"]


def parser() -> OneLine:
    p = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument(
        "--benchmark", nargs="+", action="extend", required=True, metavar="NAME=SOURCE",
        help="SOURCE: a JSONL file, or task:sort-digits, task:reasoning-gym:NAME (their held-out problems)",
    )  # fmt: skip
    p.add_argument("--samples", type=int, default=8, metavar="K", help="of each problem; default: 8")
    p.add_argument("--problems", type=int, metavar="N", help="at most the first N of each benchmark; default: all")
    p.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the results")
    p.add_argument("--step", type=int, metavar="N", help="the iteration of --load to take; default: the latest")
    p.add_argument("--engine", choices=arguments.ENGINES, help="short for --rl-engine")
    p.add_argument("--correct-at", type=float, default=1.0, metavar="X", help="correct: a reward of at least X; 1")
    p.add_argument("--keep-text", action="store_true", help="write the text of each response to samples.jsonl")
    p.add_argument(
        "--chunk", type=int, metavar="N",
        help="problems that are sampled, judged and written at once; default: what fills the engine",
    )  # fmt: skip
    p.add_argument("--resamples", type=int, default=RESAMPLES, metavar="N", help=f"of an interval; {RESAMPLES}")
    p.add_argument("--baseline", type=Path, metavar="FILE", help="evaluation.json to be held against")
    for name in ("alpha", "beta", "gamma"):
        default = getattr(AccuracyEfficiency(), name)
        words = f"{name} of the accuracy-efficiency score; default: {default:g}"
        p.add_argument(f"--aes-{name}", type=float, default=default, metavar="X", help=words)
    p.add_argument("--json", type=Path, metavar="FILE", help="write evaluation.json there too")
    return p


def parse(p: OneLine, argv: Sequence[str] | None) -> tuple[argparse.Namespace, argparse.Namespace]:
    """The flags of this program, and the trainer's."""
    own, rest = p.parse_known_args(argv)
    for name in ("samples", "problems", "chunk", "resamples"):
        if (value := getattr(own, name)) is not None and value < 1:
            p.error(f"--{name} must be at least 1, got {value}")
    if own.samples > MOST_SAMPLES:
        p.error(f"--samples must be at most {MOST_SAMPLES}, got {own.samples}")
    if not math.isfinite(own.correct_at):
        p.error(f"--correct-at must be finite, got {own.correct_at}")
    if own.json is not None and not own.json.resolve().parent.is_dir():
        p.error(f"--json must be in a folder that exists, got {str(own.json)!r}")
    engine = [] if own.engine is None else ["--rl-engine", own.engine]
    args = arguments.parse_args([*DEFAULTS, *rest, *engine, *ALWAYS])
    args.run_dir, args.save_hf = str(own.out), None
    if own.step is not None and not args.load:
        p.error(f"--step must be given with --load, got {own.step} alone")
    if args.rl_engine == "vllm-server" and args.rl_vllm_max_num_seqs < own.samples:
        p.error(f"--rl-vllm-max-num-seqs must hold --samples {own.samples}, got {args.rl_vllm_max_num_seqs}")
    return own, args


def main(argv: Sequence[str] | None = None) -> int:
    end_with_launcher()
    p = parser()
    own, args = parse(p, argv)
    # what megatron-core means to replace one day is no concern of who evaluates
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
    try:
        groups = initialize(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            seed=args.seed,
            timeout_minutes=args.distributed_timeout_minutes,
        )
        evaluation = Evaluation(own, args, groups)
    except (ValueError, OSError) as error:
        p.error(str(error))
    if dist.get_rank() == 0:
        for said in (b.report for b in evaluation.benchmarks.values() if b.report):
            print(said, file=sys.stderr, flush=True)
    try:
        evaluation.sample()
        evaluation.write()
    finally:
        evaluation.close()
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
