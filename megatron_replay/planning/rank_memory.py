"""RankMemory: the bytes of one rank by what they are for, and their sum in each phase of a step.

Formulas and their sources stand in docs/planning.md.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from megatron_replay.planning.activation_memory import ActivationModel
from megatron_replay.planning.hardware import Hardware
from megatron_replay.planning.layout import Layout
from megatron_replay.planning.parameters import Shapes, rank_parameters
from megatron_replay.planning.state_memory import buffer_bytes, state_bytes
from megatron_replay.planning.workload import Workload
from megatron_replay.weight_sync.hf_mapping import HEAD, find_rule
from megatron_replay.weight_sync.model_shape import ModelShape

# tokens, loss_mask and behavior_logprobs of the batch; ids, positions, rows, targets and sources of its packs
BATCH_TOKEN = (8 + 1 + 4) + 5 * 8
# log-prob, maximum and entropy of a trained row, and the terms of its loss: float32
HEAD_ROW = 8 * 4
# a sampler's logits as float32, as exponentials in float32 and float64, and their cumulative sum
SAMPLED_LOGIT = 4 + 4 + 8 + 8
COLUMN_ALIGNMENT = 64  # of a row of logits
STATE = ("weights", "gradients", "optimizer", "buffer")
PHASES = {
    "train": ("batch", "activations", "logits", "head_gradient", "workspace"),
    # a forward-only pass, of the reference model or for recomputed log-probs
    "logprobs": ("batch", "reference", "logits", "workspace"),
    "push": ("push",),
}


@dataclass(frozen=True)
class RankMemory:
    """Device bytes of one rank of a pipeline stage."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int  # one chunk
    head_gradient: int  # float32 sum of the head's weight gradient, and the rows it is made of
    workspace: int  # what backward or a forward-only pass needs for a moment
    batch: int
    buffer: int
    reference: int  # copy of the weights while the reference model's are in their place
    push: int  # messages of a weight push
    engine: int  # key-value cache of the embedded engine, or the share of a colocated one

    def parts(self, engine: str) -> dict[str, dict[str, int]]:
        """What is held at once in each phase of a step, by name.

        A colocated engine wakes for a push: what training took is given back before, what the push took is not.
        """
        items = self.items()
        found = {phase: {name: items[name] for name in (*STATE, *more)} for phase, more in PHASES.items()}
        beside = found["push"] if engine == "vllm-colocated" else {name: items[name] for name in STATE}
        return found | {"sample": beside | {"engine": self.engine}}

    def phases(self, engine: str) -> dict[str, int]:
        """Bytes at once in each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.parts(engine).items()}

    def items(self) -> dict[str, int]:
        return asdict(self)


def rank_memory(shape: ModelShape, layout: Layout, job: Workload, hardware: Hardware, stage: int) -> RankMemory:
    """Of the fullest rank of a stage: tensor-parallel rank 0, at the longest rollouts."""
    padded = shape.padded_vocab_size(job.vocab_divisible_by, layout.tensor)
    shapes = rank_parameters(shape, padded, layout.tensor, layout.pipeline, stage)
    first, last = stage == 0, stage == layout.pipeline - 1
    e, hidden, tokens = job.dtype.itemsize, shape.hidden_size, job.bin_tokens
    model = ActivationModel(shape, job.dtype, layout.tensor, job.sequence_parallel, job.recompute)
    held = state_bytes(
        shapes,
        job.dtype,
        distributed=job.distributed_optimizer,
        data=layout.data,
        shares_embedding=shape.tied_embeddings and layout.pipeline > 1,
    )
    longest = min(job.seq_length, tokens)
    microbatches = -(-job.rollouts(layout.data) // job.micro_batch_size)
    saved = model.saved(tokens, shape.num_layers // layout.pipeline, first=first, last=last, longest=longest)
    activations = saved * layout.in_flight(stage, microbatches)
    if job.recompute:
        activations += model.layer(tokens)
    columns = padded // layout.tensor
    rows = job.micro_batch_size * job.max_response_length
    row = -(-columns // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT * e
    # a parameter's gradient in its own dtype, until it is added to the float32 sum
    workspace = max(math.prod(size) for size in shapes.values()) * e
    if job.sequence_parallel:
        workspace += e * hidden * tokens  # the gathered input of a linear layer
    device, _ = buffer_bytes(job.capacity, job.arena_tokens)
    on_device = 0 if job.buffer_on_cpu else 1
    return RankMemory(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        activations=activations,
        logits=min(job.logits_bytes, rows * row) if last else 0,
        head_gradient=(4 * columns * hidden + rows * (2 * e * hidden + HEAD_ROW)) if last else 0,
        workspace=max(workspace, model.working(tokens)),
        batch=on_device * job.rollouts(layout.data) * job.seq_length * BATCH_TOKEN,
        buffer=on_device * device,
        reference=held.weights if job.kl else 0,
        push=_push_bytes(shapes, shape, layout, job),
        engine=_engine_bytes(model, layout, job, hardware, stage, columns),
    )


def host_bytes(shape: ModelShape, layout: Layout, job: Workload) -> int:
    """Of a rank, on the host: records of the buffer, the buffer itself where it is put there, reference weights."""
    device, records = buffer_bytes(job.capacity, job.arena_tokens)
    padded = shape.padded_vocab_size(job.vocab_divisible_by, layout.tensor)
    weights = 0
    for stage in range(layout.pipeline):
        shapes = rank_parameters(shape, padded, layout.tensor, layout.pipeline, stage)
        weights = max(weights, sum(map(math.prod, shapes.values())) * job.dtype.itemsize)
    return records + (device if job.buffer_on_cpu else 0) + (weights if job.kl else 0)


def sent_bytes(shapes: Shapes, shape: ModelShape, itemsize: int, *, first_rank: bool) -> int:
    """Bytes of one push that a rank sends: its shards, and on tensor-parallel rank 0 what all ranks hold alike."""
    return sum(_sent(shapes, shape, itemsize, first_rank=first_rank).values())


def _sent(shapes: Shapes, shape: ModelShape, itemsize: int, *, first_rank: bool) -> dict[str, int]:
    """Bytes of each parameter that a rank sends; the copy of a tied embedding on the last stage is not sent."""
    return {
        name: math.prod(size) * itemsize
        for name, size in shapes.items()
        if not (name == HEAD.megatron and shape.tied_embeddings)
        and (first_rank or find_rule(name, shape)[0].shard_dim is not None)
    }


def _push_bytes(shapes: Shapes, shape: ModelShape, layout: Layout, job: Workload) -> int:
    """Two messages, each the rank's share of a bucket, or of a module that is larger and goes alone."""
    if job.engine == "embedded":
        return 0
    sent = _sent(shapes, shape, job.dtype.itemsize, first_rank=True)
    return 2 * min(max(job.bucket_bytes // layout.tensor, *sent.values()), sum(sent.values()))


def _engine_bytes(
    model: ActivationModel, layout: Layout, job: Workload, hardware: Hardware, stage: int, columns: int
) -> int:
    if job.engine == "vllm-server":
        return 0
    if job.engine == "vllm-colocated":
        return int(job.engine_share * hardware.memory_bytes) if stage * layout.tensor < job.engine_tensor else 0
    rows = min(job.engine_sequences, job.fresh_rollouts(layout.data))
    layers = model.shape.num_layers // layout.pipeline
    cache = model.cache(rows, job.seq_length, layers)
    prompts = model.working(rows * (job.seq_length - job.max_response_length))
    logits = rows * columns * (job.dtype.itemsize + SAMPLED_LOGIT) if stage == layout.pipeline - 1 else 0
    return cache + max(prompts, logits)
