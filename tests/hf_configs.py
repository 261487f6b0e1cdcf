"""config.json of released models, two layers deep."""

from __future__ import annotations

from typing import Any

from megatron_replay.weight_sync.model_shape import ModelShape

QWEN3_06B: dict[str, Any] = {
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
    "hidden_act": "silu",
}
# 14 query heads on 2 key-value heads, biases
QWEN25_05B = QWEN3_06B | {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": None,
    "intermediate_size": 4864,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 21,
}
LLAMA32_1B = QWEN3_06B | {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 8192,
    "rope_theta": 500_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def shape_of(config: dict[str, Any], **changes: Any) -> ModelShape:
    return ModelShape.from_config(config | changes, "here")
