"""Keys of the priority draw from the compiled extension. Equations: `priority_draw.draw_keys`.

Dims: C stored rollouts.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megatron_replay.ops.philox import STREAM_REPLAY_DRAW


def draw_keys(weight: Tensor, uid: Tensor, *, seed: int, step: int, repeat: int) -> Tensor:
    """weight [C] float, uid [C] int64 on a CUDA device, or on the CPU (the host form of the same expression).

    Strided and narrower inputs are copied to contiguous float64, so every input gives what the reference gives.
    Raises ValueError for other shapes, dtypes or devices, RuntimeError where the extension is not built.
    """
    if weight.dim() != 1 or not weight.is_floating_point():
        raise ValueError(f"weight must be a floating point [C], got {weight.dtype} {list(weight.shape)}")
    if weight.device.type not in ("cpu", "cuda"):
        raise ValueError(f"weight must be on a CPU or CUDA device, got {weight.device}")
    weight = weight.double().contiguous()
    if uid.shape != weight.shape or uid.dtype != torch.int64 or uid.device != weight.device:
        raise ValueError(
            f"uid must be int64 {list(weight.shape)} on {weight.device}, "
            f"got {uid.dtype} {list(uid.shape)} on {uid.device}"
        )
    uid = uid.contiguous()
    keys = torch.empty_like(weight)
    key = (seed & (2**64 - 1), STREAM_REPLAY_DRAW, step, repeat)
    pointers = (weight.data_ptr(), uid.data_ptr(), keys.data_ptr(), keys.numel())
    if weight.is_cuda:
        stream = torch.cuda.current_stream(weight.device).cuda_stream
        extension().priority_keys_cuda(*pointers, *key, stream, weight.device.index)
    else:
        extension().priority_keys_cpu(*pointers, *key)
    return keys


def extension() -> ModuleType:
    """megatron_replay._C, or a RuntimeError that says how to build it."""
    try:
        from megatron_replay import _C
    except ImportError as error:
        raise RuntimeError(
            f"megatron_replay._C is not built ({error}); run `pip install --no-build-isolation --no-deps -e .`"
        ) from error
    return _C
