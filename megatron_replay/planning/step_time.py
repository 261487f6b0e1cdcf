"""StepTime: the least time that a step can take, from arithmetic, memory traffic and messages. A floor, no prediction.

Dims: P parameters that multiply a token, S mean length of a rollout, H hidden, h heads, d head dimension.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from megatron_replay.planning.hardware import Hardware
from megatron_replay.planning.layout import Layout
from megatron_replay.planning.parameters import numel, rank_parameters
from megatron_replay.planning.traffic import pushed_bytes, traffic
from megatron_replay.planning.workload import Workload
from megatron_replay.weight_sync.model_shape import ModelShape


@dataclass(frozen=True)
class StepTime:
    """Seconds, of the slowest stage. `total` leaves out what runs beside another part."""

    generation: float
    weight_push: float
    forward_backward: float
    pipeline_fill: float  # stages that wait for the first microbatch, and after the last one
    tensor_parallel: float
    pipeline: float
    data_parallel: float
    optimizer: float
    total: float

    def items(self) -> dict[str, float]:
        return asdict(self)


def step_time(shape: ModelShape, layout: Layout, job: Workload, hardware: Hardware) -> StepTime:
    tokens = job.rollouts(layout.data) * job.mean_length
    microbatches = -(-tokens // job.bin_tokens)
    stages = [_stage(shape, layout, job, hardware, stage) for stage in range(layout.pipeline)]
    slowest = max(stages, key=lambda parts: sum(parts.values()))
    # all stages but the last are alike, and the last has the head
    fill = (layout.pipeline - 1) * stages[0]["forward_backward"] / microbatches
    training = sum(slowest.values()) + fill
    generation = _generation(shape, layout, job, hardware)
    push = _push(shape, layout, job, hardware)
    # a batch that is sampled ahead hides the shorter of the two
    rest = max(generation, training) if job.generation_lag else generation + training
    return StepTime(generation=generation, weight_push=push, pipeline_fill=fill, total=rest + push, **slowest)


def layer_flops(shape: ModelShape, tokens: int, length: int) -> int:
    """Of one layer's forward pass: 2 P a token, and 2 S h d a token for causal attention (half of the square)."""
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    products = shape.hidden_size * (2 * q + 2 * kv + 3 * shape.ffn_size)
    return tokens * (2 * products + 2 * length * q)


def _stage(shape: ModelShape, layout: Layout, job: Workload, hardware: Hardware, stage: int) -> dict[str, float]:
    rollouts, length = job.rollouts(layout.data), job.mean_length
    layers = shape.num_layers // layout.pipeline
    passes = job.iterations * (3 + job.recompute + job.kl) * rollouts
    passes += job.recomputed_logprobs * job.fresh_rollouts(layout.data)
    flops = layers * layer_flops(shape, passes * length, length)
    if stage == layout.pipeline - 1:
        # logits of the response tokens alone, and their gradients: no recomputation
        heads = job.iterations * (3 + job.kl) * rollouts + job.recomputed_logprobs * job.fresh_rollouts(layout.data)
        flops += heads * job.mean_response_length * 2 * shape.hidden_size * shape.vocab_size
    sent = traffic(shape, layout, job, stage)
    padded = shape.padded_vocab_size(job.vocab_divisible_by, layout.tensor)
    parameters = numel(rank_parameters(shape, padded, layout.tensor, layout.pipeline, stage))
    # gradient read; master weight and two moments read and written; weight written where it is not the master
    weight = job.dtype.itemsize if job.dtype.itemsize < 4 else 0
    touched = parameters * (4 + 2 * 12 + weight) // (layout.data if job.distributed_optimizer else 1)
    return {
        "forward_backward": flops / layout.tensor / hardware.flops(job.dtype),
        "tensor_parallel": sent.tensor_parallel / hardware.wire(layout.tensor_wire),
        "pipeline": (sent.pipeline + sent.tied_embedding) / hardware.wire(layout.pipeline_wire),
        "data_parallel": sent.data_parallel / hardware.wire(layout.data_wire),
        "optimizer": job.iterations * touched / hardware.hbm,
    }


def _generation(shape: ModelShape, layout: Layout, job: Workload, hardware: Hardware) -> float:
    """Prompts by arithmetic; then each token of a batch reads the weights once and each sequence its own keys and
    values, or is bound by arithmetic. The stages of the embedded engine work one after another."""
    rollouts = job.prompts_per_step * job.group_size / job.engines
    batch = min(job.engine_sequences, rollouts)
    response, prompt, e = job.mean_response_length, job.mean_prompt_length, job.dtype.itemsize
    head = shape.hidden_size * shape.vocab_size
    per_token = shape.num_layers * layer_flops(shape, 1, 0) // 2 + head
    gpu, peak = job.engine_tensor * hardware.hbm, job.engine_tensor * hardware.flops(job.dtype)
    # vLLM keeps the keys and values of a prompt for its whole group
    prompts = rollouts / (1 if job.engine == "embedded" else job.group_size)
    prefill = prompts * shape.num_layers * layer_flops(shape, prompt, prompt) / peak
    weights = per_token * e * max(response, rollouts * response / batch) / gpu
    cache_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * e
    cache = rollouts * response * (prompt + response / 2) * cache_token / gpu
    arithmetic = rollouts * response * 2 * per_token / peak
    wire = 0.0
    if job.engine == "embedded":
        # a pipeline's wire is no faster than the tensor-parallel one
        wire = sum(
            traffic(shape, layout, job, stage).generation / hardware.wire(layout.tensor_wire)
            for stage in range(layout.pipeline)
        )
    return prefill + max(weights + cache, arithmetic) + wire


def _push(shape: ModelShape, layout: Layout, job: Workload, hardware: Hardware) -> float:
    if job.engine == "embedded":
        return 0.0
    wire = hardware.wire("nvlink" if job.engine == "vllm-colocated" else "network")
    return pushed_bytes(shape, layout, job) / wire
