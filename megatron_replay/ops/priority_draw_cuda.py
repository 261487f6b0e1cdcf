"""Keys of the priority draw from the compiled extension. Equations: `priority_draw.draw_keys`.

Dims: C stored rollouts.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megatron_replay.ops.philox import STREAM_REPLAY_DRAW


def draw_keys(weight: Tensor, uid: Tensor, *, seed: int, step: int, repeat: int) -> Tensor:
    """weight [C] float, uid [C] int64 on a CUDA device, or on the CPU (the host form of the same expression)."""
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
        raise RuntimeError("megatron_replay._C is not built; run `pip install --no-build-isolation -e .`") from error
    return _C
