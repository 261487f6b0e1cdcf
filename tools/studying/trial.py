"""Trial: one training run of the study and the measurement of what came out, as one record."""

from __future__ import annotations

import hashlib
import json
import os
import runpy
import shutil
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.environment import commit
from benchmarks.json_file import write_json

from megatron_replay.telemetry import read_metrics
from studying.arms import ARMS, SETTING
from studying.fork import forked

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart" / "flags.txt"
MODEL = ROOT / "examples" / "quickstart" / "model"
ENTRY = ROOT / "examples" / "pretrain_replay_grpo.py"
EVALUATE = ROOT / "tools" / "evaluate.py"
RECORD, LOG = "record.json", "log.txt"
# of the measurement: the same held-out problems and the same random numbers for every trial
PROBLEMS, SAMPLES, EVALUATION_SEED = 512, 8, 4711
CURVE = ("reward_mean", "fresh/solved_fraction", "fresh/informative_fraction", "grad_norm", "fresh/entropy_mean")
PER_AGE = ("ratio_mean", "clip_fraction", "ess")


@dataclass(frozen=True)
class Trial:
    """`shorter` are flags for a quick run of the program itself; its records are not those of the study."""

    arm: str
    rate: float
    seed: int
    shorter: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.arm}_{self.rate:g}_{self.seed}"

    def flags(self, folder: Path) -> list[str]:
        own = ("--lr", f"{self.rate:g}", "--seed", str(self.seed), "--run-dir", str(folder / "run"))
        return [f"@{QUICKSTART}", *SETTING, *self.shorter, *ARMS[self.arm].flags, *own]

    def settings(self) -> dict[str, Any]:
        """What a record must agree with to stand for this trial."""
        measured = [PROBLEMS, SAMPLES, EVALUATION_SEED]
        return asdict(self) | {"flags": self.flags(Path())[1:], "evaluation": measured, "quickstart": quickstart()}


@cache
def quickstart() -> str:
    """SHA-256 of what the flags stand on: the quickstart's own flags, and its base model."""
    digest = hashlib.sha256()
    for path in (QUICKSTART, *sorted(MODEL.iterdir())):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_record(trial: Trial, folder: Path) -> dict[str, Any] | None:
    """The record of an earlier start. Raises ValueError for one of other settings, naming the first that differs."""
    path = folder / trial.name / RECORD
    if not path.exists():
        return None
    record: dict[str, Any] = json.loads(path.read_text())
    for name, value in json.loads(json.dumps(trial.settings())).items():
        if record["settings"].get(name) != value:
            raise ValueError(f"{path}: {name} must be {value!r}, got {record['settings'].get(name)!r}")
    return record


def perform(trial: Trial, folder: Path) -> None:
    """Train, measure, write the record. In a process of its own, which has imported the entry script already."""
    home = folder / trial.name
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    output = os.open(home / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    train_seconds = forked(lambda: run_script(ENTRY, trial.flags(home)))
    evaluation = [
        f"@{QUICKSTART}", "--tensor-model-parallel-size", "1", "--load", home / "run" / "checkpoints",
        "--benchmark", "heldout=task:sort-digits", "--problems", PROBLEMS, "--samples", SAMPLES,
        "--seed", EVALUATION_SEED, "--out", home / "evaluation",
    ]  # fmt: skip
    forked(lambda: run_script(EVALUATE, list(map(str, evaluation))))
    found = json.loads((home / "evaluation" / "evaluation.json").read_text())["benchmarks"]["heldout"]
    rows = read_metrics(home / "run")
    what = {"settings": trial.settings(), "commit": commit()}
    write_json(home / RECORD, {**what, **summary(rows, found), "cpu_seconds": train_seconds})
    # hundreds of trials: the weights and the samples have been measured
    for part in (home / "run", home / "evaluation"):
        shutil.rmtree(part)


def summary(rows: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run (a row for each update) and of its evaluation."""
    steps = [row for row in rows if row["iteration"] == 0]
    ages = sorted({key.partition("/")[0] for row in rows for key in row if key.startswith("age_")})
    return {
        "accuracy": found["avg_at_k"],
        "pass_at": found["pass_at_k"],
        "length_mean": found["length_mean"],
        "length_correct": found["length_correct"],
        "length_incorrect": found["length_incorrect"],
        "truncated_fraction": found["truncated_fraction"],
        "updates": len(rows) - sum(row["update_skipped"] for row in rows),
        "fresh_rollouts": sum(row["fresh/rollouts_generated"] for row in steps),
        "trained_tokens": sum(row["train/tokens"] for row in rows),
        "phase_seconds": {
            name: sum(row.get(f"time/{name}", 0.0) for row in rows) for name in ("generate", "draw", "train", "push")
        },
        "curve": {name: [rounded(row.get(name)) for row in steps] for name in CURVE},
        "ages": {
            age: {name: mean([row[f"{age}/{name}"] for row in rows if f"{age}/{name}" in row]) for name in PER_AGE}
            for age in ages
        },
        "replay": {
            name: mean([row[f"replay/{name}"] for row in steps if row.get("replay/draw_size", 0) > 0])
            for name in ("ess", "clip_fraction", "age_mean")
            if any(f"replay/{name}" in row for row in steps)
        },
    }


def mean(values: list[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else None


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def run_script(script: Path, flags: list[str]) -> None:
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")
