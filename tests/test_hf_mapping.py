"""The mapping tables in both directions, and which Hugging Face configs are built."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_replay.weight_sync.hf_mapping import (
    find_rule,
    hf_names,
    hf_shapes,
    megatron_names,
    megatron_shape,
    to_hf,
    to_megatron,
)
from megatron_replay.weight_sync.model_shape import FAMILIES, ModelShape
from tests.hf_configs import LLAMA32_1B, QWEN3_06B, QWEN25_05B, shape_of

LAYER = "decoder.layers.1."


def value(name: str, shape: ModelShape) -> Tensor:
    """Random, and the same whenever it is asked for."""
    g = torch.Generator().manual_seed(sum((i + 1) * b for i, b in enumerate(name.encode())))
    return torch.randn(hf_shapes(shape)[name], generator=g)


def small(family: str, tied: bool, kv_heads: int, queries: int, head_dim: int, vocab: int = 13) -> ModelShape:
    config = {"model_type": family, "tie_word_embeddings": tied, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    sizes = {"num_attention_heads": kv_heads * queries, "hidden_size": 6, "intermediate_size": 16, "vocab_size": vocab}
    return shape_of(QWEN3_06B, **config, **sizes)


@settings(deadline=None, max_examples=60)
@given(
    family=st.sampled_from(FAMILIES),
    tied=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
    queries=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([8, 16]),
    tp=st.sampled_from([1, 2, 4, 8]),
    vocab=st.integers(1, 40),
)
def test_round_trip_is_bit_exact_for_every_shape_and_shard_count(
    family: str, tied: bool, kv_heads: int, queries: int, head_dim: int, tp: int, vocab: int
) -> None:
    shape = small(family, tied, kv_heads, queries, head_dim, vocab)
    padded = shape.padded_vocab_size(8, tp)
    back: dict[str, Tensor] = {}
    for name in megatron_names(shape):
        shards = [
            to_megatron(name, lambda x: value(x, shape), shape, padded_vocab=padded, tensor_rank=r, tensor_size=tp)
            for r in range(tp)
        ]
        rule, _ = find_rule(name, shape)
        whole = list(shards[0].shape)
        if rule.shard_dim is not None:
            whole[rule.shard_dim] *= tp
        assert tuple(whole) == megatron_shape(name, shape, padded)
        found = to_hf(name, shards, shape)
        assert not back.keys() & found.keys()
        back |= found
    assert list(back) == list(hf_shapes(shape))
    assert all(torch.equal(x, value(name, shape)) for name, x in back.items())


def test_qwen3_06b() -> None:
    """The width of the heads is stated: it is not hidden / heads."""
    shapes = hf_shapes(shape_of(QWEN3_06B))
    at = "model.layers.0.self_attn."
    assert shapes[at + "q_proj.weight"] == (2048, 1024) and shapes[at + "o_proj.weight"] == (1024, 2048)
    assert shapes[at + "k_proj.weight"] == shapes[at + "v_proj.weight"] == (1024, 1024)
    assert shapes[at + "q_norm.weight"] == shapes[at + "k_norm.weight"] == (128,)
    for x in "qk":
        assert find_rule(f"{LAYER}self_attention.{x}_layernorm.weight", shape_of(QWEN3_06B))[1] == (
            f"model.layers.1.self_attn.{x}_norm.weight",
        )
    assert "lm_head.weight" not in shapes and not [n for n in shapes if n.endswith("bias")]
    assert hf_shapes(shape_of(QWEN3_06B, tie_word_embeddings=False))["lm_head.weight"] == (1001, 1024)


def test_qwen25_05b() -> None:
    shapes = hf_shapes(shape_of(QWEN25_05B))
    at = "model.layers.1.self_attn."
    assert shapes[at + "q_proj.bias"] == (896,) and shapes[at + "k_proj.bias"] == shapes[at + "v_proj.bias"] == (128,)
    assert at + "o_proj.bias" not in shapes and at + "q_norm.weight" not in shapes
    assert megatron_shape(LAYER + "self_attention.linear_qkv.bias", shape_of(QWEN25_05B), 1024) == (1152,)


def test_llama32_1b() -> None:
    shape = shape_of(LLAMA32_1B)
    assert (shape.rope_theta, shape.rope_scaling_factor) == (500_000.0, 32.0)
    assert not [n for n in hf_names(shape) if "bias" in n or "q_norm" in n]
    assert shape_of(LLAMA32_1B, rope_scaling=None).rope_scaling_factor is None
    # transformers 5 writes both into one field
    both = {"rope_theta": 5.0, **LLAMA32_1B["rope_scaling"]}
    again = shape_of(LLAMA32_1B, rope_scaling=None, rope_theta=None, rope_parameters=both)
    assert (again.rope_theta, again.rope_scaling_factor) == (5.0, 32.0)


def test_names_go_from_the_embedding_to_the_head() -> None:
    names = list(hf_shapes(shape_of(LLAMA32_1B, tie_word_embeddings=False)))
    layers = [int(n.split(".")[2]) for n in names[1:-2]]
    assert names[0] == "model.embed_tokens.weight" and names[-2:] == ["model.norm.weight", "lm_head.weight"]
    assert layers == sorted(layers) and set(layers) == {0, 1}


def test_query_groups_are_interleaved() -> None:
    """Two query heads of the first group, its key head, its value head, then the next group; biases the same."""
    for suffix, config in (("weight", QWEN3_06B), ("bias", QWEN25_05B)):
        shape = shape_of(config)
        d, per_group = shape.head_dim, shape.num_heads // shape.num_kv_heads
        q, k, v = (value(f"model.layers.1.self_attn.{x}_proj.{suffix}", shape) for x in "qkv")
        name = f"{LAYER}self_attention.linear_qkv.{suffix}"
        fused = to_megatron(name, lambda x, at=shape: value(x, at), shape, padded_vocab=1024)
        for group in range(shape.num_kv_heads):
            rows = fused[group * (per_group + 2) * d :][: (per_group + 2) * d]
            own = [q[group * per_group * d :][: per_group * d], k[group * d :][:d], v[group * d :][:d]]
            assert torch.equal(rows, torch.cat(own))


def test_a_shard_of_the_gate_lies_above_the_same_shard_of_the_up_projection() -> None:
    shape = shape_of(QWEN3_06B)
    gate, up = (value(f"model.layers.1.mlp.{x}_proj.weight", shape) for x in ("gate", "up"))
    made = to_megatron(
        LAYER + "mlp.linear_fc1.weight",
        lambda x: value(x, shape),
        shape,
        padded_vocab=1024,
        tensor_rank=1,
        tensor_size=2,
    )
    assert torch.equal(made, torch.cat([gate[1536:], up[1536:]]))


def test_padded_vocabulary_rows_are_zero_and_one_size_for_all_layouts() -> None:
    shape = shape_of(QWEN3_06B, tie_word_embeddings=False)
    assert {shape.padded_vocab_size(128, tp) for tp in (1, 2, 4, 8)} == {1024}
    assert shape.padded_vocab_size(128, 3) == 1152

    def shard(name: str, padded: int) -> Tensor:
        return to_megatron(name, lambda x: value(x, shape), shape, padded_vocab=padded, tensor_rank=1, tensor_size=2)

    weight = shard("output_layer.weight", 1024)
    assert weight.shape == (512, 1024) and not weight[1001 - 512 :].any()
    with pytest.raises(ValueError, match="padded_vocab must be at least the vocabulary's 1001, got 1000"):
        shard("output_layer.weight", 1000)


def test_the_copy_of_a_tied_head_is_the_embedding() -> None:
    tied = shape_of(QWEN3_06B)
    assert find_rule("output_layer.weight", tied)[1] == ("model.embed_tokens.weight",)
    assert "output_layer.weight" not in megatron_names(tied)
    untied = shape_of(QWEN3_06B, tie_word_embeddings=False)
    assert find_rule("output_layer.weight", untied)[1] == ("lm_head.weight",)


def test_fused_norm_names_of_transformer_engine() -> None:
    shape = shape_of(QWEN3_06B)
    _, (norm,) = find_rule("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", shape)
    assert norm == "model.layers.0.input_layernorm.weight"
    _, (norm,) = find_rule("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", shape)
    assert norm == "model.layers.0.post_attention_layernorm.weight"


@pytest.mark.parametrize("name", ["decoder.adapter", LAYER + "self_attention.linear_qkv.bias", "decoder.layers.2.x"])
def test_an_unknown_parameter_raises(name: str) -> None:
    with pytest.raises(KeyError, match=f"no qwen3 rule covers the parameter {name}"):
        find_rule(name, shape_of(QWEN3_06B))


def test_a_layer_that_is_not_there_raises() -> None:
    with pytest.raises(KeyError, match=r"decoder\.layers\.2\.mlp"):
        find_rule("decoder.layers.2.mlp.linear_fc2.weight", shape_of(QWEN3_06B))


def test_a_layout_that_does_not_divide_names_the_flag() -> None:
    shape = shape_of(QWEN3_06B)
    with pytest.raises(ValueError, match="--tensor-model-parallel-size must divide dimension 0"):
        to_megatron(
            "embedding.word_embeddings.weight",
            lambda x: value(x, shape),
            shape,
            padded_vocab=1024,
            tensor_rank=0,
            tensor_size=3,
        )


def test_tensors_of_a_wrong_shape_are_named() -> None:
    shape = shape_of(QWEN3_06B)
    with pytest.raises(
        ValueError, match=r"model.layers.1.self_attn.k_proj.weight must be \[1024, 1024\], got \[2048, 1024\]"
    ):
        to_megatron(
            LAYER + "self_attention.linear_qkv.weight", lambda x: torch.zeros(2048, 1024), shape, padded_vocab=1024
        )
    with pytest.raises(
        ValueError, match=r"linear_fc2.weight must be \[1024, 3072\] over all shards, got \[1024, 1536\]"
    ):
        to_hf(LAYER + "mlp.linear_fc2.weight", [torch.zeros(1024, 768)] * 2, shape)
    with pytest.raises(
        ValueError, match=r"word_embeddings.weight must be \[1001, 1024\] over all shards, got \[1000, 1024\]"
    ):
        to_hf("embedding.word_embeddings.weight", [torch.zeros(500, 1024)] * 2, shape)
