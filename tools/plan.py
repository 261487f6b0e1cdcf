"""Say before a run whether it fits, how long a step takes at least, and what travels.

    python tools/plan.py --model qwen3-4b --nodes 2 --gpus-per-node 8 --tp 4 --pp 2 --bf16
    python tools/plan.py @my_flags.txt --nodes 4 --gpus-per-node 8

Takes every flag of examples/pretrain_replay_grpo.py in the same words, files of flags too, and those below. What is not
given is as in that script, or as DEFAULTS of this file. docs/planning.md has the formulas. Times are floors from
data-sheet numbers of an H100 SXM, no predictions. Exit code 1: it does not fit; 2: a flag is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from benchmarks.command_line import Parser
from benchmarks.json_file import write_json

from megatron_replay import arguments
from megatron_replay.planning.hardware import Hardware
from megatron_replay.planning.layout import Layout
from megatron_replay.planning.plan import make_plan
from megatron_replay.planning.presets import PRESETS, model_shape
from megatron_replay.planning.workload import workload
from megatron_replay.weight_sync.model_shape import ModelShape, layout_problems

# of the flags that a run must have; later ones win
DEFAULTS = [
    *("--run-dir", "none", "--train-iters", "1", "--lr", "1e-6", "--load-hf", "none"),
    *("--seq-length", "4096", "--rl-max-response-length", "3072"),
    *("--grpo-prompts-per-step", "128", "--grpo-group-size", "8"),
]
HARDWARE_HELP = {
    "gpu_memory_gb": "memory of a GPU, 10^9 bytes",
    "peak_tflops": "dense arithmetic of a GPU; default: 989 with --bf16, else 67",
    "hbm_gb_per_s": "memory bandwidth of a GPU",
    "nvlink_gb_per_s": "one direction, of a GPU",
    "network_gb_per_s": "between nodes, of a GPU",
    "headroom_gb": "assumption: kept free for CUDA, NCCL and a fragmented allocator",
}


def parser() -> Parser:
    p = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--model", help=f"{', '.join(PRESETS)}, or a folder with config.json; default: --load-hf")
    p.add_argument("--nodes", type=int, default=1, help="nodes that train")
    p.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of a node that train")
    p.add_argument("--tp", type=int, metavar="N", help="short for --tensor-model-parallel-size")
    p.add_argument("--pp", type=int, metavar="N", help="short for --pipeline-model-parallel-size")
    p.add_argument("--mean-prompt-length", type=int, metavar="N", help="tokens, for times; default: the longest")
    p.add_argument("--mean-response-length", type=int, metavar="N", help="tokens, for times; default: the longest")
    for f in fields(Hardware):
        default = "" if f.default is None else f" (default {f.default:g})"
        p.add_argument(_flag(f.name), type=float, default=f.default, metavar="X", help=HARDWARE_HELP[f.name] + default)
    p.add_argument("--json", type=Path, metavar="FILE", help="all numbers, in bytes and seconds")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    own, rest = p.parse_known_args(argv)
    for name in ("nodes", "gpus_per_node", "mean_prompt_length", "mean_response_length"):
        if (value := getattr(own, name)) is not None and value < 1:
            p.error(f"{_flag(name)} must be at least 1, got {value}")
    if own.json is not None and not own.json.resolve().parent.is_dir():
        p.error(f"--json must be in a folder that exists, got {str(own.json)!r}")
    for short, flag in ((own.tp, "--tensor-model-parallel-size"), (own.pp, "--pipeline-model-parallel-size")):
        if short is not None:
            rest += [flag, str(short)]
    args = arguments.parse_args([*DEFAULTS, *rest])
    prompt = own.mean_prompt_length or args.seq_length - args.rl_max_response_length
    response = own.mean_response_length or args.rl_max_response_length
    if prompt + response > args.seq_length:
        p.error(
            f"--mean-prompt-length and --mean-response-length must be at most --seq-length {args.seq_length} "
            f"together, got {prompt} and {response}"
        )
    try:
        hardware = Hardware(**{f.name: getattr(own, f.name) for f in fields(Hardware)})
    except ValueError as error:
        field, _, words = str(error).partition(" ")
        p.error(f"{_flag(field)} {words}")
    try:
        shape = _shape(own.model, args.load_hf)
        tensor, pipeline = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        # of the model first: it is what a size that divides no world either most often gets wrong
        for problem in layout_problems(shape, tensor, pipeline, sequence_parallel=args.sequence_parallel):
            raise ValueError(problem)
        layout = Layout.of(own.nodes * own.gpus_per_node, tensor, pipeline, own.gpus_per_node)
        if args.seq_length > shape.max_positions:
            raise ValueError(
                f"--seq-length must be at most the model's {shape.max_positions} positions, got {args.seq_length}"
            )
        job = workload(args, layout, mean_prompt_length=prompt, mean_response_length=response)
        plan = make_plan(shape, layout, job, hardware)
    except ValueError as error:
        p.error(str(error))
    print("\n".join(plan.lines()))
    if own.json is not None:
        write_json(own.json, plan.to_json())
    if plan.reason is not None:
        print(f"does not fit: {plan.reason}", file=sys.stderr)
        return 1
    return 0


def _shape(model: str | None, load_hf: str) -> ModelShape:
    if model is None and load_hf == "none":
        raise ValueError(f"--model must be one of {', '.join(PRESETS)}, or a folder with config.json, got nothing")
    return model_shape(model or load_hf)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    sys.exit(main())
