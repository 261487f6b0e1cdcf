"""When a soak kills which process: drawn before it starts, so a seed names the whole plan."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Kill:
    step: int  # the run has at least this many rows
    kind: str
    pick: float  # which of several processes of this kind, in [0, 1)
    delay: float  # from the row on, in durations of a step, in [0, 1): a kill falls into any phase


def plan(steps: int, min_gap: int, max_gap: int, kinds: Sequence[str], seed: int) -> list[Kill]:
    """Kills that are min_gap to max_gap steps apart, the last one before the last step.

    Kinds come as from a shuffled deck: each comes once before any comes again.
    """
    draw = random.Random(seed)
    kills: list[Kill] = []
    deck: list[str] = []
    while (step := (kills[-1].step if kills else 0) + draw.randint(min_gap, max_gap)) < steps - 1:
        deck = deck or draw.sample(kinds, len(kinds))
        kills.append(Kill(step, deck.pop(), draw.random(), draw.random()))
    return kills
