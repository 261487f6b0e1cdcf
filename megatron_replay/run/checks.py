"""What can only be checked once the model, the tokenizer and the layout are known. Every error names a flag."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron_replay import arguments
from megatron_replay.ops import backend as backends
from megatron_replay.tokenizer import Tokenizer
from megatron_replay.weight_sync.model_shape import ModelShape


def check(
    args: argparse.Namespace, shape: ModelShape, tokenizer: Tokenizer, device: torch.device, data_parallel: int
) -> None:
    """Raises ValueError for the first problem. `data_parallel` is the number of data-parallel ranks."""
    for problem in flag_problems(args, shape, tokenizer, data_parallel):
        raise ValueError(problem)
    for op in ("token_logprob", "grpo_loss"):
        try:
            backends.resolve(op, arguments.kernel_backend(args), device)
        except RuntimeError as error:
            needs = f"--rl-kernel-backend must be one that runs here, got {args.rl_kernel_backend}"
            raise ValueError(f"{needs} ({error})") from error


def flag_problems(
    args: argparse.Namespace, shape: ModelShape | None, tokenizer: Tokenizer | None, data_parallel: int | None
) -> Iterator[str]:
    """What no flag shows alone; what is not known (None) is left out."""
    if shape is not None and args.seq_length > shape.max_positions:
        yield f"--seq-length must be at most the model's {shape.max_positions} positions, got {args.seq_length}"
    if shape is not None and tokenizer is not None and tokenizer.vocab_size > shape.vocab_size:
        yield (
            f"--tokenizer-model must fit the model's vocabulary of {shape.vocab_size}, got {tokenizer.vocab_size} ids"
        )
    if data_parallel is not None and args.grpo_prompts_per_step % data_parallel:
        yield (
            f"--grpo-prompts-per-step must be a multiple of the {data_parallel} data-parallel ranks, "
            f"got {args.grpo_prompts_per_step}"
        )
    if args.save_hf and Path(args.save_hf).exists():
        yield f"--save-hf must name a folder that does not exist, got {args.save_hf!r}"
