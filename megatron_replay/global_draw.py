"""One draw over the shards of all data-parallel ranks.

Every rank brings its own best candidates, all see the same rows, and all choose the same winners.

Dims: R ranks, c candidates of a rank, k of them sent, n rollouts asked for, m <= n winners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.ops.priority_draw import largest


@dataclass(frozen=True)
class Candidates:
    """This shard's own draw, in order, on the host: keys [c] float64, uids and lengths [c] int64."""

    keys: Tensor
    uids: Tensor
    lengths: Tensor
    load: int  # tokens that this rank trains beside the draw
    problem: str | None = None  # why this rank cannot draw


@dataclass(frozen=True)
class Winners:
    """The draw of all shards, in order: uids, lengths, owner (rank) and place (among the owner's candidates) [m]."""

    uids: Tensor
    lengths: Tensor
    owner: Tensor
    place: Tensor
    loads: Tensor  # [R], Candidates.load of every rank


def global_draw(own: Candidates, n: int, group: DataParallelGroup, *, with_replacement: bool) -> Winners:
    """The n largest of all shards' keys by (key descending, uid ascending); with replacement, of each repeat.

    One all-gather of [R, 1 + k, 3] int64: a header (c, load, whether there is a problem), then (key, uid, length).
    Without replacement a rank first sends k = n / R and four standard deviations; only where a rank that held some
    back won with all it sent does k double and a further round follow. Every rank sees that from the same rows.

    Raises RuntimeError on every rank where one has a problem, on that one with its own words.
    """
    k = n if with_replacement else first_round(n, group.size)
    while True:
        rows, counts, loads = _exchange(own, k, group)
        if with_replacement:
            return _each_repeat(rows, counts, loads)
        sent = torch.arange(k) < counts[:, None]  # [R, k]
        owner, place = sent.nonzero(as_tuple=True)
        flat = rows[sent]  # [all sent, 3]
        won = largest(_keys(flat), flat[:, 1], n)
        wins = torch.bincount(owner[won], minlength=group.size)
        if not bool(((counts > k) & (wins == k)).any()):
            return Winners(flat[won, 1], flat[won, 2], owner[won], place[won], loads)
        k = min(n, 2 * k)


def first_round(n: int, ranks: int) -> int:
    """Candidates that a rank sends first: its fair share of n, and four standard deviations."""
    share = n / ranks
    return min(n, math.ceil(share + 4 * math.sqrt(share)) + 8)


def _exchange(own: Candidates, k: int, group: DataParallelGroup) -> tuple[Tensor, Tensor, Tensor]:
    """(rows [R, k, 3], counts c [R], loads [R]) of all ranks."""
    message = torch.zeros(1 + k, 3, dtype=torch.int64)
    message[0] = torch.tensor([own.keys.numel(), own.load, int(own.problem is not None)])
    mine = min(k, own.keys.numel())
    message[1 : 1 + mine, 0] = own.keys[:mine].view(torch.int64)  # the bits, so that one tensor carries all
    message[1 : 1 + mine, 1] = own.uids[:mine]
    message[1 : 1 + mine, 2] = own.lengths[:mine]
    gathered = group.all_gather(message)  # [R, 1 + k, 3]
    if own.problem is not None:
        raise RuntimeError(own.problem)
    if bool(gathered[:, 0, 2].any()):
        rank = int(gathered[:, 0, 2].argmax())
        raise RuntimeError(f"data-parallel rank {rank} cannot draw; its own error says why")
    return gathered[:, 1:], gathered[:, 0, 0], gathered[:, 0, 1]


def _each_repeat(rows: Tensor, counts: Tensor, loads: Tensor) -> Winners:
    """Draw j goes to the largest of the ranks' j-th keys; a rank has n candidates, or none."""
    ranks = (counts > 0).nonzero().squeeze(1)
    table = rows[ranks]  # [ranks with candidates, n, 3]
    if ranks.numel() == 0:
        none = rows.new_empty(0)
        return Winners(none, none, none, none, loads)
    keys = _keys(table)
    top = keys == keys.amax(0)
    at = table[..., 1].masked_fill(~top, torch.iinfo(torch.int64).max).argmin(0)  # [n]
    place = torch.arange(table.size(1))
    return Winners(table[at, place, 1], table[at, place, 2], ranks[at], place, loads)


def _keys(rows: Tensor) -> Tensor:
    return rows[..., 0].contiguous().view(torch.float64)
