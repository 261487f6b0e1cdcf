"""Time of a collective in the alpha-beta model: a step costs alpha seconds, and beta seconds a byte.

Textbook algorithms on R equal ranks that each send and receive one message at a time. What a real fabric adds or
saves (NVLink inside a node, contention, several channels) is not in it.

Dims: R ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from .exchange import Collective

Algorithm = Literal["ring", "tree", "doubling"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)


@dataclass(frozen=True)
class Link:
    """alpha: seconds of one step. bandwidth: bytes a second of one rank, in each direction."""

    alpha: float
    bandwidth: float


@dataclass(frozen=True)
class Cost:
    """Steps and seconds; sent, received: bytes of each rank [R]."""

    steps: int
    seconds: float
    sent: np.ndarray
    received: np.ndarray


def cost(collective: Collective, algorithm: Algorithm, link: Link) -> Cost:
    """Of one collective.

    ring: R - 1 steps, twice as many for an all-reduce (reduce-scatter, all-gather); blocks of different sizes are cut
    into pieces, so a link is busy for the bytes that pass it.
    tree: binomial, up to rank 0 and down again; the way down carries everything, in whole messages.
    doubling: after step s a rank has 2^s blocks (Bruck's form, for any R); an all-reduce exchanges whole vectors, and
    where R is no power of two the surplus ranks hand theirs over first and get the sum last.
    """
    if collective.kind == "all-gather":
        return GATHERS[algorithm](collective.blocks, link)
    return _all_reduce(collective.blocks, algorithm, link)


def total(collectives: list[Collective], ranks: int, algorithm: Algorithm, link: Link) -> Cost:
    """Of collectives one after another."""
    costs = [cost(c, algorithm, link) for c in collectives]
    zero = np.zeros(ranks, np.int64)
    return Cost(
        sum(c.steps for c in costs),
        sum(c.seconds for c in costs),
        sum((c.sent for c in costs), zero),
        sum((c.received for c in costs), zero),
    )


def _ring(blocks: np.ndarray, link: Link) -> Cost:
    received = blocks.sum() - blocks
    # the block of the next rank is the one that a rank need not pass on
    sent = blocks.sum() - np.roll(blocks, -1)
    steps = len(blocks) - 1
    return Cost(steps, steps * link.alpha + float(sent.max()) / link.bandwidth, sent, received)


def _tree(blocks: np.ndarray, link: Link) -> Cost:
    ranks, everything = len(blocks), int(blocks.sum())
    before = np.concatenate([[0], blocks.cumsum()])
    sent, received = np.zeros((2, ranks), np.int64)
    rounds = [2**s for s in range(_log2(ranks))]
    seconds = 0.0
    for distance in rounds:
        child = np.arange(distance, ranks, 2 * distance)
        size = before[np.minimum(child + distance, ranks)] - before[child]
        sent[child] += size
        received[child - distance] += size
        seconds += link.alpha + float(size.max()) / link.bandwidth
    for distance in reversed(rounds):
        child = np.arange(distance, ranks, 2 * distance)
        sent[child - distance] += everything
        received[child] += everything
        seconds += link.alpha + everything / link.bandwidth
    return Cost(2 * len(rounds), seconds, sent, received)


def _doubling(blocks: np.ndarray, link: Link) -> Cost:
    ranks = len(blocks)
    around = np.concatenate([[0], np.tile(blocks, 2).cumsum()])
    rank = np.arange(ranks)
    sent, received = np.zeros((2, ranks), np.int64)
    seconds = 0.0
    for step in range(_log2(ranks)):
        have = 2**step
        size = around[rank + min(have, ranks - have)] - around[rank]
        sent += size
        # from the rank that many places further
        received += np.roll(size, -have)
        seconds += link.alpha + float(size.max()) / link.bandwidth
    return Cost(_log2(ranks), seconds, sent, received)


GATHERS = {"ring": _ring, "tree": _tree, "doubling": _doubling}


def _all_reduce(blocks: np.ndarray, algorithm: Algorithm, link: Link) -> Cost:
    ranks, size = len(blocks), int(blocks[0])
    if algorithm == "ring":
        steps, message = 2 * (ranks - 1), -(-size // ranks)
        moved = np.full(ranks, steps * message)
        return Cost(steps, steps * (link.alpha + message / link.bandwidth), moved, moved)
    if algorithm == "tree":
        children = np.zeros(ranks, np.int64)
        for s in range(_log2(ranks)):
            children[np.arange(2**s, ranks, 2 ** (s + 1)) - 2**s] += 1
        # every rank but rank 0 also has a parent; up and down the same edges carry one vector each
        moved = size * (children + (np.arange(ranks) > 0))
        steps = 2 * _log2(ranks)
    else:
        exchanges = int(math.log2(ranks))
        surplus = ranks - 2**exchanges
        vectors = np.full(ranks, exchanges)
        vectors[:surplus] += 1
        vectors[2**exchanges :] = 1
        moved, steps = size * vectors, exchanges + (2 if surplus else 0)
    return Cost(steps, steps * (link.alpha + size / link.bandwidth), moved, moved)


def _log2(ranks: int) -> int:
    """Rounded up."""
    return (ranks - 1).bit_length()
