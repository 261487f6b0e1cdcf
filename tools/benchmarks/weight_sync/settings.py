"""Settings: what one run measures, as its processes tell each other."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_replay.engines.child_process import clean_environment

from ..environment import ROOT
from .model import LAYOUTS

ENGINES = {"TP1": 1, "TP2": 2}
# ours, in the order of the rows
PUSHES = ("in-process", "gloo", "shared-memory")
# what exists without this project
OTHERS = ("vllm-reload", "gloo-per-tensor")
NEED_CUDA = ("nccl", "cuda-ipc")
# these have one engine in a process of its own that also sends
ALONE = ("in-process", "vllm-reload")


@dataclass(frozen=True)
class Settings:
    folder: Path  # config.json and weights of the model, and the logs
    transports: tuple[str, ...]
    trainers: tuple[str, ...]
    engines: tuple[str, ...]
    repeats: int
    bucket_mib: int
    threads: int
    timeout: float  # seconds

    @property
    def alone(self) -> tuple[str, ...]:
        return tuple(t for t in ALONE if t in self.transports)

    @property
    def between_processes(self) -> tuple[str, ...]:
        return tuple(t for t in self.transports if t not in ALONE)

    @property
    def ranks(self) -> int:
        """Processes of the trainer: those of the largest layout, and no fewer than one and the workers of an engine."""
        return max(*(LAYOUTS[t].ranks for t in self.trainers), *(1 + ENGINES[e] for e in self.engines))

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"folder": str(self.folder)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        found: dict[str, Any] = json.loads(text)
        lists = {name: tuple(found[name]) for name in ("transports", "trainers", "engines")}
        return cls(**found | lists | {"folder": Path(found["folder"])})


def python_environment(**extra: str) -> dict[str, str]:
    """Of a process that runs modules of this benchmark."""
    return clean_environment(PYTHONPATH=python_path(), **extra)


def python_path() -> str:
    """Where this project and this benchmark are found."""
    return os.pathsep.join([str(ROOT), str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])
