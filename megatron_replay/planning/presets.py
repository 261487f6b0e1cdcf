"""Shapes of released models by name, so that a plan needs no checkpoint at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_replay.weight_sync.model_shape import ModelShape

# the fields of the released config.json that a shape is made of
_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
}


def _qwen3(layers: int, hidden: int, ffn: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return _QWEN3 | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(28, 1024, 3072, 16, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 6144, 16, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 9728, 32, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 12288, 32, tied=False),
}


def model_shape(model: str) -> ModelShape:
    """The shape of a preset, or of a folder with config.json. Raises ValueError that names the value."""
    if model in PRESETS:
        return ModelShape.from_config(PRESETS[model], model)
    if not Path(model).is_dir():
        raise ValueError(f"--model must be one of {', '.join(PRESETS)}, or a folder with config.json, got {model!r}")
    return ModelShape.from_folder(model)
