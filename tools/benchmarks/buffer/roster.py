"""All implementations, and which of them run here."""

from __future__ import annotations

import importlib
import os
import sys
from importlib import metadata
from pathlib import Path

import torch

from megatron_replay.ops.backend import resolve

from .foreign import FOREIGN
from .implementation import Implementation
from .ours import OURS
from .plain import PLAIN

ROOT = Path(__file__).resolve().parents[3]
# where `make benchmark-deps` puts other projects
INSTALLED = ROOT / ".venv" / "benchmark"
IMPLEMENTATIONS = (*OURS, *PLAIN, *FOREIGN)


def add_installed() -> None:
    """Make the other projects importable, behind everything else: their wheels also hold what is here already."""
    # TRL warns of what its pinned version answers for, torchrl tells of every storage
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("RL_LOGGING_LEVEL", "WARNING")
    if INSTALLED.is_dir() and str(INSTALLED) not in sys.path:
        sys.path.append(str(INSTALLED))


def available(device: torch.device) -> tuple[list[Implementation], list[dict[str, str]]]:
    """What can run here, this project's first, and why the rest cannot."""
    usable, skipped = [], []
    for implementation in IMPLEMENTATIONS:
        if (why := _obstacle(implementation, device)) is None:
            usable.append(implementation)
        # a backend of another device is no loss
        elif implementation.backend is None or device.type in implementation.devices:
            skipped.append({"implementation": implementation.name, "why": why})
    return usable, skipped


def version(implementation: Implementation) -> str | None:
    """Of another project's package."""
    return None if implementation.package is None else metadata.version(implementation.package)


def _obstacle(implementation: Implementation, device: torch.device) -> str | None:
    if device.type not in implementation.devices:
        return f"it has no rollouts on {device.type}"
    try:
        if implementation.backend is not None:
            resolve("priority_draw", implementation.backend, device)
            resolve("ragged_gather", implementation.backend, device)
        if implementation.needs is not None:
            importlib.import_module(implementation.needs)
    except (ImportError, RuntimeError) as error:
        return " ".join(f"{type(error).__name__}: {error}".replace(f"{ROOT}/", "").split())
    return None
