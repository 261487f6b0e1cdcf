"""The priority draw in the compiled extension: threads of the CPU, or CUDA kernels. Equations: `priority_draw`.

Dims: C slots of a ring, N rollouts, n rollouts asked for, m <= n rollouts drawn.
"""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from megatron_replay.ops.extension import extension, queue
from megatron_replay.ops.philox import STREAM_REPLAY_DRAW
from megatron_replay.ops.priority_draw import DrawWindow, ReplayPriority


def log_weights(advantage: Tensor, group_std: Tensor, priority: str, alpha: float, eps: float) -> Tensor:
    advantage, group_std = advantage.contiguous(), group_std.contiguous()
    out = torch.empty(advantage.numel(), dtype=torch.float64, device=advantage.device)
    kind = get_args(ReplayPriority).index(priority)
    rest = (advantage.data_ptr(), group_std.data_ptr(), out.numel(), alpha, eps, out.data_ptr())
    if advantage.is_cuda:
        extension().log_weights_cuda(kind, *rest, queue(advantage.device))
    else:
        extension().log_weights_cpu(kind, *rest)
    return out


def priority_draw(window: DrawWindow, n: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    slots, keys, drawn = outputs = _outputs(window, n)
    if window.uid.is_cuda:
        size = extension().draw_workspace_bytes(window.size, n)
        launch_priority_draw(window, n, outputs, torch.empty(size, dtype=torch.uint8, device=slots.device), seed, step)
    else:
        arguments = (_window(window), _key(seed, step), n, _addresses(outputs))
        extension().priority_draw_cpu(*arguments, torch.get_num_threads())
    count = int(drawn)
    return slots[:count], keys[:count]


def repeated_draw(window: DrawWindow, n: int, *, seed: int, step: int) -> tuple[Tensor, Tensor]:
    slots, keys, drawn = outputs = _outputs(window, n)
    arguments = (_window(window), _key(seed, step), n, _addresses(outputs))
    if window.uid.is_cuda:
        extension().repeated_draw_cuda(*arguments, queue(slots.device))
    else:
        extension().repeated_draw_cpu(*arguments, torch.get_num_threads())
    count = int(drawn)
    return slots[:count], keys[:count]


def launch_priority_draw(
    window: DrawWindow, n: int, outputs: tuple[Tensor, Tensor, Tensor], workspace: Tensor, seed: int, step: int
) -> None:
    """Queue the kernels alone: no wait and no allocation, so that a CUDA graph can capture it.

    Window, seed and step are values of the launch: a graph that is replayed draws the same again.

    outputs: slots [n] int64, keys [n] float64 and drawn [1] int64, which says how many of them are filled; workspace:
    `draw_workspace_bytes(window.size, n)` bytes. n must be at most window.size.
    """
    arguments = (_window(window), _key(seed, step), n, _addresses(outputs), workspace.data_ptr())
    extension().priority_draw_cuda(*arguments, queue(workspace.device))


def _outputs(window: DrawWindow, n: int) -> tuple[Tensor, Tensor, Tensor]:
    like = window.uid
    return like.new_empty(n), window.log_weight.new_empty(n), like.new_empty(1)


def _window(window: DrawWindow) -> tuple[int, int, int, int, int]:
    log_weight, uid = window.log_weight, window.uid
    return log_weight.data_ptr(), uid.data_ptr(), uid.numel(), window.head, window.size


def _key(seed: int, step: int) -> tuple[int, int, int]:
    return seed & (2**64 - 1), STREAM_REPLAY_DRAW, step


def _addresses(outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int, int]:
    slots, keys, drawn = outputs
    return slots.data_ptr(), keys.data_ptr(), drawn.data_ptr()
