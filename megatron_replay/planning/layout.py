"""Layout: the TP x PP x DP grid of a run, what refuses it, and which wire each of its groups talks over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_replay.weight_sync.model_shape import ModelShape

Wire = Literal["nvlink", "network"]


@dataclass(frozen=True)
class Layout:
    """Ranks are numbered as Megatron does: tensor-parallel ranks side by side, then data-parallel, then stages."""

    tensor: int
    pipeline: int
    data: int
    gpus_per_node: int

    @classmethod
    def of(cls, world: int, tensor: int, pipeline: int, gpus_per_node: int) -> Layout:
        """The layout of `world` ranks. Raises ValueError where the groups do not divide them."""
        if world % (tensor * pipeline):
            raise ValueError(
                f"--tensor-model-parallel-size {tensor} times --pipeline-model-parallel-size {pipeline} must divide "
                f"the number of processes, got {world}"
            )
        return cls(tensor, pipeline, world // (tensor * pipeline), gpus_per_node)

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.data

    @property
    def tensor_wire(self) -> Wire:
        return self._wire(self.tensor)

    @property
    def data_wire(self) -> Wire:
        return self._wire(self.tensor * self.data)

    @property
    def pipeline_wire(self) -> Wire:
        return self._wire(self.world)

    @property
    def replicas_on_one_node(self) -> bool:
        """Whether the ranks that hold the model once share a node, for every replica."""
        stride = self.tensor * self.data
        ranks = [
            [d * self.tensor + s * stride + t for s in range(self.pipeline) for t in range(self.tensor)]
            for d in range(self.data)
        ]
        return all(len({rank // self.gpus_per_node for rank in replica}) == 1 for replica in ranks)

    def in_flight(self, stage: int, microbatches: int) -> int:
        """Microbatches whose activations a stage holds at once, under Megatron's one-forward-one-backward schedule."""
        return min(self.pipeline - stage, microbatches)

    def _wire(self, span: int) -> Wire:
        """Of a group whose members lie in `span` neighbouring ranks."""
        return "nvlink" if self.gpus_per_node % span == 0 else "network"


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
