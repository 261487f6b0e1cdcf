"""Keys of the priority draw in plain torch: the definition. Equations: `priority_draw.draw_keys`.

Dims: C stored rollouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.ops.philox import STREAM_REPLAY_DRAW, uniform


def draw_keys(weight: Tensor, uid: Tensor, *, seed: int, step: int, repeat: int) -> Tensor:
    w = weight.double()
    usable = (w > 0) & torch.isfinite(w)
    gumbel = -(-uniform(seed, STREAM_REPLAY_DRAW, uid, step, repeat).log()).log()
    return torch.where(usable, torch.where(usable, w, 1).log() + gumbel, -torch.inf)
