"""ModelShape reads config.json: what it would compute otherwise than the model does is refused by field and value."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron_replay.weight_sync.model_shape import ModelShape
from tests.hf_configs import LLAMA32_1B, QWEN3_06B, QWEN25_05B

SCALING = LLAMA32_1B["rope_scaling"]


@pytest.mark.parametrize(
    ("base", "change", "words"),
    [
        (
            QWEN3_06B,
            {"model_type": "qwen3_moe"},
            r"a supported family \(qwen3, qwen2, llama\), got 'qwen3_moe' in here",
        ),
        (QWEN3_06B, {"model_type": "mixtral"}, "a supported family .*got 'mixtral'"),
        (QWEN3_06B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config must be .*'fp8'"),
        (QWEN3_06B, {"attention_bias": True}, "attention_bias must be false for qwen3, got True"),
        (LLAMA32_1B, {"attention_bias": True}, "attention_bias must be false for llama, got True"),
        (LLAMA32_1B, {"mlp_bias": True}, "mlp_bias must be false for llama, got True"),
        (QWEN3_06B, {"hidden_act": "gelu"}, "hidden_act must be silu, got 'gelu'"),
        (
            QWEN25_05B,
            {"use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window must be false .*got 'true from layer 1 on'",
        ),
        (
            QWEN3_06B,
            {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "use_sliding_window must be false .*got 'true from layer 0 on'",
        ),
        (QWEN3_06B, {"layer_types": ["full_attention", "linear_attention"]}, "layer_types must .*'linear_attention'"),
        (QWEN3_06B, {"rope_parameters": {"rope_type": "yarn"}}, "rope_type of rope_parameters must be .*'yarn'"),
        (QWEN3_06B, {"rope_scaling": {"type": "linear"}}, "rope_type of rope_scaling must be default or .*'linear'"),
        (QWEN3_06B, {"rope_scaling": {"factor": 2}}, "rope_type of rope_scaling must be default or llama3, got None"),
        (
            LLAMA32_1B,
            {"rope_scaling": SCALING | {"low_freq_factor": 2}},
            "low_freq_factor of rope_scaling must be 1,.*2",
        ),
        (LLAMA32_1B, {"rope_scaling": SCALING | {"high_freq_factor": 8.0}}, "high_freq_factor of .* must be 4,.*8.0"),
        (
            LLAMA32_1B,
            {"rope_scaling": SCALING | {"original_max_position_embeddings": 4096}},
            "original_max_position_embeddings of rope_scaling must be 8192,.*got 4096",
        ),
        (LLAMA32_1B, {"original_max_position_embeddings": 2048}, "original_max_position_embeddings of .*got 2048"),
        (LLAMA32_1B, {"rope_scaling": SCALING | {"factor": 0.5}}, "factor of rope_scaling must be .*got 0.5"),
        (LLAMA32_1B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1, got 0.5"),
        (QWEN3_06B, {"rope_theta": "1e6"}, "rope_theta must be a positive number, got '1e6'"),
        (QWEN3_06B, {"rope_theta": math.inf}, "rope_theta must be a positive number, got inf"),
        (QWEN3_06B, {"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, got None"),
        (QWEN3_06B, {"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        (
            QWEN3_06B,
            {"num_key_value_heads": 5},
            "num_attention_heads must be a multiple of num_key_value_heads 5, got 16",
        ),
    ],
)
def test_another_model_is_refused_by_field_and_value(base: dict[str, Any], change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^--load-hf.*{words}"):
        ModelShape.from_config(base | change, "here")


@pytest.mark.parametrize(
    "change",
    [
        {"use_sliding_window": True},  # from layer 21 of 2 on
        {"use_sliding_window": False, "max_window_layers": 0},
        {"attention_bias": True, "mlp_bias": True},  # which Qwen2 does not read
        {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_a_field_that_changes_nothing_is_accepted(change: dict[str, Any]) -> None:
    assert ModelShape.from_config(QWEN25_05B | change, "here") == ModelShape.from_config(QWEN25_05B, "here")
