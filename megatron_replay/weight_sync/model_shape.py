"""ModelShape: what the trainer needs of a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3", "qwen2", "llama")

# what megatron-core's RoPE of kind llama3 has built in; the factor alone is free
LLAMA3_ROPE = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class ModelShape:
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # Qwen3 states it; it need not be hidden_size / num_heads
    ffn_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    max_positions: int
    rope_scaling_factor: float | None = None  # of RoPE scaling of kind llama3; None: not scaled

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelShape:
        """Read FOLDER/config.json. Raises ValueError naming the file and the field that cannot be built."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"--load-hf must name a folder with a config.json, got {str(folder)!r}")
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(
                f"--load-hf must name a folder with a config.json, got no JSON in {path}: {error}"
            ) from None
        return cls.from_config(config, str(path))

    @classmethod
    def from_config(cls, config: dict[str, Any], where: str) -> ModelShape:
        """The shape of a config; `where` it came from stands in the errors."""
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(
                f"--load-hf must name a model of a supported family ({', '.join(FAMILIES)}), got {family!r} in {where}"
            )
        _refuse_other_architectures(config, where)
        theta, factor = _rope(config, where)
        size = _Sizes(config, where)
        heads = size["num_attention_heads"]
        kv_heads = size["num_key_value_heads"] if config.get("num_key_value_heads") is not None else heads
        if heads % kv_heads:
            raise _refusal("num_attention_heads", f"a multiple of num_key_value_heads {kv_heads}", heads, where)
        return cls(
            family=family,
            num_layers=size["num_hidden_layers"],
            hidden_size=size["hidden_size"],
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=size["head_dim"] if config.get("head_dim") is not None else size["hidden_size"] // heads,
            ffn_size=size["intermediate_size"],
            vocab_size=size["vocab_size"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            max_positions=size["max_position_embeddings"],
            rope_scaling_factor=factor,
        )

    @property
    def qkv_bias(self) -> bool:
        """Biases on q, k and v, none on the output projection."""
        return self.family == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """An RMS norm over the head dimension of q and of k, before RoPE."""
        return self.family == "qwen3"

    def padded_vocab_size(self, divisible_by: int, tensor_size: int) -> int:
        """The vocabulary rounded up so that every tensor-parallel shard has the same number of rows.

        The multiple is lcm(divisible_by, tensor_size), not their product: one size for all layouts that divide
        `divisible_by`, so that a checkpoint reshards without changing the shape of the embedding.
        """
        multiple = math.lcm(divisible_by, tensor_size)
        return -(-self.vocab_size // multiple) * multiple


class _Sizes:
    """The positive integers of a config, by name."""

    def __init__(self, config: dict[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def __getitem__(self, name: str) -> int:
        value = self.config.get(name)
        if type(value) is not int or value < 1:
            raise _refusal(name, "a positive integer", value, self.where)
        return value


def _refusal(field: str, needs: str, value: Any, where: str) -> ValueError:
    return ValueError(f"--load-hf: {field} must be {needs}, got {value!r} in {where}")


def _refuse_other_architectures(config: dict[str, Any], where: str) -> None:
    """Fields that change the computation or the weights in ways that the trainer does not have."""
    if config.get("quantization_config") is not None:
        raise _refusal(
            "quantization_config", "absent (weights in float32 or bfloat16)", config["quantization_config"], where
        )
    if config.get("hidden_act", "silu") != "silu":
        raise _refusal("hidden_act", "silu", config["hidden_act"], where)
    # Qwen2 does not read them: its q, k and v have biases and nothing else has
    if config["model_type"] != "qwen2":
        for field in ("attention_bias", "mlp_bias"):
            if config.get(field):
                raise _refusal(field, f"false for {config['model_type']}", config[field], where)
    kinds = config.get("layer_types")
    if kinds is None:
        sliding_from = config.get("max_window_layers", 28)
        kinds = ["sliding_attention" if i >= sliding_from else "full_attention" for i in range(_layers(config))]
    if other := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise _refusal("layer_types", "full_attention in every layer", other[0], where)
    if config.get("use_sliding_window") and config.get("sliding_window") and "sliding_attention" in kinds:
        first = kinds.index("sliding_attention")
        raise _refusal(
            "use_sliding_window", "false (attention is over the whole sequence)", f"true from layer {first} on", where
        )


def _layers(config: dict[str, Any]) -> int:
    layers = config.get("num_hidden_layers")
    return layers if type(layers) is int else 0


def _rope(config: dict[str, Any], where: str) -> tuple[float, float | None]:
    """(theta, factor of llama3 scaling or None). transformers 5 writes rope_parameters, before that rope_theta stood
    alone and rope_scaling beside it."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope: dict[str, Any] = config.get(field) or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    if type(theta) not in (int, float) or not 0 < theta < math.inf:
        raise _refusal("rope_theta", "a positive number", theta, where)
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise _refusal("partial_rotary_factor", "1", partial, where)
    kind = rope.get("rope_type", rope.get("type", "default" if field == "rope_parameters" or not rope else None))
    if kind == "default":
        return float(theta), None
    if kind != "llama3":
        raise _refusal(f"rope_type of {field}", "default or llama3", kind, where)
    for name, built_in in LLAMA3_ROPE.items():
        value = rope.get(name)
        if name == "original_max_position_embeddings":
            # a value outside the dictionary is the one that transformers takes
            value = config.get(name, rope.get(name, config.get("max_position_embeddings")))
        if value != built_in:
            raise _refusal(f"{name} of {field}", f"{built_in}, as megatron-core has it", value, where)
    factor: Any = rope.get("factor")
    if type(factor) not in (int, float) or not 1 <= factor < math.inf:
        raise _refusal(f"factor of {field}", "a number of at least 1", factor, where)
    return float(theta), float(factor)


def layout_problems(shape: ModelShape, tensor: int, pipeline: int, *, sequence_parallel: bool = False) -> Iterator[str]:
    """Why this model cannot be cut so; each names a flag. Nothing: it can."""
    kv_heads = shape.num_kv_heads
    # with more ranks than key-value heads, several ranks attend to one
    if kv_heads % tensor and tensor % kv_heads:
        yield (
            f"--tensor-model-parallel-size must divide the {kv_heads} key-value heads or be a multiple of it, "
            f"got {tensor}"
        )
    for what, size in (
        ("attention heads", shape.num_heads),
        ("ffn rows", shape.ffn_size),
        ("fused q, k and v rows", (shape.num_heads + 2 * kv_heads) * shape.head_dim),
    ):
        if size % tensor:
            yield f"--tensor-model-parallel-size must divide the {size} {what}, got {tensor}"
    if shape.num_layers % pipeline:
        yield f"--pipeline-model-parallel-size must divide the {shape.num_layers} layers, got {pipeline}"
    if sequence_parallel and tensor == 1:
        yield "--sequence-parallel needs --tensor-model-parallel-size above 1, got 1"
