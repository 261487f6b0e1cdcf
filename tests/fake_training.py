"""Stands for torchrun and the entry script in tests of tools/chaos.py: the same processes, rows and files, in a second.

As the launcher it starts ranks and ends them all when one ends badly; as rank 0 it writes rows and checkpoints. What
it does wrong is the word in FAKE_FAULT.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

FAULT = os.environ.get("FAKE_FAULT", "")
STEP = 0.1  # seconds


def flag(name: str, otherwise: str = "") -> str:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else otherwise


def end_with_parent() -> None:
    if FAULT != "orphan":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)


def launch() -> int:
    ranks = [
        subprocess.Popen([sys.executable, *sys.argv], env=os.environ | {"RANK": str(rank)}, preexec_fn=end_with_parent)
        for rank in range(int(flag("--nproc-per-node")))
    ]
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            for rank in ranks:
                rank.kill()
            return 1
        time.sleep(STEP / 4)
    return max(rank.returncode for rank in ranks)


def train() -> int:
    run_dir, steps, every = Path(flag("--run-dir")), int(flag("--train-iters")), int(flag("--save-interval"))
    latest = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    latest.parent.mkdir(parents=True, exist_ok=True)
    metrics = run_dir / "metrics.jsonl"
    start = int(latest.read_text()) if flag("--load") else 0
    kept = metrics.read_text().splitlines()[:start] if metrics.exists() else []
    metrics.write_text("".join(f"{line}\n" for line in kept))
    if FAULT == "file" and start:
        (run_dir / "checkpoints" / "iter_0000001.partial").mkdir(exist_ok=True)
    if FAULT == "shared memory" and start:
        held = open(f"/dev/shm/fake-training-{os.getpid()}", "w")  # noqa: SIM115, F841 - left on purpose
    with open(metrics, "a", buffering=1) as file:
        for step in range(start, steps):
            time.sleep(STEP)
            loss = 1 / (step + 1) + (1e-9 if FAULT == "row" and start else 0.0)
            file.write(json.dumps({"step": step, "iteration": 0, "loss": loss, "time/train": time.time()}) + "\n")
            if FAULT == "exit" and step == 2:
                return 3
            if (step + 1) % every == 0:
                latest.with_suffix(".new").write_text(str(step + 1))
                latest.with_suffix(".new").replace(latest)
    (run_dir / "summary.json").write_text(json.dumps({"updates": steps, "seconds": time.time()}))
    return 0


def follow() -> int:
    """Any other rank: until rank 0 has written its summary. An orphan stays."""
    grown, parent = [], os.getppid()
    while not Path(flag("--run-dir"), "summary.json").exists() or os.getppid() != parent:
        time.sleep(STEP)
        if FAULT == "memory":
            grown.append(b"x" * (1 << 20))
    return 0


if __name__ == "__main__":
    sys.exit(launch() if "RANK" not in os.environ else train() if os.environ["RANK"] == "0" else follow())
