"""Stock: the rollouts that every implementation of one run holds, each of them a function of its uid.

Dims: N rollouts of L tokens each, n of them asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_replay.config import ReplayConfig
from megatron_replay.rollout import RolloutBatch

FILL = 8192  # rollouts of one push while a buffer is filled
REPLAY_RATIO = 0.5  # a step draws half of what it pushes
# each draw of a turn has a step of its own, so that it finds other rollouts
STEPS_PER_TURN = 1_000_000
GOLDEN = 0.6180339887498949
ALPHA, EPS = ReplayConfig.priority_alpha, ReplayConfig.priority_eps


@dataclass(frozen=True)
class BufferSize:
    """A buffer of `rollouts`, of which a draw takes `drawn`; every rollout has `tokens_per_rollout` tokens."""

    rollouts: int
    drawn: int
    tokens_per_rollout: int

    def __post_init__(self) -> None:
        if self.drawn < 1:
            raise ValueError(f"drawn must be at least 1, got {self.drawn}")
        if self.tokens_per_rollout < 1:
            raise ValueError(f"tokens_per_rollout must be at least 1, got {self.tokens_per_rollout}")
        if self.rollouts < 2 * self.drawn:
            raise ValueError(f"rollouts must be at least twice drawn {self.drawn}, got {self.rollouts}")

    @property
    def births(self) -> int:
        """Turns of which rollouts are stored at a time."""
        return int(self.rollouts * REPLAY_RATIO) // self.drawn

    @property
    def pushed(self) -> int:
        """Rollouts that a turn pushes, and evicts."""
        return self.rollouts // self.births

    @property
    def label(self) -> str:
        return f"{self.rollouts:,} rollouts of {self.tokens_per_rollout} tokens, {self.drawn:,} drawn"


class Rows(NamedTuple):
    tokens: Tensor  # [n, L] int32
    loss_mask: Tensor  # [n, L] bool
    behavior_logprobs: Tensor  # [n, L] float32


@dataclass(frozen=True)
class Stock:
    """Rollouts 0 .. N-1 fill a buffer; turn t then evicts the oldest `pushed` and pushes as many new ones."""

    size: BufferSize
    device: torch.device

    def rows(self, uids: Tensor) -> Rows:
        """[n] -> what is stored of these rollouts."""
        L = self.size.tokens_per_rollout
        tokens = (uids[:, None] * L + torch.arange(L, device=uids.device)) % 2**31
        return Rows(tokens.int(), tokens % 4 != 0, -(tokens % 4093).float() / 4093)

    def advantage(self, uids: Tensor) -> Tensor:
        """[n] float32, as if drawn from a normal distribution."""
        return torch.special.ndtri((uids.double() * GOLDEN + GOLDEN / 2) % 1).float()

    def weights(self, uids: Tensor) -> Tensor:
        """[n] float64, (|A| + eps)^alpha: every implementation is to draw by these."""
        return (self.advantage(uids).double().abs() + EPS) ** ALPHA

    def uids(self, first: int, last: int) -> Tensor:
        return torch.arange(first, last, device=self.device)

    def all_uids(self) -> Tensor:
        return self.uids(0, self.size.rollouts)

    def fill(self) -> Iterator[Tensor]:
        """The uids of a full buffer, in parts."""
        return (self.uids(a, min(a + FILL, self.size.rollouts)) for a in range(0, self.size.rollouts, FILL))

    def fresh(self, turn: int) -> Tensor:
        """uids that a turn pushes."""
        first = self.size.rollouts + turn * self.size.pushed
        return self.uids(first, first + self.size.pushed)

    def birth_steps(self, uids: Tensor) -> Tensor:
        """[n] int64; what is left over of N / pushed belongs to the newest of a full buffer."""
        filled = (uids // self.size.pushed).clamp(max=self.size.births - 1)
        later = self.size.births + (uids - self.size.rollouts) // self.size.pushed
        return torch.where(uids < self.size.rollouts, filled, later) * STEPS_PER_TURN

    @property
    def tau_max(self) -> int:
        return self.size.births * STEPS_PER_TURN - 1

    def first_step(self, turn: int) -> int:
        """The step of a turn's eviction and push; its draws follow. Turn -1 is the full buffer."""
        return (self.size.births + turn) * STEPS_PER_TURN

    def batch(self, uids: Tensor) -> RolloutBatch:
        n, L = uids.numel(), self.size.tokens_per_rollout
        rows = self.rows(uids)
        advantage = self.advantage(uids)
        return RolloutBatch(
            tokens=rows.tokens.long().flatten(),
            loss_mask=rows.loss_mask.flatten(),
            behavior_logprobs=rows.behavior_logprobs.flatten(),
            cu_seqlens=torch.arange(n + 1, dtype=torch.int32, device=uids.device) * L,
            reward=(advantage > 0).float(),
            advantage=advantage,
            group_std=torch.ones_like(advantage),
            importance_weight=torch.ones_like(advantage),
            group_ids=uids // 8,
            birth_step=self.birth_steps(uids),
            uid=uids,
            prompt_id=uids // 8,
        )
