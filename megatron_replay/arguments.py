"""Megatron-style flags, and the dataclasses they become. The only place that knows argparse.

Each flag that sets a field of a dataclass stands in one table row; a value the dataclass refuses ends the
program with the flag's name in front of the dataclass's own words.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import torch

from megatron_replay.config import (
    GrpoConfig,
    ModelOptions,
    OptimizerOptions,
    ReplayConfig,
    SamplingConfig,
    VllmConfig,
)
from megatron_replay.importance import ImportanceOptions
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.tasks.grader_pool import GraderOptions

C = TypeVar("C")
ENGINES = ("embedded", "vllm-server", "vllm-colocated")


@dataclass(frozen=True)
class Flag:
    """One flag that sets `field` of `target`; type, choices and default are the dataclass's own."""

    target: type
    field: str
    name: str
    help: str

    @property
    def dest(self) -> str:
        return self.name.lstrip("-").replace("-", "_")


FLAGS: dict[str, tuple[Flag, ...]] = {
    "replay": (
        Flag(ReplayConfig, "replay_ratio", "--rl-replay-ratio", "replayed rollouts for each fresh one; 0 is plain GRPO; a pool has no ratio"),
        Flag(ReplayConfig, "priority", "--rl-replay-priority", "what a stored rollout is drawn by"),
        Flag(ReplayConfig, "composition", "--rl-replay-composition", "fresh-anchored: all of the fresh batch and a draw; pool: one draw from both, as large as the fresh batch, whatever --rl-replay-ratio says"),
        Flag(ReplayConfig, "priority_alpha", "--rl-replay-alpha", "exponent of the priority"),
        Flag(ReplayConfig, "priority_eps", "--rl-replay-eps", "added to |advantage| before the exponent"),
        Flag(ReplayConfig, "tau_max", "--rl-replay-tau-max", "largest age, in steps, at which a rollout is still drawn"),
        Flag(ReplayConfig, "warmup_steps", "--rl-replay-warmup-steps", "steps without replay at the start"),
        Flag(ReplayConfig, "capacity", "--rl-replay-capacity", "rollouts kept over all ranks; the oldest go first"),
        Flag(ReplayConfig, "with_replacement", "--rl-replay-with-replacement", "draw with replacement"),
        Flag(ReplayConfig, "importance_beta", "--rl-replay-importance-beta", "not from the paper: weigh a drawn rollout by (w_min / w)^this, as prioritized replay does; 0 is off"),
        Flag(ReplayConfig, "ess_floor", "--rl-replay-ess-floor", "not from the paper: draw fewer while the replayed rollouts' effective sample size is below this; 0 is off"),
        Flag(ReplayConfig, "age_metrics", "--rl-replay-age-metrics", "not from the paper: ratio, clip fraction and effective sample size for each age"),
        Flag(GrpoConfig, "old_logprobs", "--rl-replay-old-logprobs", "whose log-probs at birth the ratio is taken against; recomputed (by the trainer) needs --rl-generation-lag 0"),
    ),
    "grpo": (
        Flag(GrpoConfig, "prompts_per_step", "--grpo-prompts-per-step", "prompts of a step, over all ranks"),
        Flag(GrpoConfig, "group_size", "--grpo-group-size", "rollouts of a prompt"),
        Flag(GrpoConfig, "iterations", "--grpo-iterations", "updates on each collected batch"),
        Flag(GrpoConfig, "generation_lag", "--rl-generation-lag", "1: sample the next batch while this one trains, with weights one step older (vllm-server alone)"),
        Flag(GrpoConfig, "advantage_std", "--rl-advantage-std", "what an advantage is divided by; none is Dr. GRPO"),
        Flag(GrpoLossOptions, "clip_eps_low", "--grpo-clamp-eps-lower", "the ratio is clipped below 1 - this"),
        Flag(GrpoLossOptions, "clip_eps_high", "--grpo-clamp-eps-upper", "the ratio is clipped above 1 + this"),
        Flag(GrpoLossOptions, "kl_beta", "--grpo-kl-beta", "weight of the KL divergence from the --load-hf model; 0 is off"),
        Flag(GrpoLossOptions, "entropy_weight", "--grpo-entropy-term-weight", "weight of the entropy bonus; 0 is off"),
        Flag(GrpoLossOptions, "dual_clip", "--rl-dual-clip", "bound, times |A|, on the loss of a negative advantage; not set is off"),
        Flag(GrpoLossOptions, "ratio_level", "--rl-ratio-level", "token, or sequence (GSPO)"),
        Flag(GrpoLossOptions, "objective", "--rl-loss-objective", "clip (PPO), or cispo"),
        Flag(GrpoLossOptions, "kl_estimator", "--rl-kl-estimator", "estimator of the KL divergence"),
        Flag(GrpoLossOptions, "log_ratio_clamp", "--rl-log-ratio-clamp", "log-ratios are clamped to +- this before exp"),
        Flag(GrpoLossOptions, "aggregation", "--rl-loss-aggregation", "how token losses add up"),
        Flag(GrpoLossOptions, "fixed_length", "--rl-loss-fixed-length", "tokens that fixed-length divides by"),
        Flag(ImportanceOptions, "enabled", "--rl-inference-logprobs-is-correction", "weigh a rollout by trainer / engine probability at birth"),
        Flag(ImportanceOptions, "cap", "--rl-importance-sampling-truncation-coef", "bound on that weight"),
        Flag(ImportanceOptions, "mode", "--rl-importance-sampling-mode", "what happens above the bound: set to it, or to 0"),
    ),
    "sampling": (
        Flag(SamplingConfig, "max_response_length", "--rl-max-response-length", "tokens of a response, final EOS included"),
        Flag(SamplingConfig, "temperature", "--rl-default-temperature", "sampling temperature, of the log-probs too"),
        Flag(SamplingConfig, "top_p", "--rl-default-top-p", "nucleus sampling; below 1 it biases the ratios"),
        Flag(SamplingConfig, "top_k", "--rl-default-top-k", "top-k sampling; above 0 it biases the ratios"),
        Flag(SamplingConfig, "allow_truncated_sampling", "--rl-allow-truncated-sampling", "accept top-p below 1 or top-k above 0"),
    ),
    "reward": (
        Flag(GraderOptions, "reward", "--rl-reward", "exact: the task's own score (of reasoning-gym, in grader processes); math-verify; or MODULE:FUNCTION, called as function(prompt=, response=, answer=, extra=)"),
        Flag(GraderOptions, "workers", "--rl-grader-workers", "processes of a data-parallel replica that judge responses"),
        Flag(GraderOptions, "timeout", "--rl-grader-timeout", "seconds that a response may take to judge; a later one is counted, and gets 0, or with MODULE:FUNCTION is dropped"),
        Flag(GraderOptions, "memory_mib", "--rl-grader-memory-mib", "address space of a grader process"),
    ),
    "vllm": (
        Flag(VllmConfig, "server_urls", "--rl-vllm-server-url", "servers that run already (examples/serve_vllm.sh); without any, rank 0 starts them"),
        Flag(VllmConfig, "servers", "--rl-vllm-servers", "servers that rank 0 starts"),
        Flag(VllmConfig, "host", "--rl-vllm-host", "address that a started server listens on; another than loopback needs VLLM_API_KEY"),
        Flag(VllmConfig, "python", "--rl-vllm-python", "Python of the environment that has vLLM and this package; default: the one that trains"),
        Flag(VllmConfig, "tensor_parallel_size", "--rl-vllm-tensor-parallel-size", "tensor parallelism of each engine"),
        Flag(VllmConfig, "max_num_seqs", "--rl-vllm-max-num-seqs", "sequences that an engine decodes at once"),
        Flag(VllmConfig, "memory_gib", "--rl-vllm-memory-gib", "key-value cache of an engine on a CPU"),
        Flag(VllmConfig, "gpu_memory_utilization", "--rl-vllm-gpu-memory-utilization", "share of a GPU's memory that an engine takes"),
        Flag(VllmConfig, "unseeded", "--rl-vllm-unseeded", "no seed for each sample: faster in large batches, and no rerun draws the same"),
        Flag(VllmConfig, "transport", "--rl-vllm-transport", "how weights travel; auto: nccl or gloo to servers, cuda-ipc or shared-memory to a colocated engine"),
        Flag(VllmConfig, "bucket_mib", "--rl-vllm-bucket-mib", "weights sent at once; a larger tensor goes alone"),
        Flag(VllmConfig, "sync_timeout", "--rl-vllm-sync-timeout", "seconds that any one step of a weight push may take"),
        Flag(VllmConfig, "request_timeout", "--rl-vllm-request-timeout", "seconds that a request (colocated: a batch) may take"),
        Flag(VllmConfig, "startup_timeout", "--rl-vllm-startup-timeout", "seconds that an engine may take to start, or servers of yours to answer"),
        Flag(VllmConfig, "retries", "--rl-vllm-retries", "times that a prompt or a weight push is tried again; then the prompt's group is dropped, or the run ends"),
    ),
    "optimizer": (
        Flag(OptimizerOptions, "lr", "--lr", "learning rate"),
        Flag(OptimizerOptions, "min_lr", "--min-lr", "where the decay ends"),
        Flag(OptimizerOptions, "lr_decay_style", "--lr-decay-style", "shape of the decay"),
        Flag(OptimizerOptions, "lr_warmup_iters", "--lr-warmup-iters", "updates of linear warm-up"),
        Flag(OptimizerOptions, "lr_decay_iters", "--lr-decay-iters", "updates until min-lr; default: all of them"),
        Flag(OptimizerOptions, "weight_decay", "--weight-decay", "decoupled weight decay"),
        Flag(OptimizerOptions, "adam_beta1", "--adam-beta1", "Adam's first moment"),
        Flag(OptimizerOptions, "adam_beta2", "--adam-beta2", "Adam's second moment"),
        Flag(OptimizerOptions, "adam_eps", "--adam-eps", "Adam's epsilon"),
        Flag(OptimizerOptions, "clip_grad", "--clip-grad", "bound on the gradient norm; 0 is off"),
        Flag(OptimizerOptions, "use_distributed_optimizer", "--use-distributed-optimizer", "shard optimizer state over data-parallel ranks"),
    ),
    "model": (
        Flag(ModelOptions, "transformer_impl", "--transformer-impl", "layers; auto is Transformer Engine on CUDA where installed, with --bf16"),
        Flag(ModelOptions, "sequence_parallel", "--sequence-parallel", "shard activations over tensor-parallel ranks between layers"),
        Flag(ModelOptions, "make_vocab_size_divisible_by", "--make-vocab-size-divisible-by", "pad the vocabulary to a multiple of this"),
        Flag(ModelOptions, "fp32_lm_head", "--rl-fp32-lm-head", "logits in float32, in trainer and engine: smaller gaps between their log-probs with --bf16"),
        Flag(ModelOptions, "recompute_activations", "--recompute-activations", "recompute layers in the backward pass"),
    ),
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Says one line for a bad flag, once: the usage of a hundred flags, from every rank, would bury it."""

    def error(self, message: str) -> NoReturn:
        first = os.environ.get("RANK", "0") == "0"
        self.exit(2, f"{self.prog}: error: {message}\n(--help lists all flags)\n" if first else None)

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """Flags of an @FILE: any number a line, # begins a comment."""
        return arg_line.split("#")[0].split()


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(
        description="GRPO with rollout-level, advantage-prioritized replay on Megatron-core. Start it with torchrun.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    run = parser.add_argument_group("run")
    run.add_argument("--run-dir", required=True, help="folder for metrics, pictures, summary and checkpoints")
    run.add_argument("--train-iters", type=int, required=True, help="steps of the outer loop")
    run.add_argument("--seed", type=int, default=1234, help="keys every random number of the run")
    run.add_argument("--save", help="folder of the checkpoints; default: RUN_DIR/checkpoints")
    run.add_argument(
        "--save-interval", type=int, default=50, help="steps between checkpoints; one is always written at the end"
    )
    run.add_argument("--save-keep-last", type=int, default=0, help="checkpoints kept; older ones are removed; 0: all")
    run.add_argument("--load", help="folder of checkpoints to resume from")
    run.add_argument(
        "--exit-duration-in-mins",
        type=float,
        default=0.0,
        help="save and end after the step in which these minutes are over; 0: no limit. SIGTERM does so too, and SIGUSR1 "
        "where torchrun passes it on (--signals-to-handle)",
    )
    run.add_argument("--save-hf", help="folder for the trained model as a Hugging Face checkpoint; must not exist")
    run.add_argument(
        "--rl-replay-allow-empty-buffer", action="store_true", help="resume although the stored rollouts are missing"
    )
    run.add_argument(
        "--rl-replay-buffer-device",
        default="auto",
        choices=("auto", "cpu"),
        help="memory that the stored rollouts lie in; auto is the device that trains",
    )
    run.add_argument(
        "--rl-max-nonfinite-updates",
        type=int,
        default=3,
        help="updates in a row with a NaN or infinity in loss or gradient, all skipped, that end the run",
    )
    run.add_argument(
        "--rl-train-batch", help="folder that such a run left behind: train on its batch once, print the metrics, end"
    )
    run.add_argument(
        "--rl-log-rollouts-interval",
        type=int,
        default=10,
        help="steps between rollouts that are written to RUN_DIR/rollouts.jsonl for tools/report.py; 0 writes none",
    )
    run.add_argument("--rl-log-rollouts", type=int, default=8, help="rollouts written of such a step")
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="start nothing: check flags, model, shards, checkpoint, data and reward, print the plan of memory and time",
    )
    run.add_argument("--dry-run-world-size", type=int, help="processes of the run that is planned; default: TP x PP")
    run.add_argument("--dry-run-gpus-per-node", type=int, default=8, help="GPUs of a node of the run that is planned")
    run.add_argument("--dry-run-gpu-memory-gb", type=float, default=80.0, help="memory of each of them, 10^9 bytes")
    run.add_argument(
        "--eval-prompts", type=int, default=256, help="held-out prompts, evaluated before and after; 0 is off"
    )
    run.add_argument("--eval-samples", type=int, default=4, help="samples of each held-out prompt")
    layout = parser.add_argument_group("layout")
    layout.add_argument("--tensor-model-parallel-size", type=int, default=1, help="tensor parallelism")
    layout.add_argument("--pipeline-model-parallel-size", type=int, default=1, help="pipeline parallelism")
    layout.add_argument(
        "--context-parallel-size", type=int, default=1, help="only 1: the loss is not split over context ranks"
    )
    layout.add_argument(
        "--distributed-timeout-minutes", type=float, default=10.0, help="a collective that takes longer ends the run"
    )
    model = parser.add_argument_group("model and data")
    model.add_argument(
        "--load-hf", required=True, help="Hugging Face checkpoint folder: the initial and the reference model"
    )
    model.add_argument(
        "--tokenizer-type", default="HuggingFaceTokenizer", help="SentencePieceTokenizer or HuggingFaceTokenizer"
    )
    model.add_argument("--tokenizer-model", help=".model file, or folder; default: the --load-hf folder")
    model.add_argument(
        "--seq-length", type=int, required=True, help="tokens of the longest prompt and response together"
    )
    model.add_argument(
        "--micro-batch-size", type=int, default=1, help="a packed microbatch holds this times --seq-length tokens"
    )
    model.add_argument("--bf16", action="store_true", help="train in bfloat16 (float32 master weights)")
    model.add_argument("--rl-task", default="sort-digits", help="sort-digits, jsonl, or reasoning-gym:NAME")
    model.add_argument("--data-path", help="JSONL file of training prompts")
    model.add_argument("--heldout-data-path", help="JSONL file of held-out prompts")
    model.add_argument(
        "--rl-prompt-key", help="field of a JSONL line that holds the prompt; docs/data.md has the rules"
    )
    model.add_argument(
        "--rl-answer-key", help="field of a JSONL line that holds the answer; a dot leads into an object"
    )
    model.add_argument(
        "--rl-chat-template",
        default="none",
        help="none: a prompt is encoded as it is; model: the tokenizer's; or a file",
    )
    model.add_argument(
        "--rl-filter-long-prompts",
        action="store_true",
        help="leave out prompts longer than --seq-length less --rl-max-response-length, which else end the run",
    )
    model.add_argument("--rl-engine", default="embedded", choices=ENGINES, help="where rollouts are sampled")
    model.add_argument(
        "--rl-generation-batch-size", type=int, default=256, help="rows that the embedded engine samples at once"
    )
    model.add_argument(
        "--rl-logits-memory-mib",
        type=int,
        default=1024,
        help="most memory on a rank for logits, which exist for one chunk of tokens at a time",
    )
    model.add_argument(
        "--rl-kernel-backend",
        default="auto",
        choices=("auto", "reference", "triton"),
        help="implementation of the loss kernels; auto is triton on a GPU, reference (plain torch) on a CPU",
    )
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            _add(group, flag)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check what no dataclass checks. Ends the program (code 2) on a bad value."""
    parser = build_parser()
    args = parser.parse_args(argv)
    positive = (
        "save_interval", "tensor_model_parallel_size", "pipeline_model_parallel_size",
        "seq_length", "micro_batch_size", "rl_generation_batch_size", "rl_logits_memory_mib", "eval_samples",
        "rl_max_nonfinite_updates", "rl_log_rollouts", "dry_run_gpus_per_node",
    )  # fmt: skip
    for name in positive:
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    for name in ("distributed_timeout_minutes", "dry_run_gpu_memory_gb"):
        if not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be positive and finite, got {getattr(args, name)}")
    for name in ("eval_prompts", "save_keep_last", "exit_duration_in_mins", "rl_log_rollouts_interval"):
        if not 0 <= getattr(args, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be at least 0 and finite, got {getattr(args, name)}")
    if args.context_parallel_size != 1:
        parser.error(f"--context-parallel-size must be 1, got {args.context_parallel_size}")
    if args.rl_max_response_length >= args.seq_length:
        parser.error(
            f"--seq-length must hold a prompt and --rl-max-response-length {args.rl_max_response_length}, "
            f"got {args.seq_length}"
        )
    if args.rl_generation_lag and args.rl_engine != "vllm-server":
        parser.error(
            f"--rl-generation-lag must be 0 with --rl-engine {args.rl_engine}, which samples on what trains, "
            f"got {args.rl_generation_lag}"
        )
    if args.rl_engine == "vllm-server" and args.rl_vllm_max_num_seqs < max(args.grpo_group_size, args.eval_samples):
        parser.error(
            f"--rl-vllm-max-num-seqs must hold a group of --grpo-group-size {args.grpo_group_size} and "
            f"--eval-samples {args.eval_samples}, got {args.rl_vllm_max_num_seqs}"
        )
    # the dataclasses check the rest: a bad value ends here, before any process group starts
    grpo_config(args)
    optimizer_options(args)
    model_options(args)
    vllm_config(args)
    grader_options(args)
    return args


def grpo_config(args: argparse.Namespace) -> GrpoConfig:
    sampling = _build(SamplingConfig, args, seed=args.seed)
    return _build(
        GrpoConfig,
        args,
        train_iters=args.train_iters,
        seed=args.seed,
        replay=_build(ReplayConfig, args),
        loss=_build(GrpoLossOptions, args),
        importance=_build(ImportanceOptions, args),
        sampling=sampling,
    )


def optimizer_options(args: argparse.Namespace) -> OptimizerOptions:
    return _build(OptimizerOptions, args, total_updates=args.train_iters * args.grpo_iterations)


def model_options(args: argparse.Namespace) -> ModelOptions:
    return _build(ModelOptions, args, dtype=torch.bfloat16 if args.bf16 else torch.float32)


def vllm_config(args: argparse.Namespace) -> VllmConfig:
    return _build(VllmConfig, args)


def grader_options(args: argparse.Namespace) -> GraderOptions:
    return _build(GraderOptions, args)


def kernel_backend(args: argparse.Namespace) -> str | None:
    """What the ops take as `backend`: None lets them choose by device."""
    return None if args.rl_kernel_backend == "auto" else args.rl_kernel_backend


def _add(group: Any, flag: Flag) -> None:
    default = next(f.default for f in dataclasses.fields(flag.target) if f.name == flag.field)
    hint = get_type_hints(flag.target)[flag.field]
    if hint is bool:
        group.add_argument(flag.name, action="store_true", help=flag.help)
        return
    if get_origin(hint) is tuple:
        group.add_argument(flag.name, type=get_args(hint)[0], nargs="*", default=default, help=flag.help)
        return
    options = get_args(hint)  # of a Literal, or of `type | None`
    choices = options if get_origin(hint) is Literal else None
    required = default is dataclasses.MISSING
    group.add_argument(
        flag.name,
        type=str if choices else options[0] if options else hint,
        choices=choices,
        required=required,
        default=None if required else default,
        help=flag.help,
    )


def _build(target: type[C], args: argparse.Namespace, **more: Any) -> C:
    """The dataclass from its flags; a refused value ends the program and names the flag."""
    flags = {f.field: f for group in FLAGS.values() for f in group if f.target is target}
    try:
        return target(**{name: getattr(args, f.dest) for name, f in flags.items()}, **more)
    except ValueError as error:
        field = str(error).split()[0]
        name = flags[field].name if field in flags else f"--{field.replace('_', '-')}"
        build_parser().error(f"{name}: {error}")
