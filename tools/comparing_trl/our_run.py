"""One run of this project's entry script, measured: `python our_run.py SETTING.json RECORD.json`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.json_file import write_json

from comparing_trl.setting import ADAM, CLIP_HIGH, CLIP_LOW, RESPONSE, ROOT, Setting
from comparing_trl.step_clock import StepClock
from megatron_replay.telemetry import RunLog, versions

ENTRY = ROOT / "examples" / "pretrain_replay_grpo.py"
QUICKSTART = ROOT / "examples" / "quickstart" / "flags.txt"


def flags(setting: Setting) -> list[str]:
    """One process, one microbatch; the method's own settings are those of the study, docs/study.md."""
    words = {
        "--tensor-model-parallel-size": 1,
        "--train-iters": setting.steps,
        "--grpo-prompts-per-step": setting.prompts,
        "--grpo-group-size": setting.group_size,
        "--rl-max-response-length": RESPONSE,
        "--grpo-clamp-eps-lower": CLIP_LOW,
        "--grpo-clamp-eps-upper": CLIP_HIGH,
        # TRL's
        "--rl-advantage-std": "sample",
        "--rl-replay-ratio": 0.5 if setting.arm == "ours" else 0,
        "--rl-replay-alpha": 0.5,
        "--rl-replay-warmup-steps": min(10, setting.warmup),
        "--lr": setting.lr,
        "--lr-decay-style": "linear",
        "--adam-beta1": ADAM["beta1"],
        "--adam-beta2": ADAM["beta2"],
        "--adam-eps": ADAM["eps"],
        "--weight-decay": ADAM["weight_decay"],
        "--clip-grad": ADAM["clip_grad"],
        "--seed": setting.seed,
        "--eval-prompts": 0,
        "--rl-log-rollouts-interval": 0,
        "--save-interval": 1_000_000,
        "--run-dir": Path(setting.folder, "run"),
        "--save-hf": setting.weights,
    }
    return [f"@{QUICKSTART}", *(str(x) for pair in words.items() for x in pair)]


def main() -> None:
    setting = Setting.read(sys.argv[1])
    clock, update = StepClock(), RunLog.update

    def measured(self: RunLog, step: int, iteration: int, metrics: dict[str, Any]) -> None:
        update(self, step, iteration, metrics)
        clock.end_step(
            generate=metrics["time/generate"] + metrics["time/sync"],
            reward=metrics["time/reward"],
            trained=int(metrics.get("train/rollouts", 0)),
            informative=int(metrics.get("fresh/rollouts", 0)),
            reward_mean=metrics["reward_mean"],
        )

    RunLog.update = measured  # type: ignore[method-assign]
    runpy.run_path(str(ENTRY), run_name="measured")["main"](flags(setting))
    write_json(Path(sys.argv[2]), clock.record(versions=versions(), threads=torch.get_num_threads()))


if __name__ == "__main__":
    main()
