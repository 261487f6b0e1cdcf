"""Weights of a training checkpoint to a Hugging Face folder, and a Hugging Face folder to a torch_dist checkpoint.

    convert_checkpoint.py to-hf   --load-hf BASE --load RUN/checkpoints --save-hf OUT
    convert_checkpoint.py from-hf --load-hf BASE --save OUT

BASE is a Hugging Face folder of the same architecture: to-hf takes config and tokenizer from it, from-hf the weights.
from-hf writes OUT/iter_0000000/weights, which megatron-core's dist_checkpointing loads on any layout, and to-hf. A
model too large for one process is spread over several: torchrun --nproc-per-node N tools/convert_checkpoint.py ... with
--tensor-model-parallel-size and --pipeline-model-parallel-size. Exit code 2 for bad input.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

# megatron-core says on import, on every rank, which optional packages are absent
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).*(not installed|Falling back).*")

import torch
import torch.distributed as dist
from benchmarks.command_line import Parser

from megatron_replay.trainer import cpu

cpu.install()

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.models.gpt import GPTModel
from torch.distributed.checkpoint.api import CheckpointException

from megatron_replay.config import ModelOptions
from megatron_replay.trainer import checkpoint
from megatron_replay.trainer.hf_checkpoint import load_hf_weights, save_hf
from megatron_replay.trainer.manifest import check_manifest, write_manifest
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.parallel import ParallelGroups, initialize, shutdown
from megatron_replay.trainer.safe_load import nothing_is_run
from megatron_replay.weight_sync.model_shape import ModelShape

# a checkpoint of from-hf says so where a training checkpoint has its version: the trainer then refuses it by name
WEIGHTS_ONLY = "weights only"
DTYPES = {str(x).removeprefix("torch."): x for x in (torch.float32, torch.bfloat16)}


class OneLine(Parser):
    """Bad input is the same on every process of torchrun: the first one says it."""

    def error(self, message: str) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            super().error(message)
        sys.exit(2)


def parser() -> OneLine:
    p = OneLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    commands = p.add_subparsers(dest="command", required=True, metavar="{to-hf,from-hf}")
    to_hf = commands.add_parser("to-hf", help="training checkpoint -> Hugging Face folder", allow_abbrev=False)
    to_hf.add_argument("--load", type=Path, required=True, metavar="FOLDER", help="checkpoints of a run, or of from-hf")
    to_hf.add_argument("--step", type=int, metavar="N", help="the iteration to take; default: the latest")
    to_hf.add_argument("--save-hf", type=Path, required=True, metavar="FOLDER", help="must not exist")
    from_hf = commands.add_parser("from-hf", help="Hugging Face folder -> torch_dist checkpoint", allow_abbrev=False)
    from_hf.add_argument("--save", type=Path, required=True, metavar="FOLDER", help="must not exist")
    from_hf.add_argument(
        "--dtype", choices=DTYPES, help="of the written weights; default: what BASE's config.json says"
    )
    for command in (to_hf, from_hf):
        command.add_argument("--load-hf", type=Path, required=True, metavar="BASE", help="Hugging Face folder")
        command.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
        command.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
        command.add_argument(
            "--make-vocab-size-divisible-by", type=int, default=128, metavar="N", help="as in the run; default: 128"
        )
    return p


def build(args: argparse.Namespace, shape: ModelShape, dtype: torch.dtype, groups: ParallelGroups) -> GPTModel:
    options = ModelOptions(
        dtype=dtype,
        transformer_impl="local",
        make_vocab_size_divisible_by=args.make_vocab_size_divisible_by,
    )
    return build_model(shape, options, groups, max_sequence_length=shape.max_positions)


def to_hf(args: argparse.Namespace, shape: ModelShape) -> None:
    if args.save_hf.exists():
        raise ValueError(f"--save-hf must name a folder that does not exist, got {str(args.save_hf)!r}")
    iteration = find_iteration(args.load, args.step)
    run = read_run(iteration)
    check_sizes(run["model"], shape, iteration)
    dtype = DTYPES[run["model"]["dtype"].removeprefix("torch.")]
    groups = start(args)
    model = build(args, shape, dtype, groups)
    load_weights(model, iteration / "weights")
    save_hf(args.save_hf, model, shape, groups, base=args.load_hf)
    if dist.get_rank() == 0:
        print(f"{args.save_hf}: the weights after step {run['step']} of {args.load}")


def from_hf(args: argparse.Namespace, shape: ModelShape) -> None:
    if args.save.exists():
        raise ValueError(f"--save must name a folder that does not exist, got {str(args.save)!r}")
    dtype = DTYPES[args.dtype] if args.dtype else base_dtype(args.load_hf)
    groups = start(args)
    model = build(args, shape, dtype, groups)
    load_hf_weights(model, args.load_hf, shape, groups)
    partial = args.save.with_name(args.save.name + ".partial")
    iteration = partial / "iter_0000000"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (iteration / "weights").mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(sharded_weights(model), str(iteration / "weights"))
    dist.barrier()
    if dist.get_rank() == 0:
        run = {"format_version": WEIGHTS_ONLY, "step": 0, "model": sizes(shape) | {"dtype": str(dtype)}}
        (iteration / "run.json").write_text(json.dumps(run, indent=1))
    dist.barrier()
    write_manifest(iteration)
    if dist.get_rank() == 0:
        (partial / checkpoint.LATEST).write_text("0")
        partial.rename(args.save)
        print(f"{args.save}: {args.load_hf} in {dtype}")


def find_iteration(folder: Path, step: int | None) -> Path:
    """A complete iteration of a folder of checkpoints: one by its number, or the latest."""
    if step is None:
        return checkpoint.latest(folder)
    iteration = folder / f"iter_{step:07d}"
    if not iteration.is_dir():
        there = sorted(int(x.name[5:]) for x in folder.glob("iter_*") if x.name[5:].isdigit())
        raise ValueError(f"--step must be one of {there} of --load {folder}, got {step}")
    return iteration


def read_run(iteration: Path) -> dict[str, Any]:
    """run.json of an iteration whose format is known."""
    # the weights are what is wanted: a lost buffer shard does not matter here
    check_manifest(iteration, allow_empty_buffer=True)
    run: dict[str, Any] = json.loads((iteration / "run.json").read_text())
    known = (checkpoint.FORMAT_VERSION, WEIGHTS_ONLY)
    if run.get("format_version") not in known:
        raise ValueError(f"--load {iteration}: format_version must be one of {known}, got {run.get('format_version')}")
    return run


def sizes(shape: ModelShape) -> dict[str, int]:
    """What a checkpoint says of its model, under the names it has there."""
    return {
        "hidden_size": shape.hidden_size,
        "num_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_size,
        "vocab_size": shape.vocab_size,
    }


def check_sizes(saved: dict[str, Any], shape: ModelShape, iteration: Path) -> None:
    for name, value in sizes(shape).items():
        if saved.get(name) != value:
            raise ValueError(f"--load {iteration} is of another model: {name} {saved.get(name)}, --load-hf has {value}")


def base_dtype(folder: Path) -> torch.dtype:
    config = json.loads((folder / "config.json").read_text())
    name = config.get("dtype", config.get("torch_dtype"))
    if name not in DTYPES:
        raise ValueError(
            f"--dtype must be given (one of {', '.join(DTYPES)}), got dtype {name!r} in {folder}/config.json"
        )
    return DTYPES[name]


def start(args: argparse.Namespace) -> ParallelGroups:
    # the seed is of no account: no weight stays random
    return initialize(args.tensor_model_parallel_size, args.pipeline_model_parallel_size, seed=0)


def load_weights(model: GPTModel, folder: Path) -> None:
    """Weights of an iteration; nothing that its files hold is run. A ValueError names the folder."""
    try:
        with nothing_is_run(folder):
            state = dist_checkpointing.load(sharded_weights(model), str(folder))["model"]
        model.load_state_dict(state)
    except (Exception, CheckpointException) as error:
        if str(error).startswith("--load"):
            raise
        # whole files, by their checksums, of a model with other parameters; a CheckpointException quotes tracebacks
        said = str(error).strip().rpartition("\n")[2]
        raise ValueError(f"--load {folder} cannot be read: {type(error).__name__}: {said}") from error


def sharded_weights(model: GPTModel) -> dict[str, Any]:
    """Where a training checkpoint has the weights, without the optimizer beside them."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return {"model": model.sharded_state_dict(metadata={"dp_cp_group": group, "singleton_local_shards": False})}


def main(argv: Sequence[str] | None = None) -> int:
    p = parser()
    args = p.parse_args(argv)
    # what megatron-core means to replace one day is no concern of who converts
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch)\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(megatron|torch)\.")
    try:
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "make_vocab_size_divisible_by"):
            if getattr(args, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
        shape = ModelShape.from_folder(args.load_hf)
        (to_hf if args.command == "to-hf" else from_hf)(args, shape)
    except (ValueError, OSError) as error:
        p.error(str(error))
    shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
