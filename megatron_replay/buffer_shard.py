"""A saved shard of the replay buffer: flat names, contiguous CPU tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.draw_size import DrawSize
from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_FIELDS, RolloutBatch

FIELDS = (*TOKEN_FIELDS, *ROLLOUT_DTYPES, "cu_seqlens")
COUNTERS = ("evicted_by_age", "evicted_by_capacity")
DRAW_SCALE = "draw_scale"


def to_shard(batch: RolloutBatch, counters: dict[str, int], draw_scale: float) -> dict[str, Tensor]:
    shard = {name: getattr(batch, name) for name in FIELDS}
    shard |= {name: torch.tensor(counters[name]) for name in COUNTERS}
    shard[DRAW_SCALE] = torch.tensor(draw_scale, dtype=torch.float64)
    return {name: x.cpu().contiguous() for name, x in shard.items()}


def from_shard(shard: dict[str, Tensor]) -> tuple[RolloutBatch, dict[str, int], float]:
    """What `to_shard` was given. Raises ValueError for a missing tensor, a wrong dtype or shape, or a bad scale."""
    if missing := [x for x in (*FIELDS, *COUNTERS, DRAW_SCALE) if x not in shard]:
        raise ValueError(f"must hold every tensor, lacks {', '.join(missing)}")
    scale = float(shard[DRAW_SCALE])
    if not DrawSize.LEAST <= scale <= 1:
        raise ValueError(f"{DRAW_SCALE} must be in [{DrawSize.LEAST}, 1], got {scale}")
    return RolloutBatch(**{name: shard[name] for name in FIELDS}), {name: int(shard[name]) for name in COUNTERS}, scale
