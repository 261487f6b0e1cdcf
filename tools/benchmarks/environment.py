"""What a measurement ran on: machine, driver, versions, commit. `python environment.py FILE` writes it as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, Any]:
    """None stands for what is not there: git, nvcc, a driver, a package."""
    changed = _output("git", "status", "--porcelain")
    found: dict[str, Any] = {
        "commit": commit(),
        "changed_files": None if changed is None else len(changed.splitlines()),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        found |= {
            "card": torch.cuda.get_device_name(),
            "compute_capability": f"{major}.{minor}",
            "card_memory_bytes": torch.cuda.get_device_properties(0).total_memory,
            "torch_cuda": torch.version.cuda,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
            "nvcc": (_output("nvcc", "--version") or "").splitlines()[-1:] or None,
        }
    return found


@cache
def commit() -> str | None:
    """Of the working tree when this was first asked: of the code that the process has."""
    return _output("git", "rev-parse", "HEAD")


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


if __name__ == "__main__":
    text = json.dumps(environment(), indent=1)
    print(text)
    for target in sys.argv[1:]:
        Path(target).write_text(text + "\n")
