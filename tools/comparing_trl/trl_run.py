"""One run of TRL, measured, in TRL's environment: `.venv/trl/bin/python trl_run.py SETTING.json RECORD.json`.

Each option stands with its reason; what is not named is TRL's default.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.json_file import write_json
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from comparing_trl.setting import ADAM, CLIP_HIGH, CLIP_LOW, MODEL, RESPONSE, Setting
from comparing_trl.step_clock import StepClock

PACKAGES = ("trl", "transformers", "accelerate", "datasets", "torch")


def options(setting: Setting) -> dict[str, Any]:
    return {
        "output_dir": str(Path(setting.folder, "run")),
        "max_steps": setting.steps,
        "num_generations": setting.group_size,
        # all rollouts of a step in one microbatch: fewest passes
        "per_device_train_batch_size": setting.rollouts,
        "gradient_accumulation_steps": 1,
        "max_completion_length": RESPONSE,
        "temperature": 1.0,
        "learning_rate": setting.lr,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0,
        "adam_beta1": ADAM["beta1"],
        "adam_beta2": ADAM["beta2"],
        "adam_epsilon": ADAM["eps"],
        "weight_decay": ADAM["weight_decay"],
        "max_grad_norm": ADAM["clip_grad"],
        "epsilon": CLIP_LOW,
        "epsilon_high": CLIP_HIGH,
        # the mean over all tokens of the step, as this project's; also TRL's default
        "loss_type": "dapo",
        # prompts in the order in which this project takes them
        "shuffle_dataset": False,
        # it saves memory that is not short here, and costs a second forward pass
        "gradient_checkpointing": False,
        # float32 on both sides
        "bf16": False,
        "use_cpu": True,
        # nothing is written while steps are measured
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": setting.seed,
    }


class ByIdentity(dict[str, Any]):
    """A stored group that a heap can hold beside one of equal score: TRL's own cannot be compared, and end the run."""

    __hash__ = object.__hash__
    ties = 0

    def __eq__(self, other: object) -> bool:
        return self is other

    def __lt__(self, other: object) -> bool:
        ByIdentity.ties += 1
        return False


class Measured(TrainerCallback):
    """Times generation and rewards of a trainer by wrapping its own methods."""

    def __init__(self, trainer: GRPOTrainer, setting: Setting) -> None:
        self.clock = StepClock()
        self._setting = setting
        self._seconds = {"generate": 0.0, "reward": 0.0}
        self._rewards = torch.empty(0)
        trainer._generate = self._timed("generate", trainer._generate)
        score = self._timed("reward", trainer._calculate_rewards)

        def calculate_rewards(*args: Any, **kwargs: Any) -> torch.Tensor:
            self._rewards = score(*args, **kwargs)
            return self._rewards

        trainer._calculate_rewards = calculate_rewards

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._seconds[name] += time.perf_counter() - began

        return timed

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        groups = self._rewards[:, 0].view(-1, self._setting.group_size)
        differing = int((groups.amax(1) > groups.amin(1)).sum())
        self.clock.end_step(
            **self._seconds,
            # rollouts of groups without variance go through the update too, with advantage 0
            trained=self._setting.rollouts,
            informative=differing * self._setting.group_size,
            reward_mean=float(self._rewards.mean()),
        )
        self._seconds = dict.fromkeys(self._seconds, 0.0)


def build(setting: Setting) -> tuple[GRPOTrainer, dict[str, int]]:
    """The trainer, and how many groups its buffer has given back."""
    task, prompts = setting.task(), setting.prompt_source().take(setting.steps * setting.prompts)
    rows = [{"prompt": task.problem(p.prompt_id).prompt, "index": p.prompt_id} for p in prompts]

    def sorted_digits(completions: list[str], index: list[int], **_: Any) -> list[float]:
        return [task.score(task.problem(i), text) for i, text in zip(index, completions, strict=True)]

    given = {"model": str(MODEL), "reward_funcs": sorted_digits, "train_dataset": Dataset.from_list(rows)}
    replayed = {"replayed_groups": 0}
    if setting.arm == "trl_replay":
        from trl.experimental.grpo_with_replay_buffer import GRPOWithReplayBufferConfig, GRPOWithReplayBufferTrainer

        # replay_buffer_size: the default, 64 groups
        trainer = GRPOWithReplayBufferTrainer(args=GRPOWithReplayBufferConfig(**options(setting)), **given)
        buffer, add, sample = trainer.replay_buffer, trainer.replay_buffer.add, trainer.replay_buffer.sample

        def sampled(num_samples: int) -> Any:
            replayed["replayed_groups"] += num_samples
            return sample(num_samples)

        buffer.add = lambda scores, data: add(scores, [ByIdentity(x) for x in data])
        buffer.sample = sampled
    else:
        trainer = GRPOTrainer(args=GRPOConfig(**options(setting)), **given)
    for prompt, row in zip(prompts[:100], rows[:100], strict=True):
        if (ids := trainer.processing_class(row["prompt"])["input_ids"]) != list(prompt.tokens):
            raise ValueError(f"TRL's tokens of {row['prompt']!r} must be {list(prompt.tokens)}, got {ids}")
    return trainer, replayed


def main() -> None:
    setting = Setting.read(sys.argv[1])
    torch.set_num_threads(setting.threads)
    trainer, replayed = build(setting)
    measured = Measured(trainer, setting)
    trainer.add_callback(measured)
    trainer.train()
    trainer.save_model(str(setting.weights))
    versions = {name: metadata.version(name) for name in PACKAGES}
    record = measured.clock.record(versions=versions, threads=torch.get_num_threads(), ties=ByIdentity.ties, **replayed)
    write_json(Path(sys.argv[2]), record)


if __name__ == "__main__":
    main()
