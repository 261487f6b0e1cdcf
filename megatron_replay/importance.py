"""Truncated importance weights between the trainer's and the engine's probability of a rollout."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megatron_replay.ops.checks import require, require_choice
from megatron_replay.rollout import RolloutBatch

ImportanceMode = Literal["truncate", "mask"]


@dataclass(frozen=True)
class ImportanceOptions:
    """`cap` bounds the weight: `truncate` sets a larger one to cap, `mask` sets it to 0."""

    enabled: bool = False
    cap: float = 2.0
    mode: ImportanceMode = "truncate"

    def __post_init__(self) -> None:
        require(0 < self.cap < math.inf, "cap", self.cap, "must be positive and finite")
        require_choice("mode", self.mode, get_args(ImportanceMode))


def rollout_importance_weight(batch: RolloutBatch, trainer_logprobs: Tensor, options: ImportanceOptions) -> Tensor:
    """w_i = exp(sum_t [log p_trainer - log p_engine]) over the trained tokens of rollout i, then capped.

    batch.behavior_logprobs [T] are the engine's; trainer_logprobs [T] are the trainer's at the same weights.
    Returns [N] float32, all 1 where the options are off. (Sequence-level TIS / masked IS.)
    """
    if not options.enabled:
        return torch.ones(len(batch))
    gap = torch.where(batch.loss_mask, trainer_logprobs - batch.behavior_logprobs, 0.0).double()
    total = torch.zeros(len(batch), dtype=torch.float64)
    total.index_add_(0, torch.repeat_interleave(torch.arange(len(batch)), batch.lengths), gap)
    weight = total.exp()
    over = weight > options.cap
    capped = torch.zeros_like(weight) if options.mode == "mask" else torch.full_like(weight, options.cap)
    return torch.where(over, capped, weight).float()
