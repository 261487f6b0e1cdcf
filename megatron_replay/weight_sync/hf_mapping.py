"""One table between Megatron's parameter names and Hugging Face's, read in both directions.

Each rule names a Megatron parameter, the Hugging Face tensors it is made of, and how: `copy`, `vocab` (rows
padded to the sharded vocabulary), `qkv` (query heads, key and value interleaved by query group) or `gate_up`
(the gate's rows above the up projection's). `shard_dim` is the tensor-parallel dimension, None: replicated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_replay.weight_sync.model_shape import ModelShape

Kind = Literal["copy", "vocab", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    megatron: str
    hf: tuple[str, ...]
    kind: Kind = "copy"
    shard_dim: int | None = None


_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."
QWEN3: tuple[Rule, ...] = (
    Rule("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), "vocab", 0),
    Rule(_LAYER + "input_layernorm.weight", (_HF + "input_layernorm.weight",)),
    Rule(
        _LAYER + "self_attention.linear_qkv.weight",
        tuple(_HF + f"self_attn.{x}_proj.weight" for x in "qkv"),
        "qkv",
        0,
    ),
    Rule(_LAYER + "self_attention.q_layernorm.weight", (_HF + "self_attn.q_norm.weight",)),
    Rule(_LAYER + "self_attention.k_layernorm.weight", (_HF + "self_attn.k_norm.weight",)),
    Rule(_LAYER + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",), shard_dim=1),
    Rule(_LAYER + "pre_mlp_layernorm.weight", (_HF + "post_attention_layernorm.weight",)),
    Rule(
        _LAYER + "mlp.linear_fc1.weight",
        (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"),
        "gate_up",
        0,
    ),
    Rule(_LAYER + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",), shard_dim=1),
    Rule("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Rule("output_layer.weight", ("lm_head.weight",), "vocab", 0),
)
RULES = {"qwen3": QWEN3}

# Transformer Engine fuses a norm into the linear layer that follows it.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def find_rule(name: str, shape: ModelShape) -> tuple[Rule, tuple[str, ...]]:
    """The rule of a Megatron parameter (global layer number in its name) and its Hugging Face names.

    Raises KeyError for a parameter that no rule covers.
    """
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(fused, plain)
    layer = re.search(r"decoder\.layers\.(\d+)\.", name)
    number = layer[1] if layer else ""
    for rule in RULES[shape.family]:
        if rule.megatron.format(layer=number) == name:
            hf = rule.hf
            if name == "output_layer.weight" and shape.tied_embeddings:
                hf = ("model.embed_tokens.weight",)
            return rule, tuple(x.format(layer=number) for x in hf)
    raise KeyError(f"no {shape.family} rule covers the parameter {name}")


def hf_names(shape: ModelShape) -> set[str]:
    """Every Hugging Face tensor of a model, each once; tied embeddings have no lm_head."""
    names = {
        hf.format(layer=layer) for rule in RULES[shape.family] for hf in rule.hf for layer in range(shape.num_layers)
    }
    return names - {"lm_head.weight"} if shape.tied_embeddings else names


def to_megatron(
    name: str,
    read: Callable[[str], Tensor],
    shape: ModelShape,
    *,
    padded_vocab: int,
    tensor_rank: int = 0,
    tensor_size: int = 1,
) -> Tensor:
    """This tensor-parallel rank's shard of one Megatron parameter, made from the tensors that `read` returns."""
    rule, sources = find_rule(name, shape)
    parts = [read(x) for x in sources]
    return shard(rule, merge(rule, parts, shape, padded_vocab), tensor_rank, tensor_size)


def to_hf(name: str, shards: Sequence[Tensor], shape: ModelShape) -> dict[str, Tensor]:
    """The full Hugging Face tensors of one Megatron parameter, from its shards in tensor-parallel order."""
    rule, targets = find_rule(name, shape)
    return dict(zip(targets, split(rule, unshard(rule, shards), shape), strict=True))


def merge(rule: Rule, parts: Sequence[Tensor], shape: ModelShape, padded_vocab: int) -> Tensor:
    """Hugging Face tensors -> the full Megatron tensor."""
    if rule.kind == "vocab":
        (weight,) = parts
        padding = weight.new_zeros(padded_vocab - weight.size(0), *weight.shape[1:])
        return torch.cat([weight, padding])
    if rule.kind == "qkv":
        groups = shape.num_kv_heads
        grouped = [x.view(groups, -1, x.size(-1)) for x in parts]  # [g, heads of the group * head_dim, H]
        return torch.cat(grouped, 1).flatten(0, 1)
    return torch.cat(list(parts)) if rule.kind == "gate_up" else parts[0]


def split(rule: Rule, full: Tensor, shape: ModelShape) -> list[Tensor]:
    """The full Megatron tensor -> Hugging Face tensors."""
    if rule.kind == "vocab":
        return [full[: shape.vocab_size]]
    if rule.kind == "qkv":
        groups, d = shape.num_kv_heads, shape.head_dim
        grouped = full.view(groups, -1, full.size(-1))
        sizes = [shape.num_heads // groups * d, d, d]
        return [x.flatten(0, 1) for x in grouped.split(sizes, 1)]
    return list(full.chunk(2)) if rule.kind == "gate_up" else [full]


def shard(rule: Rule, full: Tensor, rank: int, size: int) -> Tensor:
    """One tensor-parallel rank's part of a full Megatron tensor."""
    if rule.shard_dim is None or size == 1:
        return full
    pieces = full.chunk(2) if rule.kind == "gate_up" else [full]
    if any(x.size(rule.shard_dim) % size for x in pieces):
        raise ValueError(
            f"--tensor-model-parallel-size must divide dimension {rule.shard_dim} of {rule.megatron} "
            f"{list(full.shape)}, got {size}"
        )
    return torch.cat([x.chunk(size, rule.shard_dim)[rank] for x in pieces])


def unshard(rule: Rule, shards: Sequence[Tensor]) -> Tensor:
    """The full Megatron tensor from all shards in tensor-parallel order."""
    if rule.shard_dim is None or len(shards) == 1:
        return shards[0]
    if rule.kind == "gate_up":
        halves = [x.chunk(2) for x in shards]
        return torch.cat([*(gate for gate, _ in halves), *(up for _, up in halves)])
    return torch.cat(list(shards), rule.shard_dim)
