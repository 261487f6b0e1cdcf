"""ModelShape: what the trainer needs of a Hugging Face config.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = ("qwen3",)


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

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelShape:
        """Read FOLDER/config.json. Raises ValueError naming the folder for a missing file or another family."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise ValueError(f"--load-hf must name a folder with a config.json, got {str(folder)!r}")
        return cls.from_config(json.loads(path.read_text()), str(path))

    @classmethod
    def from_config(cls, config: dict[str, Any], where: str) -> ModelShape:
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ValueError(
                f"--load-hf must name a model of a supported family ({', '.join(FAMILIES)}), got {family!r} in {where}"
            )
        rope = config.get("rope_parameters") or {}  # transformers 5; before that rope_theta stood alone
        if rope.get("rope_type", "default") != "default" or config.get("rope_scaling"):
            raise ValueError(
                f"--load-hf must name a model without RoPE scaling, got {rope or config['rope_scaling']} in {where}"
            )
        heads = config["num_attention_heads"]
        return cls(
            family=family,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            ffn_size=config["intermediate_size"],
            vocab_size=config["vocab_size"],
            rms_norm_eps=config["rms_norm_eps"],
            rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10_000.0))),
            tied_embeddings=config.get("tie_word_embeddings", False),
            max_positions=config["max_position_embeddings"],
        )

    def padded_vocab_size(self, divisible_by: int, tensor_size: int) -> int:
        """The vocabulary rounded up so that every tensor-parallel shard has the same number of rows.

        The multiple is lcm(divisible_by, tensor_size), not their product: one size for all layouts that divide
        `divisible_by`, so that a checkpoint reshards without changing the shape of the embedding.
        """
        multiple = math.lcm(divisible_by, tensor_size)
        return -(-self.vocab_size // multiple) * multiple
