"""HeldoutAccuracy: how a run measures its policy before, and after, it trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.engines.build import AnyEngine
from megatron_replay.rollout import Completion, Prompt


@dataclass(frozen=True)
class HeldoutAccuracy:
    """Mean reward over `prompts`, `samples` of each at the sampling temperature; all ranks call it together.

    A rollout without a finite reward does not count. `policy` is what the engine takes weights from.
    """

    prompts: Sequence[Prompt]
    samples: int
    engine: AnyEngine
    policy: Any
    reward: Callable[[list[Completion]], Sequence[float | None]]
    group: DataParallelGroup

    def __call__(self, step: int) -> float | None:
        """With the weights of `step`. None where no rollout has a reward."""
        self.engine.load_weights(self.policy, version=step)
        completions = self.engine.submit(self.group.shard(self.prompts), self.samples).result(step)
        rewards = [r for r in self.reward(completions) if r is not None and math.isfinite(r)]
        sums = self.group.sum(torch.tensor([sum(rewards), len(rewards)], dtype=torch.float64))
        return float(sums[0] / sums[1]) if sums[1] > 0 else None
