"""The model that is pushed: a folder with random weights, and the shards that a trainer rank holds of it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_replay.weight_sync.hf_mapping import (
    EMBEDDING,
    find_rule,
    hf_shapes,
    megatron_names,
    megatron_shape,
    shard,
    to_megatron,
)
from megatron_replay.weight_sync.model_shape import ModelShape

DTYPE = torch.bfloat16
VOCAB_DIVISIBLE_BY = 128
WEIGHTS = "model.safetensors"
STD = 0.02
# random numbers that are drawn; a prime, so that no two rows of a weight repeat them at the same place
DRAWN = 1_000_003

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def _config(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> dict[str, Any]:
    return _COMMON | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
    }


# 0.6b: the shape of Qwen3-0.6B
MODELS = {
    "0.6b": _config(151936, 1024, 28, 16, 8, 128, 3072),
    "tiny": _config(320, 64, 2, 4, 2, 32, 128),
}


@dataclass(frozen=True)
class TrainerLayout:
    """Pipeline stages of equal size, each sharded over `tensor_size` ranks; rank r is number r % tensor_size of its
    stage."""

    name: str
    tensor_size: int
    stages: int

    @property
    def ranks(self) -> int:
        return self.tensor_size * self.stages


LAYOUTS = {x.name: x for x in (TrainerLayout(n, t, p) for n, t, p in (("TP1", 1, 1), ("TP2", 2, 1), ("PP2", 1, 2)))}
LAYOUTS["TP2xPP2"] = TrainerLayout("TP2xPP2", 2, 2)


def write_model(name: str, folder: Path) -> ModelShape:
    """Write config.json and the random weights of a model; what Megatron and vLLM read is the same file."""
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    shape = ModelShape.from_folder(folder)
    torch.manual_seed(0)
    drawn = (STD * torch.randn(DRAWN)).to(DTYPE)
    tensors = {
        name: torch.ones(dims, dtype=DTYPE) if len(dims) == 1 else _filled(dims, drawn.roll(7919 * i))
        for i, (name, dims) in enumerate(hf_shapes(shape).items())
    }
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return shape


def padded_vocab(shape: ModelShape) -> int:
    return shape.padded_vocab_size(VOCAB_DIVISIBLE_BY, 1)


def total_bytes(shape: ModelShape) -> int:
    """Of the whole model as the trainer holds it, padding of the vocabulary included."""
    return sum(math.prod(megatron_shape(n, shape, padded_vocab(shape))) for n in megatron_names(shape)) * DTYPE.itemsize


def load_shards(folder: Path, shape: ModelShape, layout: TrainerLayout, rank: int, memory: Tensor) -> dict[str, Tensor]:
    """The parameters of one rank of a layout, put one after the other into `memory` [bytes] uint8."""
    stage, tensor_rank = divmod(rank, layout.tensor_size)
    parameters: dict[str, Tensor] = {}
    at = 0
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        for name in _stage_names(shape, layout, stage):
            given = to_megatron(
                name,
                file.get_tensor,
                shape,
                padded_vocab=padded_vocab(shape),
                tensor_rank=tensor_rank,
                tensor_size=layout.tensor_size,
            )
            place = memory[at : at + given.nbytes].view(DTYPE).view(given.shape)
            parameters[name] = place.copy_(given)
            at += given.nbytes
    return parameters


def shard_bytes(shape: ModelShape, layout: TrainerLayout, rank: int) -> int:
    """What `load_shards` puts into memory."""
    stage, tensor_rank = divmod(rank, layout.tensor_size)
    total = 0
    for name in _stage_names(shape, layout, stage):
        full = torch.empty(megatron_shape(name, shape, padded_vocab(shape)), device="meta", dtype=DTYPE)
        total += shard(find_rule(name, shape)[0], full, tensor_rank, layout.tensor_size).nbytes
    return total


def _stage_names(shape: ModelShape, layout: TrainerLayout, stage: int) -> list[str]:
    """The parameters of a stage; the last one's copy of a tied embedding is never sent and so is left out."""
    per_stage = shape.num_layers // layout.stages

    def stage_of(name: str) -> int:
        if name.startswith("decoder.layers."):
            return int(name.split(".")[2]) // per_stage
        return 0 if name == EMBEDDING.megatron else layout.stages - 1

    return [name for name in megatron_names(shape) if stage_of(name) == stage]


def _filled(dims: tuple[int, ...], drawn: Tensor) -> Tensor:
    """The drawn numbers over and over."""
    out = torch.empty(dims, dtype=DTYPE)
    flat = out.view(-1)
    whole = flat.numel() // DRAWN * DRAWN
    flat[:whole].view(-1, DRAWN).copy_(drawn)
    flat[whole:].copy_(drawn[: flat.numel() - whole])
    return out
