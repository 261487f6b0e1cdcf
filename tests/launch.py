"""Start real multi-process runs from tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "pretrain_replay_grpo.py"


def command(processes: int, script: Path, *args: object) -> list[str]:
    """A torchrun command line; --standalone takes a free port, so runs side by side do not meet."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*launcher, str(script), *map(str, args)]


def environment() -> dict[str, str]:
    """One thread a process; none of the variables that a surrounding torchrun or these tests have set."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TRITON_INTERPRET")
    kept = {k: v for k, v in os.environ.items() if k not in foreign}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def torchrun(processes: int, script: Path, *args: object, timeout: float = 300) -> str:
    """Run to the end; returns stdout and stderr together. A failed run raises with the end of its output."""
    return _finish(command(processes, script, *args), timeout)


def run_script(script: Path, *args: object, timeout: float = 300) -> str:
    """As `torchrun`, of a program that starts its ranks itself."""
    return _finish([sys.executable, str(script), *map(str, args)], timeout)


def _finish(words: list[str], timeout: float) -> str:
    done = subprocess.run(
        words,
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode} of {' '.join(words)}\n{done.stdout[-4000:]}")
    return done.stdout
