"""Stored rollouts of a run, and how they lie on the ranks.

Dims: N stored rollouts, R ranks, m live rollouts of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from megatron_replay.advantage import group_advantages
from megatron_replay.ops.priority_draw import largest, log_weights
from megatron_replay.ops.priority_draw_reference import draw_keys

Layout = Literal["even", "groups", "skewed", "one-rank"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
GROUP_SIZE = 8
PRIORITY_EPS = 1e-6
# keys made at a time: the generator's temporaries stay in the cache
BLOCK = 2**16


@dataclass(frozen=True)
class LengthLaw:
    """Tokens of a rollout: log-normal with this median and sigma, at most `longest`.

    Half of the variance of the logarithm belongs to the prompt, so rollouts of a group are alike.
    """

    median: float
    sigma: float
    longest: int

    def sample(self, count: int, random: np.random.Generator) -> Tensor:
        """[count] int64, at least 1; GROUP_SIZE neighbours share a prompt."""
        prompts = -(-count // GROUP_SIZE)
        shared = np.repeat(random.standard_normal(prompts), GROUP_SIZE)[:count]
        z = (shared + random.standard_normal(count)) / np.sqrt(2)
        tokens = np.exp(np.log(self.median) + self.sigma * z)
        return torch.from_numpy(np.clip(tokens.round(), 1, self.longest).astype(np.int64))


@dataclass(frozen=True)
class Stored:
    """log_weight [N] float64, -inf where the weight is unusable; uid, length [N] int64."""

    log_weight: Tensor
    uid: Tensor
    length: Tensor

    @classmethod
    def sample(
        cls, count: int, alpha: float, informative: float, law: LengthLaw, random: np.random.Generator
    ) -> Stored:
        """Groups of 8 with 1 to 7 correct ones, each as likely; weight (|A| + 1e-6)^alpha.

        Only a share `informative` of the run's groups has variance and is stored, and the uids of the others are left
        out.
        """
        groups = -(-count // GROUP_SIZE)
        correct = random.integers(1, GROUP_SIZE, (groups, 1)) > np.arange(GROUP_SIZE)
        reward = torch.from_numpy(correct.reshape(-1)).double()
        found = group_advantages(reward, torch.arange(groups).repeat_interleave(GROUP_SIZE))
        log_weight = log_weights(
            found.advantage, found.group_std, "abs-advantage", alpha, PRIORITY_EPS, backend="reference"
        )
        # in a group the correct ones come first, and uid mod R would see it
        order = random.permuted(np.tile(np.arange(GROUP_SIZE), (groups, 1)), axis=1)
        order += np.arange(groups)[:, None] * GROUP_SIZE
        uid = informative_groups(groups, informative, random)[:, None] * GROUP_SIZE + torch.arange(GROUP_SIZE)
        log_weight = log_weight[torch.from_numpy(order.reshape(-1))]
        return cls(log_weight[:count], uid.reshape(-1)[:count], law.sample(count, random))

    def keys(self, seed: int, step: int) -> Tensor:
        """[N] float64, the product's own."""
        parts = zip(self.log_weight.split(BLOCK), self.uid.split(BLOCK), strict=True)
        return torch.cat([draw_keys(w, u, seed=seed, step=step) for w, u in parts])


def informative_groups(count: int, share: float, random: np.random.Generator) -> Tensor:
    """Numbers [count] int64, ascending, of the groups with variance among count / share."""
    drawn = random.choice(max(count, round(count / share)), count, replace=False)
    return torch.from_numpy(np.sort(drawn).astype(np.int64))


def owners(stored: Stored, keys: Tensor, n: int, ranks: int, layout: Layout) -> Tensor:
    """Rank of each rollout, [N] int64.

    even: uid mod R. groups: the group's number mod R, as the product deals prompts. skewed: rank 0 holds the N/R
    largest weights, the last rank the smallest. one-rank: rank 0 holds all that will be drawn, the rest is even.
    """
    if layout == "even":
        return stored.uid % ranks
    if layout == "groups":
        return stored.uid // GROUP_SIZE % ranks
    owner = stored.uid % ranks
    if layout == "skewed":
        by_weight = stored.log_weight.argsort(descending=True, stable=True)
        owner[by_weight] = torch.arange(len(by_weight)) * ranks // len(by_weight)
    else:
        owner[largest(keys, stored.uid, n)] = 0
    return owner


def shards(keys: Tensor, uid: Tensor, length: Tensor, owner: Tensor, ranks: int) -> list[Tensor]:
    """Each rank's live rows [m, 3] int64, (bits of the key, uid, length), in the order of the draw.

    Rollouts with key -inf, whose weight is unusable, are left out. Raises ValueError for an owner outside [0, R).
    """
    if owner.numel() and (int(owner.min()) < 0 or int(owner.max()) >= ranks):
        raise ValueError(f"owner must be in [0, {ranks}), got {int(owner.min())} to {int(owner.max())}")
    rows = torch.stack([keys.view(torch.int64), uid, length], 1)
    by_owner = owner.argsort(stable=True)
    parts = rows[by_owner].split(torch.bincount(owner, minlength=ranks).tolist())
    return [part[largest(keys_of(part), part[:, 1], len(part))] for part in parts]


def keys_of(rows: Tensor) -> Tensor:
    """[m] float64 from rows [m, 3]."""
    return rows[:, 0].contiguous().view(torch.float64)
