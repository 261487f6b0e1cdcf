"""The compiled extension, and how a tensor's place in it is named."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch


def extension() -> ModuleType:
    """megatron_replay._C, or a RuntimeError that says how to build it."""
    try:
        return importlib.import_module("megatron_replay._C")
    except ImportError as error:
        raise RuntimeError(
            f"megatron_replay._C is not built ({error}); run `pip install --no-build-isolation --no-deps -e .`"
        ) from error


def queue(device: torch.device) -> tuple[int, int]:
    """The device's index and its current stream, where a CUDA call puts its work."""
    stream = torch.cuda.current_stream(device)
    return stream.device_index, stream.cuda_stream
