"""A tiny model's weights as trainer ranks hold them, and an engine that keeps what it is given, for tests of pushes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_replay.weight_sync.hf_mapping import find_rule, megatron_names, megatron_shape, shard, to_hf
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.receiver import WeightReceiver
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from megatron_replay.weight_sync.transfer_plan import LOGPROBS_MODE, TransferPlan

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 48,
    "vocab_size": 37,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
}


def shape(tied: bool = False) -> ModelShape:
    return ModelShape.from_config(CONFIG | {"tie_word_embeddings": tied}, "config of a test")


def full_parameters(of: ModelShape, padded_vocab: int, seed: int = 0) -> dict[str, Tensor]:
    """Random Megatron parameters, not sharded."""
    g = torch.Generator().manual_seed(seed)
    names = [n for n in megatron_names(of) if n != "output_layer.weight" or not of.tied_embeddings]
    return {n: torch.randn(megatron_shape(n, of, padded_vocab), generator=g) for n in names}


def shards(of: ModelShape, tensor_size: int, pipeline_size: int, seed: int = 0) -> list[ShardedWeights]:
    """What each rank of a replica holds, stage by stage, in tensor-parallel order; no process groups."""
    padded = of.padded_vocab_size(8, tensor_size)
    full = full_parameters(of, padded, seed)
    held = []
    for stage in range(pipeline_size):
        names = [n for n in full if _stage(n, of.num_layers, pipeline_size) == stage]
        for rank in range(tensor_size):
            mine = {n: shard(find_rule(n, of)[0], full[n], rank, tensor_size).clone() for n in names}
            if of.tied_embeddings and stage == pipeline_size - 1 > 0:
                # Megatron keeps a copy of the embedding there
                name = "embedding.word_embeddings.weight"
                mine["output_layer.weight"] = shard(find_rule(name, of)[0], full[name], rank, tensor_size).clone()
            held.append(ShardedWeights(of, padded, mine, tensor_rank=rank, tensor_size=tensor_size))
    return held


def hf_tensors(of: ModelShape, seed: int = 0, tensor_size: int = 1) -> dict[str, Tensor]:
    """The Hugging Face tensors of the same weights."""
    full = full_parameters(of, of.padded_vocab_size(8, tensor_size), seed)
    return {hf: t for name, x in full.items() for hf, t in to_hf(name, [x], of).items()}


def _stage(name: str, layers: int, stages: int) -> int:
    if name.startswith("embedding."):
        return 0
    if name.startswith("decoder.layers."):
        return int(name.split(".")[2]) // (layers // stages)
    return stages - 1


@dataclass
class KeepingEngine:
    """EngineControl around a real WeightReceiver. `calls` is what it was asked for; `answers` changes what it says."""

    of: ModelShape
    name: str = "kept"
    dtype: str = "float32"
    calls: list[str] = field(default_factory=list)
    answers: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    receiver: WeightReceiver | None = None
    version: int | None = None
    open: bool = False

    def world_size(self) -> int:
        return 1

    def pause(self) -> None:
        self._say("pause")

    def resume(self) -> None:
        self._say("resume")

    def init_weight_transfer(self, info: dict[str, Any]) -> None:
        plan = TransferPlan.from_json(info["plan"])
        plan.check(self.of, self.dtype, self.dtype, LOGPROBS_MODE)
        if "addresses" not in info:
            return
        self._say("init")
        self.receiver = WeightReceiver(
            plan,
            info["addresses"],
            shape=self.of,
            worker=info["first_worker"],
            device=CPU,
            timeout=info["timeout"],
        )

    def start_weight_update(self) -> None:
        assert not self.open
        self._say("start")
        self.open = True

    def update_weights(self, info: dict[str, Any]) -> None:
        assert self.receiver is not None
        try:
            self._say("update")
            self.receiver.receive(info["version"], self.tensors.update)
        except BaseException:
            self.receiver.close()
            raise

    def transfer_status(self) -> list[dict[str, Any]]:
        return [{"open": self.open, "problem": None, "refused": False}]

    def finish_weight_update(self, version: int | None) -> None:
        self.open = False
        self._say("give up" if version is None else "finish")
        self.version = version

    def weight_version(self) -> int | None:
        return self._say("version", self.version)

    def reset_prefix_cache(self) -> bool:
        return self._say("reset", True)

    def _say(self, call: str, answer: Any = None) -> Any:
        self.calls.append(call)
        said = self.answers.get(call, answer)
        if isinstance(said, list):
            said = said.pop(0) if said else answer
        if isinstance(said, Exception):
            raise said
        return said
