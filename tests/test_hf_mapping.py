from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_replay.weight_sync.hf_mapping import find_rule, hf_names, to_hf, to_megatron
from megatron_replay.weight_sync.model_shape import ModelShape

QWEN3_06B = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 1001,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}
LAYER = "decoder.layers.1."
PARAMETERS = (
    "embedding.word_embeddings.weight",
    LAYER + "input_layernorm.weight",
    LAYER + "self_attention.linear_qkv.weight",
    LAYER + "self_attention.q_layernorm.weight",
    LAYER + "self_attention.k_layernorm.weight",
    LAYER + "self_attention.linear_proj.weight",
    LAYER + "pre_mlp_layernorm.weight",
    LAYER + "mlp.linear_fc1.weight",
    LAYER + "mlp.linear_fc2.weight",
    "decoder.final_layernorm.weight",
    "output_layer.weight",
)


def full(name: str) -> Tensor:
    sizes = {
        "embed_tokens": (1001, 1024),
        "lm_head": (1001, 1024),
        "q_proj": (2048, 1024),
        "k_proj": (1024, 1024),
        "v_proj": (1024, 1024),
        "o_proj": (1024, 2048),
        "gate_proj": (3072, 1024),
        "up_proj": (3072, 1024),
        "down_proj": (1024, 3072),
        "q_norm": (128,),
        "k_norm": (128,),
    }
    size = next((s for key, s in sizes.items() if key in name), (1024,))
    g = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(size, generator=g)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_bit_exact_on_every_shard_count(tp: int, tied: bool) -> None:
    shape = ModelShape.from_config(QWEN3_06B | {"tie_word_embeddings": tied}, "here")
    padded = shape.padded_vocab_size(128, tp)
    covered = set()
    for name in PARAMETERS:
        shards = [to_megatron(name, full, shape, padded_vocab=padded, tensor_rank=r, tensor_size=tp) for r in range(tp)]
        back = to_hf(name, shards, shape)
        for hf, value in back.items():
            assert torch.equal(value, full(hf)), (name, hf)
        covered |= set(back)
    assert covered == {n for n in hf_names(shape) if "layers.0." not in n}
    assert ("lm_head.weight" in covered) != tied


def test_head_dim_is_not_hidden_over_heads() -> None:
    shape = ModelShape.from_config(QWEN3_06B, "here")
    qkv = to_megatron(LAYER + "self_attention.linear_qkv.weight", full, shape, padded_vocab=1024)
    assert qkv.shape == (2048 + 2 * 1024, 1024)
    # the first query group: two query heads, then its key head, then its value head
    assert torch.equal(qkv[:256], full("model.layers.1.self_attn.q_proj.weight")[:256])
    assert torch.equal(qkv[256:384], full("model.layers.1.self_attn.k_proj.weight")[:128])
    assert torch.equal(qkv[384:512], full("model.layers.1.self_attn.v_proj.weight")[:128])


def test_padded_vocabulary_rows_are_zero_and_one_size_for_all_layouts() -> None:
    shape = ModelShape.from_config(QWEN3_06B, "here")
    assert {shape.padded_vocab_size(128, tp) for tp in (1, 2, 4, 8)} == {1024}
    assert shape.padded_vocab_size(128, 3) == 1152
    weight = to_megatron("output_layer.weight", full, shape, padded_vocab=1024, tensor_rank=1, tensor_size=2)
    assert weight.shape == (512, 1024) and not weight[1001 - 512 :].any()


def test_fused_norm_names_of_transformer_engine() -> None:
    shape = ModelShape.from_config(QWEN3_06B, "here")
    _, (norm,) = find_rule("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", shape)
    assert norm == "model.layers.0.input_layernorm.weight"
    _, (norm,) = find_rule("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", shape)
    assert norm == "model.layers.0.post_attention_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "--load-hf must name a model of a supported family.*'mamba'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "--load-hf must name a model without RoPE scaling"),
        ({"rope_scaling": {"factor": 2}}, "--load-hf must name a model without RoPE scaling"),
    ],
)
def test_another_model_is_refused_by_name(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelShape.from_config(QWEN3_06B | change, "here")


def test_an_unknown_parameter_raises() -> None:
    with pytest.raises(KeyError, match="no qwen3 rule covers the parameter decoder.adapter"):
        find_rule("decoder.adapter", ModelShape.from_config(QWEN3_06B, "here"))


def test_a_layout_that_does_not_divide_names_the_flag() -> None:
    shape = ModelShape.from_config(QWEN3_06B, "here")
    with pytest.raises(ValueError, match="--tensor-model-parallel-size must divide dimension 0"):
        to_megatron("output_layer.weight", full, shape, padded_vocab=1024, tensor_rank=0, tensor_size=3)
