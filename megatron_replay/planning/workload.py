"""Workload: everything of a run that its memory, time and traffic depend on, beside the model and the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from megatron_replay import arguments
from megatron_replay.arena_size import arena_tokens
from megatron_replay.planning.layout import Layout

EngineKind = Literal["embedded", "vllm-server", "vllm-colocated"]


@dataclass(frozen=True)
class Workload:
    """Lengths are in tokens. A `mean_` is for times and traffic; memory is planned for the longest."""

    seq_length: int  # of the longest prompt and response together
    micro_batch_size: int  # a packed microbatch holds this times seq_length tokens
    prompts_per_step: int
    group_size: int
    replay_ratio: float  # replayed rollouts for each fresh one
    max_response_length: int
    mean_prompt_length: int
    mean_response_length: int
    capacity: int  # rollouts of a shard's ring
    arena_tokens: int  # of a shard
    dtype: torch.dtype
    distributed_optimizer: bool
    sequence_parallel: bool
    recompute: bool
    vocab_divisible_by: int
    logits_bytes: int  # of one chunk
    engine: EngineKind
    engines: int = 1  # servers; embedded and colocated: one for each replica
    engine_tensor: int = 1
    engine_sequences: int = 256  # decoded at once by one engine
    engine_share: float = 0.5  # of a GPU's memory, of a colocated engine
    bucket_bytes: int = 64 << 20
    buffer_on_cpu: bool = False
    iterations: int = 1
    kl: bool = False
    recomputed_logprobs: bool = False
    generation_lag: bool = False

    @property
    def bin_tokens(self) -> int:
        return self.micro_batch_size * self.seq_length

    def rollouts(self, data: int) -> int:
        """Rollouts that one data-parallel rank trains, where every group is informative and the draw is balanced."""
        fresh = self.prompts_per_step * self.group_size
        return -(-(fresh + round(self.replay_ratio * fresh)) // data)

    def fresh_rollouts(self, data: int) -> int:
        return -(-self.prompts_per_step * self.group_size // data)

    @property
    def mean_length(self) -> int:
        return self.mean_prompt_length + self.mean_response_length


def workload(
    args: Any, layout: Layout, *, mean_prompt_length: int | None = None, mean_response_length: int | None = None
) -> Workload:
    """The workload of a run's flags, as `arguments.parse_args` returns them.

    Without means, every prompt and every response has the largest length. Raises ValueError that names a flag.
    """
    config, model = arguments.grpo_config(args), arguments.model_options(args)
    vllm, replay = arguments.vllm_config(args), config.replay
    if args.grpo_prompts_per_step % layout.data:
        raise ValueError(
            f"--grpo-prompts-per-step must be a multiple of the {layout.data} data-parallel ranks, "
            f"got {args.grpo_prompts_per_step}"
        )
    response = config.sampling.max_response_length
    return Workload(
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        prompts_per_step=config.prompts_per_step,
        group_size=config.group_size,
        # a pool of fresh and stored rollouts is drawn from, and as many trained as are fresh
        replay_ratio=replay.replay_ratio if replay.composition == "fresh-anchored" else 0.0,
        max_response_length=response,
        mean_prompt_length=mean_prompt_length or args.seq_length - response,
        mean_response_length=mean_response_length or response,
        capacity=replay.capacity,
        arena_tokens=arena_tokens(config, args.seq_length, layout.data),
        dtype=model.dtype,
        distributed_optimizer=args.use_distributed_optimizer,
        sequence_parallel=model.sequence_parallel,
        recompute=model.recompute_activations,
        vocab_divisible_by=model.make_vocab_size_divisible_by,
        logits_bytes=args.rl_logits_memory_mib << 20,
        engine=args.rl_engine,
        engines=(len(vllm.server_urls) or vllm.servers) if args.rl_engine == "vllm-server" else layout.data,
        engine_tensor=layout.tensor if args.rl_engine == "embedded" else vllm.tensor_parallel_size,
        engine_sequences=args.rl_generation_batch_size if args.rl_engine == "embedded" else vllm.max_num_seqs,
        engine_share=vllm.gpu_memory_utilization,
        bucket_bytes=vllm.bucket_mib << 20,
        buffer_on_cpu=args.rl_replay_buffer_device == "cpu",
        iterations=config.iterations,
        kl=config.loss.kl_beta > 0,
        recomputed_logprobs=config.old_logprobs == "recomputed",
        generation_lag=config.generation_lag > 0,
    )
