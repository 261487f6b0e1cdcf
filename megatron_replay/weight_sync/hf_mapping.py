"""One table for each model family between Megatron's parameter names and Hugging Face's, read in both directions.

A rule names a Megatron parameter, the Hugging Face tensors it is made of with their symbolic dimensions, and how it
is made: `copy`, `vocab` (rows padded to the sharded vocabulary), `qkv` (query heads, key and value of the first query
group, then of the second, ...) or `gate_up` (the gate's rows above the up projection's). `shard_dim` is the
tensor-parallel dimension, None: replicated. Everything else here is derived from the tables.

Dims: vocab, hidden, ffn; head: of one head; q: all query heads; kv: all key (or all value) heads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_replay.weight_sync.model_shape import ModelShape

Kind = Literal["copy", "vocab", "qkv", "gate_up"]
Dim = Literal["vocab", "hidden", "ffn", "head", "q", "kv"]
HfTensor = tuple[str, tuple[Dim, ...]]
# (like, shape) -> uninitialized memory with the dtype and on the device of `like`
NewTensor = Callable[[Tensor, Sequence[int]], Tensor]


@dataclass(frozen=True)
class Rule:
    megatron: str
    hf: tuple[HfTensor, ...]
    kind: Kind = "copy"
    shard_dim: int | None = None


def _new_tensor(like: Tensor, shape: Sequence[int]) -> Tensor:
    return like.new_empty(tuple(shape))


_LAYER = "decoder.layers.{layer}."
_HF = "model.layers.{layer}."


def _layer_rule(megatron: str, *hf: HfTensor, kind: Kind = "copy", shard_dim: int | None = None) -> Rule:
    return Rule(_LAYER + megatron, tuple((_HF + name, dims) for name, dims in hf), kind, shard_dim)


EMBEDDING = Rule("embedding.word_embeddings.weight", (("model.embed_tokens.weight", ("vocab", "hidden")),), "vocab", 0)
FINAL_NORM = Rule("decoder.final_layernorm.weight", (("model.norm.weight", ("hidden",)),))
HEAD = Rule("output_layer.weight", (("lm_head.weight", ("vocab", "hidden")),), "vocab", 0)

_ATTENTION = (
    _layer_rule("input_layernorm.weight", ("input_layernorm.weight", ("hidden",))),
    _layer_rule(
        "self_attention.linear_qkv.weight",
        ("self_attn.q_proj.weight", ("q", "hidden")),
        ("self_attn.k_proj.weight", ("kv", "hidden")),
        ("self_attn.v_proj.weight", ("kv", "hidden")),
        kind="qkv",
        shard_dim=0,
    ),
    _layer_rule("self_attention.linear_proj.weight", ("self_attn.o_proj.weight", ("hidden", "q")), shard_dim=1),
)
_QKV_BIAS = (
    _layer_rule(
        "self_attention.linear_qkv.bias",
        ("self_attn.q_proj.bias", ("q",)),
        ("self_attn.k_proj.bias", ("kv",)),
        ("self_attn.v_proj.bias", ("kv",)),
        kind="qkv",
        shard_dim=0,
    ),
)
_QK_NORM = (
    _layer_rule("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight", ("head",))),
    _layer_rule("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight", ("head",))),
)
_MLP = (
    _layer_rule("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight", ("hidden",))),
    _layer_rule(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", ("ffn", "hidden")),
        ("mlp.up_proj.weight", ("ffn", "hidden")),
        kind="gate_up",
        shard_dim=0,
    ),
    _layer_rule("mlp.linear_fc2.weight", ("mlp.down_proj.weight", ("hidden", "ffn")), shard_dim=1),
)
# the rules of one layer
LAYER_RULES: dict[str, tuple[Rule, ...]] = {
    "qwen3": _ATTENTION + _QK_NORM + _MLP,
    "qwen2": _ATTENTION + _QKV_BIAS + _MLP,
    "llama": _ATTENTION + _MLP,
}

# Transformer Engine fuses a norm into the linear layer that follows it.
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def plain_name(name: str) -> str:
    """A Megatron parameter's name as the tables have it: a norm under its own name."""
    for fused, plain in FUSED_NORMS.items():
        name = name.replace(fused, plain)
    return name


def find_rule(name: str, shape: ModelShape) -> tuple[Rule, tuple[str, ...]]:
    """The rule of a Megatron parameter (global layer number in its name) and its Hugging Face names.

    With tied embeddings `output_layer.weight`, the copy of a last pipeline stage, is the embedding. Raises KeyError
    for a parameter that no rule covers.
    """
    plain = plain_name(name)
    layer = re.search(r"decoder\.layers\.(\d+)\.", plain)
    number = layer[1] if layer else ""
    for rule in (EMBEDDING, *LAYER_RULES[shape.family], FINAL_NORM, HEAD):
        if rule.megatron.format(layer=number) == plain and int(number or 0) < shape.num_layers:
            sources = EMBEDDING.hf if rule is HEAD and shape.tied_embeddings else rule.hf
            return rule, tuple(hf.format(layer=number) for hf, _ in sources)
    raise KeyError(f"no {shape.family} rule covers the parameter {name}")


def megatron_names(shape: ModelShape) -> list[str]:
    """Every Megatron parameter of a model, each once, from the embedding to the head (none where it is tied)."""
    return [rule.megatron.format(layer=layer) for rule, layer in _rules(shape)]


def hf_shapes(shape: ModelShape) -> dict[str, tuple[int, ...]]:
    """Every Hugging Face tensor of a model and its shape, from the embedding to the head (none where it is tied)."""
    return {
        name.format(layer=layer): tuple(_size(d, shape) for d in dims)
        for rule, layer in _rules(shape)
        for name, dims in rule.hf
    }


def hf_names(shape: ModelShape) -> set[str]:
    """Every Hugging Face tensor of a model; tied embeddings have no lm_head."""
    return set(hf_shapes(shape))


def megatron_shape(name: str, shape: ModelShape, padded_vocab: int) -> tuple[int, ...]:
    """The shape of one Megatron parameter over all its tensor-parallel shards."""
    rule, _ = find_rule(name, shape)
    first, *rest = (tuple(_size(d, shape) for d in dims) for _, dims in rule.hf)
    rows = padded_vocab if rule.kind == "vocab" else first[0] + sum(x[0] for x in rest)
    return (rows, *first[1:])


def to_megatron(
    name: str,
    read: Callable[[str], Tensor],
    shape: ModelShape,
    *,
    padded_vocab: int,
    tensor_rank: int = 0,
    tensor_size: int = 1,
) -> Tensor:
    """This tensor-parallel rank's shard of one Megatron parameter, made from the tensors that `read` returns.

    Raises ValueError naming a Hugging Face tensor whose shape is not that of `hf_shapes`.
    """
    rule, sources = find_rule(name, shape)
    parts = []
    for source, (_, dims) in zip(sources, rule.hf, strict=True):
        part, expected = read(source), [_size(d, shape) for d in dims]
        if list(part.shape) != expected:
            raise ValueError(f"{source} must be {expected}, got {list(part.shape)}")
        parts.append(part)
    return shard(rule, merge(rule, parts, shape, padded_vocab), tensor_rank, tensor_size)


def to_hf(name: str, shards: Sequence[Tensor], shape: ModelShape, new: NewTensor = _new_tensor) -> dict[str, Tensor]:
    """The full Hugging Face tensors of one Megatron parameter, from its shards in tensor-parallel order.

    What lies in a shard as it is, is a view of it; `new(like, shape)` gives the memory for all else. Raises ValueError
    when the shards together have another shape than the parameter.
    """
    rule, targets = find_rule(name, shape)
    full = unshard(rule, shards, new)
    rows = max(full.size(0), shape.vocab_size) if rule.kind == "vocab" else 0
    if full.shape != (expected := megatron_shape(name, shape, rows)):
        raise ValueError(f"{name} must be {list(expected)} over all shards, got {list(full.shape)}")
    return dict(zip(targets, split(rule, full, shape, new), strict=True))


def merge(rule: Rule, parts: Sequence[Tensor], shape: ModelShape, padded_vocab: int) -> Tensor:
    """Hugging Face tensors -> the full Megatron tensor."""
    if rule.kind == "vocab":
        (weight,) = parts
        if padded_vocab < weight.size(0):
            raise ValueError(f"padded_vocab must be at least the vocabulary's {weight.size(0)}, got {padded_vocab}")
        padding = weight.new_zeros(padded_vocab - weight.size(0), *weight.shape[1:])
        return torch.cat([weight, padding])
    if rule.kind == "qkv":
        # [groups, rows of the group, hidden]; a bias has no hidden
        grouped = [x.unflatten(0, (shape.num_kv_heads, -1)) for x in parts]
        return torch.cat(grouped, 1).flatten(0, 1)
    return torch.cat(list(parts)) if rule.kind == "gate_up" else parts[0]


def split(rule: Rule, full: Tensor, shape: ModelShape, new: NewTensor = _new_tensor) -> list[Tensor]:
    """The full Megatron tensor -> Hugging Face tensors."""
    if rule.kind == "vocab":
        return [full[: shape.vocab_size]]
    if rule.kind == "qkv":
        groups, d = shape.num_kv_heads, shape.head_dim
        sizes = [shape.num_heads // groups * d, d, d]
        parts = full.unflatten(0, (groups, -1)).split(sizes, 1)
        return [x.flatten(0, 1) if groups == 1 else new(x, x.shape).copy_(x).flatten(0, 1) for x in parts]
    return list(full.chunk(2)) if rule.kind == "gate_up" else [full]


def shard(rule: Rule, full: Tensor, rank: int, size: int) -> Tensor:
    """One tensor-parallel rank's part of a full Megatron tensor.

    Fused q, k and v are cut evenly whatever the heads are: with more ranks than key-value heads Megatron gathers
    their outputs and each rank picks its query heads.
    """
    if rule.shard_dim is None or size == 1:
        return full
    pieces = full.chunk(2) if rule.kind == "gate_up" else [full]
    if any(x.size(rule.shard_dim) % size for x in pieces):
        raise ValueError(
            f"--tensor-model-parallel-size must divide dimension {rule.shard_dim} of {rule.megatron} "
            f"{list(full.shape)}, got {size}"
        )
    return torch.cat([x.chunk(size, rule.shard_dim)[rank] for x in pieces])


def unshard(rule: Rule, shards: Sequence[Tensor], new: NewTensor = _new_tensor) -> Tensor:
    """The full Megatron tensor from all shards in tensor-parallel order."""
    if rule.shard_dim is None or len(shards) == 1:
        return shards[0]
    parts = list(shards)
    if rule.kind == "gate_up":
        halves = [x.chunk(2) for x in shards]
        parts = [*(gate for gate, _ in halves), *(up for _, up in halves)]
    full = list(parts[0].shape)
    full[rule.shard_dim] = sum(x.size(rule.shard_dim) for x in parts)
    return torch.cat(parts, rule.shard_dim, out=new(parts[0], full))


def _rules(shape: ModelShape) -> Iterator[tuple[Rule, int | str]]:
    """Every rule with the number of its layer."""
    yield EMBEDDING, ""
    for layer in range(shape.num_layers):
        for rule in LAYER_RULES[shape.family]:
            yield rule, layer
    yield FINAL_NORM, ""
    if not shape.tied_embeddings:
        yield HEAD, ""


def _size(dim: Dim, shape: ModelShape) -> int:
    sizes: dict[Dim, int] = {
        "vocab": shape.vocab_size,
        "hidden": shape.hidden_size,
        "ffn": shape.ffn_size,
        "head": shape.head_dim,
        "q": shape.num_heads * shape.head_dim,
        "kv": shape.num_kv_heads * shape.head_dim,
    }
    return sizes[dim]
