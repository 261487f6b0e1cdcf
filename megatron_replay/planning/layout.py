"""Layout: the TP x PP x DP grid of a run, what refuses it, and which wire each of its groups talks over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
