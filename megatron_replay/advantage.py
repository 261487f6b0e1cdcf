"""Group-relative advantages, frozen at birth, and the filter of groups that carry no signal.

Dims: N rollouts.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

import torch
from torch import Tensor

from megatron_replay.config import AdvantageStd
from megatron_replay.ops.checks import require_choice
from megatron_replay.rollout import RolloutBatch

# rewards closer together than this, relative to their size, are equal: float residue is no signal
ZERO_STD = 1e-6


class GroupAdvantages(NamedTuple):
    """advantage, group_std [N] float32; keep [N] bool, False in groups of zero variance (both are exactly 0 there)."""

    advantage: Tensor
    group_std: Tensor
    keep: Tensor


def group_advantages(
    reward: Tensor, group_ids: Tensor, *, std: AdvantageStd = "population", eps: float = 1e-6
) -> GroupAdvantages:
    """A_i = (r_i - mean_g) / (std_g + eps) over the rollouts of i's group; with std "none", A_i = r_i - mean_g.

    reward [N] float, group_ids [N] int64, in any order and of any group size. "population" divides the squares by
    the group size, "sample" by one less. group_std is that std ("none": the population's). A group has zero variance
    when its population std is at most 1e-6 max(1, max|r|), in every mode; so has a group of one. Two passes in
    float64. Raises ValueError for a reward that is not finite. Source: GRPO (arXiv 2402.03300), Dr. GRPO (2503.20783).
    """
    require_choice("std", std, get_args(AdvantageStd))
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")
    if reward.dim() != 1 or reward.shape != group_ids.shape:
        raise ValueError(f"reward must be [N] like group_ids {list(group_ids.shape)}, got {list(reward.shape)}")
    finite = torch.isfinite(reward)
    if not bool(finite.all()):
        at = int((~finite).nonzero()[0])
        raise ValueError(f"reward must be finite, got {reward[at].item()} at position {at}")
    _, group = torch.unique(group_ids, return_inverse=True)
    groups = int(group.max()) + 1 if group.numel() else 0

    def group_sum(x: Tensor) -> Tensor:
        return torch.zeros(groups, dtype=torch.float64, device=x.device).index_add_(0, group, x)

    r = reward.double()
    size = group_sum(torch.ones_like(r))
    centred = r - (group_sum(r) / size)[group]
    squares = group_sum(centred.square())
    population = (squares / size).sqrt()
    scale = torch.ones(groups, dtype=torch.float64, device=r.device)
    scale.scatter_reduce_(0, group, r.abs(), "amax")
    keep = (population > ZERO_STD * scale)[group]

    chosen = (squares / (size - 1).clamp(min=1)).sqrt() if std == "sample" else population
    advantage = centred if std == "none" else centred / (chosen[group] + eps)
    return GroupAdvantages(torch.where(keep, advantage, 0).float(), torch.where(keep, chosen[group], 0).float(), keep)


def with_group_advantages(batch: RolloutBatch, *, std: AdvantageStd = "population", eps: float = 1e-6) -> RolloutBatch:
    """All rollouts, with advantage and group_std from their rewards; both 0 in groups of zero variance."""
    found = group_advantages(batch.reward, batch.group_ids, std=std, eps=eps)
    return batch.replace(advantage=found.advantage, group_std=found.group_std)


def informative(batch: RolloutBatch) -> RolloutBatch:
    """The rollouts of groups with variance: the others have advantage 0 and would only dilute the loss."""
    return batch.select(batch.group_std > 0)
