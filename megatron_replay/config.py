"""Settings of the method as small frozen dataclasses.

Every check raises a ValueError whose message begins with the field's name and carries the value;
`arguments.py` puts the flag in front of it. Nothing here knows argparse, torch.distributed or megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from megatron_replay.importance import ImportanceOptions
from megatron_replay.ops.checks import require, require_choice
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.ops.priority_draw import ReplayPriority

AdvantageStd = Literal["population", "sample", "none"]
ReplayComposition = Literal["fresh-anchored", "pool"]
OldLogprobs = Literal["engine", "recomputed"]
TransformerImpl = Literal["auto", "local", "transformer_engine"]
LrDecayStyle = Literal["constant", "linear", "cosine", "inverse-square-root"]
WeightTransport = Literal["auto", "gloo", "nccl", "shared-memory", "cuda-ipc"]


@dataclass(frozen=True)
class ReplayConfig:
    """What is kept of past rollouts and how it is drawn again.

    A stored rollout i is drawn with probability P(i) ~ (|A_i| + priority_eps) ** priority_alpha while
    step - birth_step <= tau_max. Ages are counted in steps of the outer loop.
    """

    replay_ratio: float = 0.5  # replayed rollouts per fresh rollout; 0 is plain GRPO; a pool has none
    priority: ReplayPriority = "abs-advantage"
    composition: ReplayComposition = "fresh-anchored"
    priority_alpha: float = 0.5
    priority_eps: float = 1e-6
    tau_max: int = 10
    warmup_steps: int = 20
    capacity: int = 30_000  # rollouts of all data-parallel shards together; the oldest go first
    with_replacement: bool = False
    # not from the paper
    importance_beta: float = 0.0  # exponent of prioritized replay's importance weights; 0 is off
    ess_floor: float = 0.0  # below this effective sample size of the replayed rollouts fewer are drawn; 0 is off
    age_metrics: bool = False  # ratio, clip fraction and ESS for each age

    def __post_init__(self) -> None:
        require(0 <= self.replay_ratio < math.inf, "replay_ratio", self.replay_ratio, "must be at least 0 and finite")
        require_choice("priority", self.priority, get_args(ReplayPriority))
        require_choice("composition", self.composition, get_args(ReplayComposition))
        require(
            self.replay_ratio > 0 or self.composition == "fresh-anchored",
            "replay_ratio",
            self.replay_ratio,
            "must be above 0 with composition pool, which has no ratio (plain GRPO is 0 with fresh-anchored)",
        )
        require(
            0 <= self.priority_alpha < math.inf,
            "priority_alpha",
            self.priority_alpha,
            "must be at least 0 and finite",
        )
        require(0 < self.priority_eps < math.inf, "priority_eps", self.priority_eps, "must be positive and finite")
        require(self.tau_max >= 1, "tau_max", self.tau_max, "must be at least 1 step")
        require(self.warmup_steps >= 0, "warmup_steps", self.warmup_steps, "must be at least 0")
        require(self.capacity >= 1, "capacity", self.capacity, "must be at least 1 rollout")
        require(0 <= self.importance_beta <= 1, "importance_beta", self.importance_beta, "must be in [0, 1]")
        require(0 <= self.ess_floor < 1, "ess_floor", self.ess_floor, "must be in [0, 1)")
        require(
            self.ess_floor == 0 or self.composition == "fresh-anchored",
            "ess_floor",
            self.ess_floor,
            "must be 0 with composition pool, whose draw is the whole batch",
        )

    @property
    def enabled(self) -> bool:
        return self.replay_ratio > 0


@dataclass(frozen=True)
class SamplingConfig:
    """How the engine samples. Behavior log-probs are those of logits / temperature."""

    max_response_length: int = 1024  # tokens, final EOS included
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    allow_truncated_sampling: bool = False
    seed: int = 1234

    def __post_init__(self) -> None:
        require(
            self.max_response_length >= 1, "max_response_length", self.max_response_length, "must be at least 1 token"
        )
        require(0 < self.temperature < math.inf, "temperature", self.temperature, "must be positive and finite")
        require(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        require(self.top_k >= 0, "top_k", self.top_k, "must be at least 0 (0 is off)")
        allowed = self.allow_truncated_sampling
        why = (
            "renormalises the behavior log-probs on the kept tokens, which biases every ratio by the kept mass; "
            "set allow_truncated_sampling to accept that"
        )
        require(allowed or self.top_p == 1, "top_p", self.top_p, f"below 1 {why}")
        require(allowed or self.top_k == 0, "top_k", self.top_k, f"above 0 {why}")


@dataclass(frozen=True)
class GrpoConfig:
    """One run of the method: what is collected each step, how it is scored, replayed and trained on."""

    train_iters: int
    prompts_per_step: int
    group_size: int
    iterations: int = 1  # updates per collected batch
    advantage_std: AdvantageStd = "population"
    old_logprobs: OldLogprobs = "engine"
    generation_lag: int = 0  # 1: the next batch is sampled while this one trains, with weights one update older
    seed: int = 1234
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    loss: GrpoLossOptions = field(default_factory=GrpoLossOptions)
    importance: ImportanceOptions = field(default_factory=ImportanceOptions)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        require(self.train_iters >= 0, "train_iters", self.train_iters, "must be at least 0")
        require(self.prompts_per_step >= 1, "prompts_per_step", self.prompts_per_step, "must be at least 1")
        require(
            self.group_size >= 2,
            "group_size",
            self.group_size,
            "must be at least 2 (a group of one has no relative advantage)",
        )
        require(self.iterations >= 1, "iterations", self.iterations, "must be at least 1")
        require_choice("advantage_std", self.advantage_std, get_args(AdvantageStd))
        require_choice("old_logprobs", self.old_logprobs, get_args(OldLogprobs))
        require_choice("generation_lag", self.generation_lag, (0, 1))
        require(
            self.generation_lag == 0 or self.old_logprobs == "engine",
            "generation_lag",
            self.generation_lag,
            "must be 0 with old_logprobs recomputed (--rl-replay-old-logprobs): the weights that sampled the rollouts "
            "are then no longer there to recompute with",
        )
        require(
            not self.importance.enabled or self.old_logprobs == "recomputed",
            "old_logprobs",
            self.old_logprobs,
            "must be recomputed where rollouts are weighed by trainer / engine probability",
        )


@dataclass(frozen=True)
class VllmConfig:
    """vLLM engines: where they run, how weights reach them, how long anything may take."""

    server_urls: tuple[str, ...] = ()  # servers that the user started; without any they are spawned
    servers: int = 1  # spawned servers
    host: str = "127.0.0.1"  # address that a spawned server listens on
    python: str = ""  # interpreter that runs what we start, where vLLM has an environment of its own; "": this one
    tensor_parallel_size: int = 1  # of each engine
    max_num_seqs: int = 256  # sequences that an engine decodes at once
    memory_gib: float = 2.0  # key-value cache of an engine on a CPU
    gpu_memory_utilization: float = 0.5  # share of a GPU's memory that an engine takes
    unseeded: bool = False  # without it every sample has a seed of its own: reruns draw the same, in slower batches
    transport: WeightTransport = "auto"
    bucket_mib: int = 64
    sync_timeout: float = 300.0  # seconds
    request_timeout: float = 600.0
    startup_timeout: float = 600.0
    retries: int = 3  # times that a prompt is sampled again, or weights are pushed again

    def __post_init__(self) -> None:
        require_choice("transport", self.transport, get_args(WeightTransport))
        for name in ("servers", "tensor_parallel_size", "max_num_seqs", "bucket_mib"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "must be at least 1")
        for name in ("memory_gib", "sync_timeout", "request_timeout", "startup_timeout"):
            require(0 < getattr(self, name) < math.inf, name, getattr(self, name), "must be positive and finite")
        require(
            0 < self.gpu_memory_utilization <= 1,
            "gpu_memory_utilization",
            self.gpu_memory_utilization,
            "must be in (0, 1]",
        )
        require(self.retries >= 0, "retries", self.retries, "must be at least 0")
        object.__setattr__(self, "server_urls", tuple(self.server_urls))
        for url in self.server_urls:
            require(url.startswith(("http://", "https://")), "server_urls", url, "must begin with http:// or https://")


@dataclass(frozen=True)
class ModelOptions:
    """How the shape is built: precision, layer implementation, memory."""

    dtype: torch.dtype = torch.float32
    transformer_impl: TransformerImpl = "auto"
    sequence_parallel: bool = False
    make_vocab_size_divisible_by: int = 128
    recompute_activations: bool = False
    fp32_lm_head: bool = False  # logits in float32, from weights and hidden states as they are

    def __post_init__(self) -> None:
        # float16 is left out: the gradients of the loss would underflow before a loss scale reaches them
        require_choice("dtype", self.dtype, (torch.float32, torch.bfloat16))
        require_choice("transformer_impl", self.transformer_impl, get_args(TransformerImpl))
        require(
            self.make_vocab_size_divisible_by >= 1,
            "make_vocab_size_divisible_by",
            self.make_vocab_size_divisible_by,
            "must be at least 1",
        )


@dataclass(frozen=True)
class OptimizerOptions:
    """Adam and its learning-rate schedule, counted in updates."""

    lr: float
    total_updates: int
    min_lr: float = 0.0
    lr_decay_style: LrDecayStyle = "constant"
    lr_warmup_iters: int = 0
    lr_decay_iters: int | None = None
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8
    clip_grad: float = 1.0
    use_distributed_optimizer: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "clip_grad"):
            require(0 <= getattr(self, name) < math.inf, name, getattr(self, name), "must be at least 0 and finite")
        require(0 <= self.min_lr <= self.lr, "min_lr", self.min_lr, f"must be between 0 and lr {self.lr}")
        require_choice("lr_decay_style", self.lr_decay_style, get_args(LrDecayStyle))
        require(
            0 <= self.lr_warmup_iters < self.decay_updates,
            "lr_warmup_iters",
            self.lr_warmup_iters,
            f"must be below the {self.decay_updates} updates of the decay",
        )
        for name in ("adam_beta1", "adam_beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "must be in [0, 1)")
        require(0 < self.adam_eps < math.inf, "adam_eps", self.adam_eps, "must be positive and finite")

    @property
    def decay_updates(self) -> int:
        return max(1, self.total_updates if self.lr_decay_iters is None else self.lr_decay_iters)
