"""One-process Megatron for tests: process groups of one rank, and a tiny random Qwen3 checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from megatron_replay.trainer import cpu

cpu.install()

from megatron_replay.config import ModelOptions, OptimizerOptions
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.trainer.forward_step import HeadOptions
from megatron_replay.trainer.hf_checkpoint import load_hf_weights
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.optimizer import wrap_for_training
from megatron_replay.trainer.parallel import ParallelGroups, initialize
from megatron_replay.trainer.policy import MegatronPolicy
from megatron_replay.weight_sync.model_shape import ModelShape

VOCAB = 29
SEQ_LENGTH = 64


@functools.cache
def groups() -> ParallelGroups:
    return initialize(1, 1, seed=1)


def random_qwen3(folder: Path, *, tied: bool = True, seed: int = 0, **changes: int) -> Path:
    """Save a random Qwen3 with head_dim != hidden / heads, norms away from 1, through transformers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        **(sizes | {"head_dim": 16, "intermediate_size": 80, "vocab_size": VOCAB} | changes),
        max_position_embeddings=SEQ_LENGTH,
        tie_word_embeddings=tied,
        rope_theta=10_000.0,
        rms_norm_eps=1e-6,
    )
    model = Qwen3ForCausalLM(config).float()
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            parameter.uniform_(0.5, 1.5) if "norm" in name else parameter.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def policy(
    folder: Path,
    loss: GrpoLossOptions | None = None,
    *,
    lr: float = 1e-3,
    bin_tokens: int = 128,
    backend: str | None = None,
    adam: dict[str, Any] | None = None,
    **model: object,
) -> MegatronPolicy:
    """A TP1 PP1 policy with the weights of `folder`; `adam` are more of the optimizer's options."""
    shape = ModelShape.from_folder(folder)
    net = build_model(shape, ModelOptions(make_vocab_size_divisible_by=8, **model), groups(), SEQ_LENGTH)
    load_hf_weights(net, folder, shape, groups())
    ddp, optimizer, scheduler = wrap_for_training(
        net, OptimizerOptions(**{"lr": lr, "total_updates": 100, "lr_decay_style": "linear"} | (adam or {}))
    )
    head = HeadOptions(
        loss=loss or GrpoLossOptions(),
        vocab_size=shape.vocab_size,
        temperature=1.0,
        # 32 rows of float32: a row of up to 64 columns takes 64
        logits_memory_bytes=32 * 64 * 4,
        age_buckets=11,
        backend=backend,
    )
    return MegatronPolicy(ddp, optimizer, scheduler, groups(), head, bin_tokens=bin_tokens, age_metrics=True)
