"""THE dispatch point: which implementation of an op runs on a device.

`reference` is plain torch, and the definition; `triton` are kernels for a GPU; `cpp` and `cuda` are the two halves of
the compiled extension, built from the same headers.

An implementation is a module, named by one row of `IMPLEMENTATIONS` and imported when it is first used, so that a
missing compiler or extension costs nothing to those who do not use it. All modules of one op offer the same functions.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from types import ModuleType
from typing import Literal, get_args

import torch

from megatron_replay.ops.extension import extension

Backend = Literal["reference", "triton", "cpp", "cuda"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)
IMPLEMENTATIONS: dict[str, dict[Backend, str]] = {
    "token_logprob": {
        "reference": "megatron_replay.ops.token_logprob_reference",
        "triton": "megatron_replay.ops.token_logprob_triton",
    },
    "grpo_loss": {
        "reference": "megatron_replay.ops.grpo_loss_reference",
        "triton": "megatron_replay.ops.grpo_loss_triton",
    },
    "priority_draw": {
        "reference": "megatron_replay.ops.priority_draw_reference",
        "cpp": "megatron_replay.ops.priority_draw_compiled",
        "cuda": "megatron_replay.ops.priority_draw_compiled",
    },
    "ragged_gather": {
        "reference": "megatron_replay.ops.ragged_gather_reference",
        "cpp": "megatron_replay.ops.ragged_gather_compiled",
        "cuda": "megatron_replay.ops.ragged_gather_compiled",
    },
}
FASTEST_FIRST: tuple[Backend, ...] = ("cuda", "cpp", "triton", "reference")
# where each one runs; the reference runs everywhere
DEVICE: dict[Backend, str] = {"triton": "cuda", "cpp": "cpu", "cuda": "cuda"}
MODULE: dict[Backend, str] = {"triton": "triton", "cpp": "megatron_replay._C", "cuda": "megatron_replay._C"}


def resolve(op: str, requested: str | None, device: torch.device | str) -> Backend:
    """The backend that runs `op` on `device`.

    None takes the fastest one that is registered and runs there. Triton's interpreter (TRITON_INTERPRET=1) is for
    tests: it runs on a CPU when asked for by name, and is never chosen.

    Raises ValueError for an op or backend that does not exist, RuntimeError for a request that cannot run.
    """
    if op not in IMPLEMENTATIONS:
        raise ValueError(f"op must be one of {', '.join(IMPLEMENTATIONS)}, got {op!r}")
    device = torch.device(device)
    if requested is None:
        for backend in FASTEST_FIRST:
            if DEVICE.get(backend, device.type) == device.type and _obstacle(op, backend, device) is None:
                return backend
        raise RuntimeError(f"backend: no implementation of {op} runs on {device}")
    for backend in BACKENDS:
        if backend == requested:
            if (why := _obstacle(op, backend, device)) is not None:
                raise RuntimeError(f"backend {backend} cannot run {op} on {device}: {why}")
            return backend
    raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, or None, got {requested!r}")


def load(op: str, backend: Backend) -> ModuleType:
    """The module that implements `op`; an import error is the caller's to see."""
    return importlib.import_module(IMPLEMENTATIONS[op][backend])


def _obstacle(op: str, backend: Backend, device: torch.device) -> str | None:
    """Why the backend cannot run the op on the device, or None."""
    if backend not in IMPLEMENTATIONS[op]:
        return f"it is not registered (there is {', '.join(IMPLEMENTATIONS[op])})"
    if backend == "reference":
        return None
    interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != DEVICE[backend] and not interpreted:
        return f"it needs a {DEVICE[backend].upper()} device"
    if not _installed(MODULE[backend]):
        return f"the module {MODULE[backend]} is not installed"
    if backend == "cuda" and not _built_with_cuda():
        return "megatron_replay._C was built without CUDA; install nvcc and build it again"
    return None


@functools.cache
def _built_with_cuda() -> bool:
    return bool(extension().cuda_architectures())


@functools.cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
