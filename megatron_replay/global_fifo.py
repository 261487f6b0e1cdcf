"""The oldest rollouts over the shards of all data-parallel ranks, for a capacity that counts all of them.

Dims: N rollouts of this shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup


def oldest_of_all(birth_step: Tensor, uid: Tensor, count: int, group: DataParallelGroup) -> int:
    """How many of this shard's rollouts are among the `count` oldest of all shards, by (birth_step, uid).

    birth_step, uid [N] int64; uids are unique over all shards, which hold at least `count` >= 1 rollouts together.
    Every rank takes part: a bisection over birth steps, then one over the uids of the last step that goes, each a few
    sums of one number. So it costs the same however many rollouts go.
    """
    if group.size == 1:
        return count
    last = _least(birth_step, lambda b: group.total(int((birth_step <= b).sum())) >= count, group)
    before = int((birth_step < last).sum())
    rest = count - group.total(before)
    uids = uid[birth_step == last]
    final = _least(uids, lambda u: group.total(int((uids <= u).sum())) >= rest, group)
    return before + int((uids <= final).sum())


def _least(values: Tensor, enough: Callable[[int], bool], group: DataParallelGroup) -> int:
    """The least value of all shards for which `enough` is true; it is true for the largest."""
    none = torch.iinfo(torch.int64).min
    ends = torch.tensor([none, none])
    if values.numel():
        ends = torch.stack([-values.min(), values.max()])
    low, high = (int(x) for x in group.max(ends))
    low = -low
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low
