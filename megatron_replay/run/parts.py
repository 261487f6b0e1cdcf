"""The policy, the engine and the held-out evaluation that the flags ask for."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_replay import arguments
from megatron_replay.algorithm import Watch
from megatron_replay.config import GrpoConfig
from megatron_replay.engines.build import AnyEngine, build_engine
from megatron_replay.engines.child_process import clean_environment
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.engines.vllm_options import ServedModel
from megatron_replay.evaluation.heldout import HeldoutAccuracy
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout_log import RolloutLog
from megatron_replay.tasks.prompts import heldout_prompts
from megatron_replay.tasks.reward import Graders, Reward, needs_graders
from megatron_replay.tasks.task import Split, Task, build_task
from megatron_replay.tokenizer import Tokenizer
from megatron_replay.trainer.forward_step import HeadOptions
from megatron_replay.trainer.frozen_policy import FrozenPolicy
from megatron_replay.trainer.generation import ModelSampler
from megatron_replay.trainer.hf_checkpoint import load_hf_weights, save_hf
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.nonfinite import NonfiniteUpdates
from megatron_replay.trainer.optimizer import unwrap, wrap_for_training
from megatron_replay.trainer.parallel import ParallelGroups
from megatron_replay.trainer.policy import MegatronPolicy
from megatron_replay.weight_sync.model_shape import ModelShape


def build_policy(
    args: argparse.Namespace, config: GrpoConfig, shape: ModelShape, groups: ParallelGroups
) -> MegatronPolicy:
    model = build_model(shape, arguments.model_options(args), groups, args.seq_length)
    load_hf_weights(model, args.load_hf, shape, groups)
    ddp, optimizer, scheduler = wrap_for_training(model, arguments.optimizer_options(args))
    head = HeadOptions(
        loss=config.loss,
        vocab_size=shape.vocab_size,
        temperature=config.sampling.temperature,
        logits_memory_bytes=args.rl_logits_memory_mib << 20,
        age_buckets=config.replay.tau_max + 1 if config.replay.age_metrics else 2,
        logits_dtype=_logits_dtype(args),
        backend=arguments.kernel_backend(args),
    )
    bin_tokens = args.micro_batch_size * args.seq_length
    nonfinite = NonfiniteUpdates(
        args.rl_max_nonfinite_updates,
        Path(args.run_dir, "nonfinite"),
        lambda folder: save_hf(folder, model, shape, groups, base=args.load_hf),
    )
    return MegatronPolicy(
        ddp,
        optimizer,
        scheduler,
        groups,
        head,
        bin_tokens=bin_tokens,
        age_metrics=config.replay.age_metrics,
        generation_lag=config.generation_lag,
        nonfinite=nonfinite,
    )


def make_engine(
    args: argparse.Namespace,
    config: GrpoConfig,
    policy: MegatronPolicy | FrozenPolicy,
    shape: ModelShape,
    tokenizer: Tokenizer,
) -> AnyEngine:
    groups = policy.groups
    served = ServedModel(
        folder=Path(args.load_hf),
        dtype="bfloat16" if args.bf16 else "float32",
        max_model_len=args.seq_length,
        seed=args.seed,
        device="cuda" if groups.device.type == "cuda" else "cpu",
        fp32_lm_head=args.rl_fp32_lm_head,
    )
    return build_engine(
        args.rl_engine,
        lambda: _sampler(args, policy, shape),
        config.sampling,
        tokenizer.eos_id,
        arguments.vllm_config(args),
        served,
        shape,
        EngineRanks.build(groups.data_parallel(), groups.replica, groups.device),
        log_folder=Path(args.run_dir, "engine"),
        # on a terminal alone: in a file every step would leave a line
        progress=dist.get_rank() == 0 and sys.stderr.isatty(),
    )


def task_of(args: argparse.Namespace, split: Split) -> Task:
    """The problems of one split, by the flags of the data. A ValueError names the flag, also for a line of its file."""
    flag, path = (
        ("--data-path", args.data_path) if split == "train" else ("--heldout-data-path", args.heldout_data_path)
    )
    keys = {"prompt_key": args.rl_prompt_key, "answer_key": args.rl_answer_key}
    try:
        return build_task(args.rl_task, split=split, seed=args.seed, data_path=path, **keys)
    except ValueError as error:
        named = str(error).startswith("--")
        raise error if named else ValueError(f"{flag}: {error}") from None


def build_graders(args: argparse.Namespace, groups: ParallelGroups, tasks: Sequence[Task]) -> Graders | None:
    """Grader processes for this rank's replica; None where no task needs them. Every rank of the run calls it."""
    if not any(needs_graders(args.rl_reward, task) for task in tasks):
        return None
    # groups of its own: with --rl-generation-lag an engine's are in use while the last batch is judged
    ranks = EngineRanks.build(groups.data_parallel(), groups.replica, groups.device)
    return Graders(arguments.grader_options(args), clean_environment(), ranks)


def heldout_accuracy(
    args: argparse.Namespace,
    engine: AnyEngine,
    tokenizer: Tokenizer,
    policy: MegatronPolicy,
    graders: Graders | None,
) -> Callable[[int], float | None]:
    if not args.eval_prompts:
        return lambda step: None
    task = task_of(args, "heldout")
    prompts = heldout_prompts(
        task,
        tokenizer,
        args.eval_prompts,
        args.seq_length - args.rl_max_response_length,
        chat_template=args.rl_chat_template,
        filter_long=args.rl_filter_long_prompts,
    )
    return HeldoutAccuracy(
        prompts,
        args.eval_samples,
        engine,
        policy,
        Reward(task, tokenizer, graders),
        policy.groups.data_parallel(),
    )


def _sampler(args: argparse.Namespace, policy: MegatronPolicy | FrozenPolicy, shape: ModelShape) -> ModelSampler:
    return ModelSampler(
        unwrap(policy.model),
        policy.groups,
        vocab_size=shape.vocab_size,
        max_sequence_length=args.seq_length,
        batch_size=args.rl_generation_batch_size,
        logits_dtype=_logits_dtype(args),
    )


def _logits_dtype(args: argparse.Namespace) -> torch.dtype | None:
    return torch.float32 if args.rl_fp32_lm_head else None


def rollout_watch(
    args: argparse.Namespace, tokenizer: Tokenizer, start_step: int, policy: MegatronPolicy, buffer: RolloutReplayBuffer
) -> Watch | None:
    """Writes what a step trains on, for tools/report.py. Every rank calls it, after the run folder is there."""
    if not args.rl_log_rollouts_interval:
        return None
    log = RolloutLog(
        args.run_dir,
        args.rl_log_rollouts_interval,
        args.rl_log_rollouts,
        tokenizer=tokenizer,
        start_step=start_step,
        group=policy.groups.data_parallel(),
        enabled=dist.get_rank() == 0,
    )
    return lambda step, batch, draw: log.record(step, batch, draw, buffer, policy.logprobs)
