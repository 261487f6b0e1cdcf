"""Train a Hugging Face checkpoint by GRPO with replay, on any TP x PP x DP layout.

    torchrun --nproc-per-node 2 examples/pretrain_replay_grpo.py @examples/quickstart/flags.txt --run-dir runs/mine

Flags may stand in a file, one or more a line, named by @FILE; later flags win. --help lists them.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# megatron-core says on import, on every rank, which optional packages are absent
warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine).*(not installed|Falling back).*")

import torch
import torch.distributed as dist

from megatron_replay.trainer import cpu

cpu.install()  # before the first model: megatron-core on a machine without CUDA

from megatron_replay import arguments
from megatron_replay.algorithm import replay_grpo
from megatron_replay.config import GrpoConfig
from megatron_replay.engines.build import AnyEngine, build_engine
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.engines.vllm_options import ServedModel
from megatron_replay.evaluation.heldout import HeldoutAccuracy
from megatron_replay.ops import backend as backends
from megatron_replay.replay_buffer import MOST_TOKENS, RolloutReplayBuffer
from megatron_replay.tasks.prompts import PromptSource, heldout_prompts
from megatron_replay.tasks.reward import Reward
from megatron_replay.tasks.task import build_task
from megatron_replay.telemetry import PhaseTimer, RunLog
from megatron_replay.tokenizer import Tokenizer, build_tokenizer
from megatron_replay.trainer import checkpoint
from megatron_replay.trainer.forward_step import HeadOptions
from megatron_replay.trainer.generation import ModelSampler
from megatron_replay.trainer.hf_checkpoint import checkpoint_identity, load_hf_weights, save_hf
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.optimizer import unwrap, wrap_for_training
from megatron_replay.trainer.parallel import ParallelGroups, from_first_rank, initialize, shutdown
from megatron_replay.trainer.policy import MegatronPolicy
from megatron_replay.weight_sync.model_shape import ModelShape


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments.parse_args(argv)
    config = arguments.grpo_config(args)
    quiet()
    groups = initialize(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        seed=args.seed,
        timeout_minutes=args.distributed_timeout_minutes,
    )
    train(args, config, groups)
    shutdown()


def train(args: argparse.Namespace, config: GrpoConfig, groups: ParallelGroups) -> None:
    began = time.perf_counter()
    data = groups.data_parallel()
    buffer_device = torch.device("cpu") if args.rl_replay_buffer_device == "cpu" else groups.device
    if dist.get_rank() == 0:
        print(
            f"TP {groups.tensor_size} x PP {groups.pipeline_size} x DP {data.size} on {groups.device.type}, "
            f"buffer on {buffer_device.type} ({backends.resolve('priority_draw', None, buffer_device)}), "
            f"model {args.load_hf}, task {args.rl_task}, replay ratio {config.replay.replay_ratio:g}, "
            f"writing to {args.run_dir}",
            flush=True,
        )
    shape = ModelShape.from_folder(args.load_hf)
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model or args.load_hf)
    check(args, shape, tokenizer, groups)
    policy = build_policy(args, config, shape, groups)
    buffer = RolloutReplayBuffer(
        config.replay,
        seed=config.seed,
        arena_tokens=arena_tokens(args, config, data.size),
        group=data,
        device=buffer_device,
    )
    task = build_task(args.rl_task, split="train", seed=args.seed, data_path=args.data_path)
    max_prompt_length = args.seq_length - args.rl_max_response_length
    prompts = PromptSource(task, tokenizer, seed=args.seed, max_prompt_length=max_prompt_length)
    engine = make_engine(args, config, policy, shape, tokenizer)
    evaluate = heldout_accuracy(args, engine, tokenizer, policy)

    fixed = {
        "--seed": config.seed,
        "--grpo-group-size": config.group_size,
        "--rl-task": args.rl_task,
        "--load-hf (sha256 of its weights)": from_first_rank(lambda: checkpoint_identity(args.load_hf)),
    }
    state = checkpoint.RunState(step=0, cursor=0, fixed=fixed)
    if args.load:
        state = checkpoint.load(args.load, policy, buffer, fixed, allow_empty_buffer=args.rl_replay_allow_empty_buffer)
        prompts.load_state_dict({"cursor": state.cursor})
    log = RunLog(args.run_dir, start_step=state.step, total_steps=config.train_iters, enabled=dist.get_rank() == 0)
    counters: dict[str, Any] = {"updates": 0, "fresh_rollouts": 0, "replayed_rollouts": 0, "seconds": 0.0}
    counters |= state.counters
    seconds_before = counters["seconds"]
    if "accuracy_before" not in counters:
        counters["accuracy_before"] = evaluate(0)
        if counters["accuracy_before"] is not None:
            log.say(f"held-out accuracy before training: {counters['accuracy_before']:.3f}")
            log.scalars(0, {"heldout_accuracy": counters["accuracy_before"]})
    timer = PhaseTimer()

    def report(step: int, iteration: int, metrics: dict[str, Any]) -> None:
        counters["updates"] += int(not metrics["update_skipped"])
        if iteration == 0:
            counters["fresh_rollouts"] += int(metrics["fresh/rollouts_generated"])
            counters["replayed_rollouts"] += int(metrics.get("replay/rollouts", 0))
        times = {f"time/{p}": 0.0 for p in ("generate", "reward", "draw", "train", "sync")} | timer.drain()
        tokens_per_second = metrics["train/tokens"] / max(1e-9, times["time/train"])
        consumed = {"consumed_train_samples": counters["fresh_rollouts"], "tokens_per_second": tokens_per_second}
        log.update(step, iteration, metrics | consumed | times)

    def end_step(step: int) -> bool:
        done = step + 1
        if done % args.save_interval == 0 or done == config.train_iters:
            counters["seconds"] = seconds_before + time.perf_counter() - began
            # a batch that is sampled ahead is not saved: the run that resumes samples its prompts again
            ahead = config.prompts_per_step if config.generation_lag and done < config.train_iters else 0
            now = checkpoint.RunState(done, prompts.cursor - ahead, fixed, dict(counters))
            checkpoint.save(args.save or Path(args.run_dir, "checkpoints"), policy, buffer, now)
        return False

    try:
        replay_grpo(
            policy,
            engine,
            prompts,
            Reward(task, tokenizer),
            buffer,
            config,
            group=data,
            phase=timer.phase,
            report=report,
            end_step=end_step,
            start_step=state.step,
        )
        accuracy_after = evaluate(config.train_iters)
    finally:
        engine.close()
    summary = {
        "accuracy_before": counters["accuracy_before"],
        "accuracy_after": accuracy_after,
        "seconds": seconds_before + time.perf_counter() - began,
        "updates": counters["updates"],
        "tensor_parallel": groups.tensor_size,
        "pipeline_parallel": groups.pipeline_size,
        "data_parallel": groups.data_size,
        "fresh_rollouts": counters["fresh_rollouts"],
        "replayed_rollouts": counters["replayed_rollouts"],
    }
    if accuracy_after is not None:
        log.scalars(config.train_iters, {"heldout_accuracy": accuracy_after})
        log.say(f"held-out accuracy: {summary['accuracy_before']:.3f} before, {accuracy_after:.3f} after training")
    if args.save_hf:
        save_hf(args.save_hf, unwrap(policy.model), shape, groups, base=args.load_hf)
    log.say(f"{summary['updates']} updates in {summary['seconds']:.0f} s; see {args.run_dir}/curves.png")
    log.close(summary)


def heldout_accuracy(
    args: argparse.Namespace, engine: AnyEngine, tokenizer: Tokenizer, policy: MegatronPolicy
) -> Callable[[int], float | None]:
    if not args.eval_prompts:
        return lambda step: None
    task = build_task(args.rl_task, split="heldout", seed=args.seed, data_path=args.heldout_data_path)
    limit = args.seq_length - args.rl_max_response_length
    return HeldoutAccuracy(
        heldout_prompts(task, tokenizer, args.eval_prompts, limit),
        args.eval_samples,
        engine,
        policy,
        Reward(task, tokenizer),
        policy.groups.data_parallel(),
    )


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
        backend=arguments.kernel_backend(args),
    )
    bin_tokens = args.micro_batch_size * args.seq_length
    return MegatronPolicy(
        ddp,
        optimizer,
        scheduler,
        groups,
        head,
        bin_tokens=bin_tokens,
        age_metrics=config.replay.age_metrics,
        generation_lag=config.generation_lag,
    )


def make_engine(
    args: argparse.Namespace, config: GrpoConfig, policy: MegatronPolicy, shape: ModelShape, tokenizer: Tokenizer
) -> AnyEngine:
    groups = policy.groups
    served = ServedModel(
        folder=Path(args.load_hf),
        dtype="bfloat16" if args.bf16 else "float32",
        max_model_len=args.seq_length,
        seed=args.seed,
        device=groups.device.type,
    )
    return build_engine(
        args.rl_engine,
        lambda: build_sampler(args, policy, shape),
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


def build_sampler(args: argparse.Namespace, policy: MegatronPolicy, shape: ModelShape) -> ModelSampler:
    return ModelSampler(
        unwrap(policy.model),
        policy.groups,
        vocab_size=shape.vocab_size,
        max_sequence_length=args.seq_length,
        batch_size=args.rl_generation_batch_size,
    )


def arena_tokens(args: argparse.Namespace, config: GrpoConfig, shards: int) -> int:
    """Tokens of one shard's arena: every rollout that it can hold at once, at full length."""
    if not config.replay.enabled:
        return 1
    alive = (config.replay.tau_max + 1) * config.prompts_per_step * config.group_size
    tokens = min(config.replay.capacity, -(-alive // shards)) * args.seq_length
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"--rl-replay-capacity {config.replay.capacity} must leave a rank fewer than 2^31 tokens of "
            f"--seq-length {args.seq_length}, got {tokens}"
        )
    return tokens


def check(args: argparse.Namespace, shape: ModelShape, tokenizer: Tokenizer, groups: ParallelGroups) -> None:
    """What can only be checked once the model, the tokenizer and the layout are known."""
    if args.seq_length > shape.max_positions:
        raise ValueError(
            f"--seq-length must be at most the model's {shape.max_positions} positions, got {args.seq_length}"
        )
    for op in ("token_logprob", "grpo_loss"):
        try:
            backends.resolve(op, arguments.kernel_backend(args), groups.device)
        except RuntimeError as error:
            needs = f"--rl-kernel-backend must be one that runs here, got {args.rl_kernel_backend}"
            raise ValueError(f"{needs} ({error})") from error
    if tokenizer.vocab_size > shape.vocab_size:
        raise ValueError(
            f"--tokenizer-model must fit the model's vocabulary of {shape.vocab_size}, got {tokenizer.vocab_size} ids"
        )
    if args.grpo_prompts_per_step % groups.data_size:
        raise ValueError(
            f"--grpo-prompts-per-step must be a multiple of the {groups.data_size} data-parallel ranks, "
            f"got {args.grpo_prompts_per_step}"
        )


def quiet() -> None:
    """Leave errors; drop library chatter that repeats on every rank."""
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")


# Needed: megatron-core's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    sys.exit(main())
