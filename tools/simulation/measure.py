"""One setting of the simulation: draws over several seeds, through every form of the exchange, and their loads."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_replay.global_draw import first_round
from megatron_replay.load_balance import assign
from megatron_replay.ops.priority_draw import largest
from megatron_replay.rollout_exchange import ROW_BYTES, TOKEN_BYTES

from .exchange import Exchange, fallback_probability, forms
from .network import ALGORITHMS, Link, total
from .stored import GROUP_SIZE, Layout, LengthLaw, Stored, informative_groups, owners, shards


@dataclass(frozen=True)
class Setting:
    """ranks that hold `rollouts` stored ones as `layout` says, and draw `drawn`."""

    ranks: int
    rollouts: int
    drawn: int
    layout: Layout

    def __str__(self) -> str:
        return f"ranks {self.ranks}, rollouts {self.rollouts}, drawn {self.drawn}, shards {self.layout}"


@dataclass(frozen=True)
class Law:
    """What all settings of a run share. informative: share of the groups that has variance, in a step and stored.
    replay_ratio: winners for each fresh rollout that is trained on.
    """

    seeds: int
    alpha: float
    informative: float
    lengths: LengthLaw
    replay_ratio: float
    bins: int
    link: Link


@dataclass(frozen=True)
class Draw:
    """One draw of a setting: who holds what, who wins, and what each form of the exchange did about it."""

    stored: Stored
    owner: Tensor
    winners: Tensor  # positions in `stored`
    exchanges: dict[str, Exchange]


def draws(setting: Setting, law: Law) -> Iterator[Draw]:
    """One for each seed. Raises RuntimeError for a form that finds other winners than one machine with all rollouts."""
    stored = Stored.sample(setting.rollouts, law.alpha, law.informative, law.lengths, np.random.default_rng(0))
    for seed in range(law.seeds):
        keys = stored.keys(seed, step=0)
        owner = owners(stored, keys, setting.drawn, setting.ranks, setting.layout)
        held = shards(keys, stored.uid, stored.length, owner, setting.ranks)
        winners = largest(keys, stored.uid, setting.drawn)
        exchanges = {}
        for name, form in forms(law.bins).items():
            exchanges[name] = form(held, setting.drawn)
            if not torch.equal(exchanges[name].uids, stored.uid[winners]):
                raise RuntimeError(f"{name} finds other winners than one machine: {setting}, seed {seed}")
        yield Draw(stored, owner, winners, exchanges)


def measure(setting: Setting, law: Law) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(a row for each form, a row for each rule of balance). Medians over the seeds; select_ms is the least."""
    found: dict[str, list[Exchange]] = {}
    loads: dict[str, list[dict[str, float]]] = {}
    random = np.random.default_rng(1)
    for draw in draws(setting, law):
        for name, exchange in draw.exchanges.items():
            found.setdefault(name, []).append(exchange)
        fresh = fresh_load(setting, law, random)
        for name, load in balance(draw, fresh, setting.ranks).items():
            loads.setdefault(name, []).append(load)
    label = {"ranks": setting.ranks, "rollouts": setting.rollouts, "drawn": setting.drawn, "shards": setting.layout}
    return (
        [label | {"form": name} | _exchange_row(setting, name, x, law) for name, x in found.items()],
        [label | {"rule": name} | {k: median(x[k] for x in rows) for k in rows[0]} for name, rows in loads.items()],
    )


def _exchange_row(setting: Setting, name: str, exchanges: list[Exchange], law: Law) -> dict[str, Any]:
    row: dict[str, Any] = {
        "rounds": {str(k): v for k, v in sorted(Counter(x.rounds for x in exchanges).items())},
        "candidates": median(x.candidates for x in exchanges),
        "candidates_max": max(x.candidates for x in exchanges),
        # other work on the machine can only add to it
        "select_ms": 1e3 * min(x.select_seconds for x in exchanges),
    }
    for algorithm in ALGORITHMS:
        costs = [total(x.collectives, setting.ranks, algorithm, law.link) for x in exchanges]
        row |= {
            f"{algorithm}_steps": median(c.steps for c in costs),
            f"{algorithm}_ms": 1e3 * median(c.seconds for c in costs),
            f"{algorithm}_sent_bytes": median(int(c.sent.max()) for c in costs),
            f"{algorithm}_received_bytes": median(int(c.received.max()) for c in costs),
        }
    if name == "capped":
        k = first_round(setting.drawn, setting.ranks)
        row |= {"k": k, "fallback_probability": fallback_probability(setting.drawn, setting.ranks, k)}
    return row


def fresh_load(setting: Setting, law: Law, random: np.random.Generator) -> Tensor:
    """Fresh tokens [R] of a step: groups are dealt to the ranks in turn, those without variance fall away."""
    groups = math.ceil(setting.drawn / law.replay_ratio / GROUP_SIZE)
    tokens = law.lengths.sample(groups * GROUP_SIZE, random).view(groups, GROUP_SIZE).sum(1)
    rank = informative_groups(groups, law.informative, random) % setting.ranks
    return torch.zeros(setting.ranks, dtype=torch.int64).index_add_(0, rank, tokens)


def balance(draw: Draw, fresh: Tensor, ranks: int) -> dict[str, dict[str, float]]:
    """By rule: largest over mean load, what no placement of winners can be below, and what moves."""
    lengths, owner = draw.stored.length[draw.winners], draw.owner[draw.winners]
    mean = (int(fresh.sum()) + int(lengths.sum())) / ranks
    placed = {"none": owner, "owner first": assign(lengths, owner, fresh)}
    rows = {}
    for rule, to in placed.items():
        moved = (to != owner).nonzero().squeeze(1)
        size = lengths[moved] * TOKEN_BYTES + ROW_BYTES
        sent, received = (torch.zeros(ranks, dtype=torch.int64).index_add_(0, x[moved], size) for x in (owner, to))
        rows[rule] = {
            "max_over_mean": int(fresh.index_add(0, to, lengths).max()) / mean,
            "bound": max(int(fresh.max()) / mean, 1.0),
            "moved_rollouts": len(moved),
            "winners": len(to),
            "moved_bytes": int(size.sum()),
            "sent_bytes": int(sent.max()),
            "received_bytes": int(received.max()),
        }
    return rows
