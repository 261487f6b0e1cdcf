"""Ways in which R ranks agree on the n largest keys. All are exact; they differ in bytes and rounds.

A row is 24 bytes: key, uid, length. A shard is the live rows of a rank in the order of the draw (stored.shards).
What every rank decides from what all have received is decided once, for rank 0.

Dims: R ranks, n rollouts asked for, m <= n rollouts drawn, k rows that a rank may send in a round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.global_draw import Candidates, first_round, global_draw
from megatron_replay.ops.priority_draw import largest

from .stored import keys_of

COLUMNS = 3
WORD = 8  # bytes
BINS = 2048


Kind = Literal["all-gather", "all-reduce"]


@dataclass(frozen=True)
class Collective:
    """One collective and the bytes [R] that each rank brings to it; to an all-reduce all bring the same."""

    kind: Kind
    blocks: np.ndarray


@dataclass
class Exchange:
    """What one draw has cost so far, and at the end who won: uids [m] in the order of the draw."""

    ranks: int
    rounds: int = 0  # gathers of rows
    candidates: int = 0  # rows sent, over all ranks and rounds, without headers and padding
    select_seconds: float = 0.0  # on one rank: finding the winners in what it received
    collectives: list[Collective] = field(default_factory=list)
    uids: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))

    def log(self, kind: Kind, blocks: Sequence[int] | np.ndarray, rows: int | None = None) -> None:
        """One collective, and the candidates of all ranks where it carries some. A rank alone sends nothing."""
        if self.ranks > 1:
            self.collectives.append(Collective(kind, np.asarray(blocks, dtype=np.int64)))
            self.rounds += rows is not None
            self.candidates += rows or 0

    def select(self, rows: Tensor, n: int) -> Tensor:
        """Positions of the n largest of rows [c, 3]; sets `uids`."""
        won = largest(keys_of(rows), rows[:, 1], n)
        self.uids = rows[won, 1]
        return won

    @contextmanager
    def selecting(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.select_seconds += time.perf_counter() - start


class SimulatedGroup(DataParallelGroup):
    """R ranks in one process, seen from rank 0: it gathers what the others would send. Every gather is logged."""

    def __init__(self, shards: Sequence[Tensor], n: int, exchange: Exchange) -> None:
        super().__init__()
        self.size = len(shards)
        self.exchange = exchange
        self.candidates = [shard[:n] for shard in shards]
        self.seconds = 0.0  # spent in gathers, which stand for the network

    def own(self) -> Candidates:
        """Rank 0's."""
        rows = self.candidates[0]
        return Candidates(keys_of(rows), rows[:, 1].contiguous(), rows[:, 2].contiguous(), load=0)

    def all_gather(self, x: Tensor) -> Tensor:
        """x [1 + k, 3], rank 0's message -> [R, 1 + k, 3]. Raises RuntimeError if a shard does not give the same."""
        wire = self.gather(len(x) - 1)
        if not torch.equal(wire[0], x):
            raise RuntimeError("the product's message is not a header (candidates, 0, 0) and rows (key, uid, length)")
        return wire

    def gather(self, k: int) -> Tensor:
        """[R, 1 + k, 3] int64: of every rank a header (candidates it has, 0, 0) and its k largest rows."""
        start = time.perf_counter()
        # numpy's zeros take memory where they are written: the padding of a large k costs none here
        wire = np.zeros((self.size, 1 + k, COLUMNS), np.int64)
        for block, rows in zip(wire, self.candidates, strict=True):
            block[0, 0] = len(rows)
            block[1 : 1 + len(rows[:k])] = rows[:k].numpy()
        sent = int(wire[:, 0, 0].clip(max=k).sum())
        self.exchange.log("all-gather", np.full(self.size, wire[0].nbytes), rows=sent)
        self.seconds += time.perf_counter() - start
        return torch.from_numpy(wire)


def full(shards: Sequence[Tensor], n: int) -> Exchange:
    """Every rank sends its n largest rows: one all-gather of R (1 + n) rows."""
    exchange = Exchange(len(shards))
    wire = SimulatedGroup(shards, n, exchange).gather(n)
    with exchange.selecting():
        rows, _ = sent_rows(wire)
        exchange.select(rows, n)
    return exchange


def capped(shards: Sequence[Tensor], n: int) -> Exchange:
    """The product's (megatron_replay.global_draw): k rows from every rank, and k doubles until the result is exact."""
    exchange = Exchange(len(shards))
    group = SimulatedGroup(shards, n, exchange)
    own = group.own()
    start = time.perf_counter()
    winners = global_draw(own, n, group, with_replacement=False)
    exchange.select_seconds = time.perf_counter() - start - group.seconds
    exchange.uids = winners.uids
    return exchange


def fallback_probability(n: int, ranks: int, k: int) -> float:
    """At most how likely some rank has k winners or more, if each of the n lies on a random rank (union bound).

    R P(Binomial(n, 1/R) >= k); 0 where a rank may send all n.
    """
    if k >= n:
        return 0.0
    p = 1 / ranks

    def log_mass(j: int) -> float:
        choose = math.lgamma(n + 1) - math.lgamma(j + 1) - math.lgamma(n - j + 1)
        return choose + j * math.log(p) + (n - j) * math.log1p(-p)

    return min(1.0, ranks * math.fsum(math.exp(log_mass(j)) for j in range(k, n + 1)))


def capped_then_rest(shards: Sequence[Tensor], n: int) -> Exchange:
    """As `capped`, but at most two rounds: the second brings what may still win, from the ranks that hold it.

    After round one the last of the n largest rows received bounds the winners from below. Every rank knows who held
    some back and won with all it sent; only those send again, all rows above the bound, once an all-gather has told
    their counts.
    """
    exchange, ranks = Exchange(len(shards)), len(shards)
    group = SimulatedGroup(shards, n, exchange)
    # a rank alone sends nothing, and has all
    k = first_round(n, ranks) if ranks > 1 else n
    wire = group.gather(k)
    with exchange.selecting():
        rows, owner = sent_rows(wire)
        won = exchange.select(rows, n)
        unfinished = (wire[:, 0, 0] > k) & (torch.bincount(owner[won], minlength=ranks) == k)
    if not bool(unfinished.any()):
        return exchange
    rest = [x[k:] if sends else x[:0] for x, sends in zip(group.candidates, unfinished.tolist(), strict=True)]
    if len(won) == n:
        rest = [x[before(x, rows[won[-1]])] for x in rest]
    exchange.log("all-gather", np.full(ranks, WORD))
    exchange.log("all-gather", [x.nbytes for x in rest], rows=sum(map(len, rest)))
    with exchange.selecting():
        exchange.select(torch.cat([rows, *rest]), n)
    return exchange


def by_histogram(shards: Sequence[Tensor], n: int, bins: int = BINS) -> Exchange:
    """Every rank sends the rows above an edge that leaves at least n of them.

    Four collectives: an all-reduce of the range of the keys (maximum and negated minimum, as one MAX), one of the
    histogram over it, an all-gather of each rank's number of rows above the edge, and one of those rows, whose
    sizes are known by then. A bin is a monotone function of the key, so whatever lies in a bin above that of the
    n-th largest key is sent as well.
    """
    exchange, ranks = Exchange(len(shards)), len(shards)
    keys = [keys_of(shard) for shard in shards]
    exchange.log("all-reduce", np.full(ranks, 2 * WORD))
    high = max((float(x[0]) for x in keys if len(x)), default=-math.inf)
    low = min((float(x[-1]) for x in keys if len(x)), default=math.inf)
    if low > high:
        return exchange
    width = (high - low) / bins or 1.0
    binned = [((x - low) / width).long().clamp_(max=bins - 1) for x in keys]
    exchange.log("all-reduce", np.full(ranks, bins * WORD))
    counts = torch.stack([torch.bincount(x, minlength=bins) for x in binned]).sum(0)
    above = counts.flip(0).cumsum(0).flip(0)  # rows in this bin or a higher one
    edge = max(0, int((above >= n).sum()) - 1)
    chosen = [shard[x >= edge] for shard, x in zip(shards, binned, strict=True)]
    exchange.log("all-gather", np.full(ranks, WORD))
    exchange.log("all-gather", [x.nbytes for x in chosen], rows=sum(map(len, chosen)))
    with exchange.selecting():
        exchange.select(torch.cat(chosen), n)
    return exchange


def sent_rows(wire: Tensor) -> tuple[Tensor, Tensor]:
    """(rows [c, 3], rank of each [c]) of a gather, without headers and padding."""
    sent = torch.arange(wire.size(1) - 1) < wire[:, :1, 0]
    return wire[:, 1:][sent], sent.nonzero()[:, 0]


def before(rows: Tensor, bound: Tensor) -> Tensor:
    """[c] bool: the rows that come before `bound` [3] in the order of the draw."""
    keys, key = keys_of(rows), keys_of(bound[None])
    return (keys > key) | ((keys == key) & (rows[:, 1] < bound[1]))


def forms(bins: int = BINS) -> dict[str, Callable[[Sequence[Tensor], int], Exchange]]:
    """By the names of the tables."""
    return {
        "full": full,
        "capped": capped,
        "histogram": partial(by_histogram, bins=bins),
        "capped, then rest": capped_then_rest,
    }
