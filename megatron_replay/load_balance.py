"""Which data-parallel rank trains a drawn rollout.

Dims: R ranks, m drawn rollouts.
"""

from __future__ import annotations

import heapq

import torch
from torch import Tensor


def assign(lengths: Tensor, owner: Tensor, load: Tensor) -> Tensor:
    """The rank [m] that trains each drawn rollout, so that all ranks have about as many tokens; all find the same.

    lengths [m] tokens, owner [m] the rank that stores it, load [R] tokens that each rank trains anyway, all int64.
    A rank keeps what it stores, longest first, up to its share: ceil(all tokens / R), or the largest of `load` where
    that is more, since nothing can lower it. The rest go, longest first, to the rank with the fewest tokens. Nothing
    moves where that would not lower the largest load.
    """
    sizes, owners, before, kept = lengths.tolist(), owner.tolist(), load.tolist(), load.tolist()
    share = max(-(-(sum(before) + sum(sizes)) // len(before)), max(before))
    destination, waiting = owners.copy(), []
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        before[owners[i]] += sizes[i]
        if kept[owners[i]] + sizes[i] <= share:
            kept[owners[i]] += sizes[i]
        else:
            waiting.append(i)
    after = [(tokens, rank) for rank, tokens in enumerate(kept)]
    heapq.heapify(after)
    for i in waiting:
        tokens, destination[i] = after[0]
        heapq.heapreplace(after, (tokens + sizes[i], destination[i]))
    if max(after)[0] >= max(before):
        return owner
    return torch.tensor(destination, dtype=torch.int64)
