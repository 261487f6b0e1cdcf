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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from megatron_replay.arena_size import arena_tokens
from megatron_replay.config import GrpoConfig
from megatron_replay.ops import backend as backends
from megatron_replay.planning.hardware import Hardware
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.run.checks import check
from megatron_replay.run.dry_run import dry_run
from megatron_replay.run.launcher import end_with_launcher
from megatron_replay.run.parts import build_graders, build_policy, heldout_accuracy, make_engine, rollout_watch, task_of
from megatron_replay.tasks.prompts import PromptSource
from megatron_replay.tasks.reward import Reward
from megatron_replay.telemetry import PhaseTimer, RunLog, accuracy_text
from megatron_replay.tokenizer import build_tokenizer
from megatron_replay.trainer import checkpoint
from megatron_replay.trainer.hf_checkpoint import checkpoint_identity, save_hf
from megatron_replay.trainer.nonfinite import load_batch
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.trainer.parallel import ParallelGroups, from_first_rank, initialize, shutdown
from megatron_replay.trainer.phase_board import PhaseBoard
from megatron_replay.trainer.stop_request import StopRequest
from megatron_replay.weight_sync.model_shape import ModelShape


def main(argv: Sequence[str] | None = None) -> None:
    end_with_launcher()
    args = arguments.parse_args(argv)
    config = arguments.grpo_config(args)
    quiet()
    if args.dry_run:
        sys.exit(plan_only(args))
    groups = initialize(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        seed=args.seed,
        timeout_minutes=args.distributed_timeout_minutes,
    )
    board = PhaseBoard.build(limit=args.distributed_timeout_minutes * 60)
    train(args, config, groups, board)
    board.close()
    shutdown()


def plan_only(args: argparse.Namespace) -> int:
    """--dry-run: one process, no process group. The exit code is 1 where something must change."""
    model_parallel = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    found = dry_run(
        args,
        world_size=args.dry_run_world_size or model_parallel,
        gpus_per_node=args.dry_run_gpus_per_node,
        hardware=Hardware(gpu_memory_gb=args.dry_run_gpu_memory_gb),
    )
    print("\n".join(found.lines()))
    return found.exit_code


def train(args: argparse.Namespace, config: GrpoConfig, groups: ParallelGroups, board: PhaseBoard) -> None:
    began = time.perf_counter()
    data, first = groups.data_parallel(), dist.get_rank() == 0
    stop = StopRequest(board, args.exit_duration_in_mins, groups.device)
    buffer_device = torch.device("cpu") if args.rl_replay_buffer_device == "cpu" else groups.device
    if first:
        print(
            f"TP {groups.tensor_size} x PP {groups.pipeline_size} x DP {data.size} on {groups.device.type}, "
            f"buffer on {buffer_device.type} ({backends.resolve('priority_draw', None, buffer_device)}), "
            f"model {args.load_hf}, task {args.rl_task}, {replay_in_words(config)}, "
            f"writing to {args.run_dir}",
            flush=True,
        )
    shape = ModelShape.from_folder(args.load_hf)
    tokenizer = build_tokenizer(args.tokenizer_type, args.tokenizer_model or args.load_hf)
    check(args, shape, tokenizer, groups.device, groups.data_size)
    policy = build_policy(args, config, shape, groups)
    if args.rl_train_batch:
        # the folder that shows it is there already
        policy.nonfinite = None
        metrics = policy.train(*load_batch(args.rl_train_batch, groups))
        if first:
            print("\n".join(f"{name} {value:g}" for name, value in metrics.items()))
        return
    buffer = RolloutReplayBuffer(
        config.replay,
        seed=config.seed,
        arena_tokens=arena_tokens(config, args.seq_length, data.size),
        group=data,
        device=buffer_device,
    )
    task = task_of(args, "train")
    prompts = PromptSource(
        task,
        tokenizer,
        seed=args.seed,
        max_prompt_length=args.seq_length - args.rl_max_response_length,
        chat_template=args.rl_chat_template,
        filter_long=args.rl_filter_long_prompts,
    )
    if first and (said := prompts.report()):
        print(said, flush=True)
    graders = build_graders(args, groups, [task])
    reward = Reward(task, tokenizer, graders)
    engine = make_engine(args, config, policy, shape, tokenizer)
    evaluate = heldout_accuracy(args, engine, tokenizer, policy, graders)

    fixed = {
        "--seed": config.seed,
        "--grpo-group-size": config.group_size,
        "--rl-task": args.rl_task,
        "--rl-reward": args.rl_reward,
        "--load-hf (sha256 of its weights)": from_first_rank(lambda: checkpoint_identity(args.load_hf)),
        **prompts.identity,
    }
    state = checkpoint.RunState(step=0, cursor=0, fixed=fixed)
    if args.load:
        state = checkpoint.load(args.load, policy, buffer, fixed, allow_empty_buffer=args.rl_replay_allow_empty_buffer)
        prompts.load_state_dict({"cursor": state.cursor})
    save_folder = Path(args.save or Path(args.run_dir, "checkpoints"))
    log = RunLog(args.run_dir, start_step=state.step, total_steps=config.train_iters, enabled=first)
    log.describe(vars(args))
    watch = rollout_watch(args, tokenizer, state.step, policy, buffer)
    if args.save:
        log.hold(save_folder, "--save")
    counters: dict[str, Any] = {"updates": 0, "fresh_rollouts": 0, "replayed_rollouts": 0, "seconds": 0.0}
    counters |= state.counters
    seconds_before = counters["seconds"]
    timer = PhaseTimer()
    board.step = state.step

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        with board.phase(name), timer.phase(name):
            yield

    def report(step: int, iteration: int, metrics: dict[str, Any]) -> None:
        counters["updates"] += int(not metrics["update_skipped"])
        if iteration == 0:
            counters["fresh_rollouts"] += int(metrics["fresh/rollouts_generated"])
            counters["replayed_rollouts"] += int(metrics.get("replay/rollouts", 0))
        times = {f"time/{p}": 0.0 for p in ("generate", "reward", "draw", "train", "sync")} | timer.drain()
        tokens_per_second = metrics["train/tokens"] / max(1e-9, times["time/train"])
        graded = reward.counters()
        sums = data.sum(torch.tensor(list(graded.values()), dtype=torch.float64)).tolist()
        consumed: dict[str, float] = dict(zip(graded, sums, strict=True))
        consumed |= {"consumed_train_samples": counters["fresh_rollouts"], "tokens_per_second": tokens_per_second}
        log.update(step, iteration, metrics | consumed | times)

    stopped_by = ""

    def end_step(step: int) -> bool:
        nonlocal stopped_by
        done = step + 1
        with board.phase("stop"):
            stopped_by = stop.agreed() if done < config.train_iters else ""
        if stopped_by or done % args.save_interval == 0 or done == config.train_iters:
            counters["seconds"] = seconds_before + time.perf_counter() - began
            # a batch that is sampled ahead is not saved: the run that resumes samples its prompts again
            ahead = config.prompts_per_step if config.generation_lag and done < config.train_iters else 0
            now = checkpoint.RunState(done, prompts.cursor - ahead, fixed, dict(counters))
            with phase("save"):
                checkpoint.save(save_folder, policy, buffer, now, keep_last=args.save_keep_last)
        board.step = done
        return bool(stopped_by)

    try:
        if "accuracy_before" not in counters:
            with phase("evaluate"):
                counters["accuracy_before"] = evaluate(0)
            if counters["accuracy_before"] is not None:
                log.say(f"held-out accuracy before training: {counters['accuracy_before']:.3f}")
                log.scalars(0, {"heldout_accuracy": counters["accuracy_before"]})
        replay_grpo(
            policy,
            engine,
            prompts,
            reward,
            buffer,
            config,
            group=data,
            phase=phase,
            report=report,
            watch=watch,
            end_step=end_step,
            start_step=state.step,
        )
        if stopped_by:
            log.say(
                f"stopped by {stopped_by} after step {board.step} of {config.train_iters} and saved; "
                f"go on with --load {save_folder}"
            )
            log.close()
            return
        with phase("evaluate"):
            accuracy_after = evaluate(config.train_iters)
    finally:
        engine.close()
        if graders is not None:
            graders.close()
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
    before = summary["accuracy_before"]
    if before is not None or accuracy_after is not None:
        log.say(f"held-out accuracy: {accuracy_text(before)} before, {accuracy_text(accuracy_after)} after training")
    if args.save_hf:
        save_hf(args.save_hf, unwrap(policy.model), shape, groups, base=args.load_hf)
    log.say(f"{summary['updates']} updates in {summary['seconds']:.0f} s; see {args.run_dir}/curves.png")
    log.close(summary)


def replay_in_words(config: GrpoConfig) -> str:
    pool = config.replay.composition == "pool"
    return "replay from a pool" if pool else f"replay ratio {config.replay.replay_ratio:g}"


def quiet() -> None:
    """Leave errors; drop library chatter that repeats on every rank."""
    if not torch.cuda.is_available():
        torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.")


# Needed: megatron-core's checkpoint writer starts a process that imports this file again.
if __name__ == "__main__":
    sys.exit(main())
