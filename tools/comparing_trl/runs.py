"""Runs of the comparison: each in a process of its own, and then the accuracy of what it saved."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from studying.fork import forked
from studying.trial import EVALUATE, EVALUATION_SEED, QUICKSTART, run_script

from comparing_trl.setting import ROOT, Setting

HERE = Path(__file__).parent
TRL_PYTHON = ROOT / ".venv" / "trl" / "bin" / "python"
TAIL = 3000  # characters of a failed run's output


def require_trl() -> None:
    """Raise ValueError that says how to get it where TRL's environment is not there, or does not start."""
    if not TRL_PYTHON.exists():
        raise ValueError("TRL is not here: `make trl` installs it into .venv/trl")
    done = subprocess.run([TRL_PYTHON, "-c", "import trl"], env=_environment(1), capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"TRL in .venv/trl does not start, `make trl` makes it anew: {done.stderr.strip()[-300:]}")


def train(setting: Setting) -> dict[str, Any]:
    """What the run measured. Raises RuntimeError with the end of its output where it failed."""
    folder = Path(setting.folder)
    folder.mkdir(parents=True)
    told, record = folder / "setting.json", folder / "record.json"
    setting.write(told)
    ours = setting.arm.startswith("ours")
    program = [sys.executable, HERE / "our_run.py"] if ours else [TRL_PYTHON, HERE / "trl_run.py"]
    done = subprocess.run(
        [*program, told, record], cwd=ROOT, env=_environment(setting.threads), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0 or not record.exists():
        raise RuntimeError(
            f"{setting.arm} with seed {setting.seed} ended with exit code {done.returncode}:\n{done.stdout[-TAIL:]}"
        )
    found: dict[str, Any] = json.loads(record.read_text())
    if (measured := len(found["rows"])) != setting.steps - 1:
        raise RuntimeError(
            f"{setting.arm} with seed {setting.seed} must have {setting.steps - 1} measured steps, got {measured}"
        )
    return found


def accuracies(settings: list[Setting], problems: int, samples: int) -> list[float]:
    """Mean over held-out problems, the same random numbers for every run. One import for all."""
    sys.argv = [str(EVALUATE)]
    runpy.run_path(str(EVALUATE), run_name="compared")
    return [_accuracy(setting, problems, samples) for setting in settings]


def _accuracy(setting: Setting, problems: int, samples: int) -> float:
    out = Path(setting.folder, "evaluation")
    flags = [
        f"@{QUICKSTART}", "--tensor-model-parallel-size", "1", "--load-hf", setting.weights,
        "--benchmark", "heldout=task:sort-digits", "--problems", problems, "--samples", samples,
        "--seed", EVALUATION_SEED, "--out", out,
    ]  # fmt: skip
    log = Path(setting.folder, "evaluation.txt")

    def body() -> None:
        output = os.open(log, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        # nothing is timed here: one thread has no other to wait for on a busy machine
        os.environ["OMP_NUM_THREADS"] = "1"
        run_script(EVALUATE, list(map(str, flags)))

    try:
        forked(body)
    except RuntimeError as error:
        raise RuntimeError(
            f"the evaluation of {setting.arm} with seed {setting.seed}: {error}:\n{log.read_text()[-TAIL:]}"
        ) from error
    accuracy: float = json.loads((out / "evaluation.json").read_text())["benchmarks"]["heldout"]["avg_at_k"]
    return accuracy


def _environment(threads: int) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    return kept | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
