"""Traffic: the bytes that one rank sends in a step, by the collective that sends them.

An all-reduce of n bytes over p ranks sends 2 (p - 1) / p n from each, a gather or a scatter half of that: the least
that any algorithm can (Patarasuk and Yuan, 2009). Messages of a few bytes a token or a step are left out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from megatron_replay.planning.layout import Layout
from megatron_replay.planning.parameters import rank_parameters
from megatron_replay.planning.rank_memory import sent_bytes
from megatron_replay.planning.state_memory import state_bytes
from megatron_replay.planning.workload import Workload
from megatron_replay.weight_sync.model_shape import ModelShape


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank of one stage sends in a step, at the mean lengths."""

    tensor_parallel: int  # activations and their gradients, summed over the tensor-parallel ranks
    pipeline: int  # activations to the next stage, gradients to the one before
    data_parallel: int  # gradients, and with the distributed optimizer the weights it has updated
    tied_embedding: int  # gradient of the embedding, between first and last stage
    weight_push: int  # shards to the engine
    generation: int  # activations of the embedded engine

    def items(self) -> dict[str, int]:
        return asdict(self)

    @property
    def total(self) -> int:
        return sum(self.items().values())


def traffic(shape: ModelShape, layout: Layout, job: Workload, stage: int) -> Traffic:
    """Of tensor-parallel rank 0 of a stage."""
    padded = shape.padded_vocab_size(job.vocab_divisible_by, layout.tensor)
    shapes = rank_parameters(shape, padded, layout.tensor, layout.pipeline, stage)
    e, hidden = job.dtype.itemsize, shape.hidden_size
    first, last = stage == 0, stage == layout.pipeline - 1
    fresh = job.fresh_rollouts(layout.data)
    trained = job.iterations * job.rollouts(layout.data) * job.mean_length
    forward_only = (job.iterations * job.rollouts(layout.data) * job.kl + fresh * job.recomputed_logprobs) * (
        job.mean_length
    )
    split = layout.tensor if job.sequence_parallel else 1
    held = state_bytes(
        shapes,
        job.dtype,
        distributed=job.distributed_optimizer,
        data=layout.data,
        shares_embedding=shape.tied_embeddings and layout.pipeline > 1,
    )
    reduced = held.gradients + (held.weights if job.distributed_optimizer else held.gradients)
    embedding = 4 * hidden * padded // layout.tensor
    tied = shape.tied_embeddings and layout.pipeline > 1 and (first or last)
    return Traffic(
        tensor_parallel=_ring(
            layout.tensor, e * hidden * _reduced_rows(shape, layout, job, trained, forward_only, stage)
        ),
        pipeline=((trained + forward_only) * (not last) + trained * (not first)) * hidden * e // split,
        data_parallel=job.iterations * _ring(layout.data, reduced) // 2,
        tied_embedding=job.iterations * embedding if tied else 0,
        weight_push=0 if job.engine == "embedded" else sent_bytes(shapes, shape, e, first_rank=True),
        generation=_generation(shape, layout, job, fresh, first, last) if job.engine == "embedded" else 0,
    )


def pushed_bytes(shape: ModelShape, layout: Layout, job: Workload) -> int:
    """All weights once: what every worker of an engine receives."""
    padded = shape.padded_vocab_size(job.vocab_divisible_by, layout.tensor)
    total = 0
    for stage in range(layout.pipeline):
        shapes = rank_parameters(shape, padded, layout.tensor, layout.pipeline, stage)
        first = sent_bytes(shapes, shape, job.dtype.itemsize, first_rank=True)
        total += first + (layout.tensor - 1) * sent_bytes(shapes, shape, job.dtype.itemsize, first_rank=False)
    return total


def _reduced_rows(shape: ModelShape, layout: Layout, job: Workload, trained: int, forward_only: int, stage: int) -> int:
    """Rows [H] that are all-reduced: two a layer in the forward pass, two in the backward pass. Sequence parallelism
    gathers and scatters instead, and gathers a linear layer's input once more for the gradient of its weight."""
    layers = shape.num_layers // layout.pipeline
    passes = 4 + (2 if job.recompute else 0) + (1 if job.sequence_parallel else 0)
    rows = layers * (passes * trained + 2 * forward_only)
    if stage == 0:
        rows += trained + forward_only
    if stage == layout.pipeline - 1:
        # the gradient of the hidden states that the head's shards make
        rows += trained * job.mean_response_length // job.mean_length
    return rows


def _generation(shape: ModelShape, layout: Layout, job: Workload, rollouts: int, first: bool, last: bool) -> int:
    rows = rollouts * job.mean_length
    layers = shape.num_layers // layout.pipeline
    row = shape.hidden_size * job.dtype.itemsize
    return _ring(layout.tensor, row * rows * (2 * layers + first)) + (0 if last else row * rows)


def _ring(ranks: int, nbytes: int) -> int:
    return math.ceil(2 * (ranks - 1) / ranks * nbytes)
