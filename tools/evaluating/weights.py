"""The policy that is evaluated: a Hugging Face folder, or the weights of a training checkpoint, on any layout."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import Any

from convert_checkpoint import DTYPES, check_sizes, find_iteration, load_weights, read_run

from megatron_replay import arguments
from megatron_replay.trainer.frozen_policy import FrozenPolicy
from megatron_replay.trainer.hf_checkpoint import checkpoint_identity, load_hf_weights
from megatron_replay.trainer.manifest import MANIFEST
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.parallel import ParallelGroups, from_first_rank
from megatron_replay.weight_sync.model_shape import ModelShape


def find_weights(args: argparse.Namespace, step: int | None, shape: ModelShape) -> tuple[Path | None, int | None]:
    """(iteration, steps of training) of --load, whole by its manifest and of this model; (None, None) without."""
    if not args.load:
        return None, None
    iteration = find_iteration(Path(args.load), step)
    run = read_run(iteration)
    check_sizes(run["model"], shape, iteration)
    saved, asked = run["model"]["dtype"], arguments.model_options(args).dtype
    if DTYPES[saved.removeprefix("torch.")] != asked:
        raise ValueError(f"--load {iteration} holds {saved} weights: --bf16 must say the same, got {asked}")
    return iteration, run["step"]


def weights_identity(args: argparse.Namespace, iteration: Path | None) -> dict[str, Any]:
    """What was evaluated: flag -> SHA-256 of the weight files, or of the manifest that has theirs."""
    if iteration is None:
        digest = from_first_rank(lambda: checkpoint_identity(args.load_hf))
        return {"--load-hf (sha256 of its weights)": digest}
    digest = from_first_rank(lambda: hashlib.sha256((iteration / MANIFEST).read_bytes()).hexdigest())
    return {"--load (sha256 of its manifest)": digest}


def build_frozen(
    args: argparse.Namespace, shape: ModelShape, groups: ParallelGroups, iteration: Path | None
) -> FrozenPolicy:
    """Weights alone: neither gradients nor optimizer nor buffer are there."""
    model = build_model(shape, arguments.model_options(args), groups, args.seq_length)
    if iteration is None:
        load_hf_weights(model, args.load_hf, shape, groups)
        return FrozenPolicy.of(model, groups)
    load_weights(model, iteration / "weights")
    return FrozenPolicy.of(model, groups)
