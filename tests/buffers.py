"""Replay buffers and what is pushed into them, for tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megatron_replay.config import ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import RolloutBatch
from tests.rollouts import batch


def buffer(arena: int = 4096, group: DataParallelGroup | None = None, **config: Any) -> RolloutReplayBuffer:
    return RolloutReplayBuffer(ReplayConfig(**config), seed=7, arena_tokens=arena, group=group)


def rows(n: int, step: int, *, first: int | None = None, lengths: tuple[int, int] = (2, 3)) -> RolloutBatch:
    return batch([lengths] * n, birth_step=step, first_counter=100 * step if first is None else first, seed=step)


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
