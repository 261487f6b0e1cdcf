"""Replay buffers of other projects, measured where they are installed (`make benchmark-deps`).

None evicts by age: cpprb and torchrl overwrite the oldest, TRL the one of the least score. All are asked for the
method's distribution, P(i) ~ (|A_i| + eps)^alpha, and for no importance weights.

Dims: N rollouts of L tokens, n of them asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .implementation import Call, Implementation, Sampled, Subject
from .stock import ALPHA, EPS, Rows, Stock


class Cpprb(Subject):
    """cpprb's PrioritizedReplayBuffer: a sum tree in C++, columns in numpy."""

    def __init__(self, stock: Stock) -> None:
        from cpprb import PrioritizedReplayBuffer

        size = stock.size
        fields = Rows._fields
        dtypes = dict(zip(fields, ("int32", "bool", "float32"), strict=True))
        columns = {name: {"shape": size.tokens_per_rollout, "dtype": dtypes[name]} for name in fields}
        self._buffer = PrioritizedReplayBuffer(size.rollouts, columns, alpha=ALPHA, eps=EPS)
        self._stock = stock
        for uids in stock.fill():
            self._buffer.add(**self._columns(uids))

    def _columns(self, uids: Tensor) -> dict[str, Any]:
        columns = self._stock.rows(uids)._asdict() | {"priorities": self._stock.advantage(uids).abs()}
        return {name: x.numpy() for name, x in columns.items()}

    def push(self, turn: int) -> Call:
        columns = self._columns(self._stock.fresh(turn))
        return lambda: self._buffer.add(**columns)

    def sample(self, turn: int) -> Call:
        return lambda: self._buffer.sample(self._stock.size.drawn, beta=0.0)

    def sampled(self, n: int) -> Sampled:
        found = self._buffer.sample(n, beta=0.0)
        rows = Rows(*(torch.from_numpy(found[name]) for name in Rows._fields))
        return Sampled(torch.from_numpy(found["indexes"].astype("int64")), rows)


class Torchrl(Subject):
    """torchrl's PrioritizedSampler over a LazyTensorStorage, both on the stock's device."""

    def __init__(self, stock: Stock) -> None:
        from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer

        size = stock.size
        self._storage = LazyTensorStorage(size.rollouts, device=stock.device)
        self._sampler = PrioritizedSampler(size.rollouts, alpha=ALPHA, beta=0.0, eps=EPS)
        self._buffer = ReplayBuffer(storage=self._storage, sampler=self._sampler, batch_size=size.drawn)
        self._stock = stock
        for uids in stock.fill():
            self._push(*self._columns(uids))

    def _columns(self, uids: Tensor) -> tuple[Any, Tensor]:
        from tensordict import TensorDict

        return TensorDict(self._stock.rows(uids)._asdict(), [uids.numel()]), self._stock.advantage(uids).abs()

    def _push(self, columns: Any, priority: Tensor) -> None:
        self._buffer.update_priority(self._buffer.extend(columns), priority)

    def push(self, turn: int) -> Call:
        columns, priority = self._columns(self._stock.fresh(turn))
        return lambda: self._push(columns, priority)

    def draw(self, turn: int) -> Call:
        return lambda: self._sampler.sample(self._storage, self._stock.size.drawn)

    def gather(self, turn: int) -> Call:
        index, _ = self._sampler.sample(self._storage, self._stock.size.drawn)
        return lambda: self._storage.get(index)

    def sample(self, turn: int) -> Call:
        return lambda: self._buffer.sample()

    def sampled(self, n: int) -> Sampled:
        index, _ = self._sampler.sample(self._storage, n)
        found = self._storage.get(index)
        return Sampled(index, Rows(*(found[name] for name in Rows._fields)))


class _Datum(dict):
    """TRL's heap compares what it stores where two scores are equal, and a dict has no order."""

    def __lt__(self, other: object) -> bool:
        return False


class Trl(Subject):
    """TRL's ReplayBuffer of GRPO with replay: a heap of the largest scores, each with a dict of tensors."""

    def __init__(self, stock: Stock) -> None:
        from trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_trainer import ReplayBuffer

        self._buffer = ReplayBuffer(stock.size.rollouts)
        self._stock = stock
        for uids in stock.fill():
            self._buffer.add(*self._scored(uids))

    def _scored(self, uids: Tensor) -> tuple[list[float], list[_Datum]]:
        columns = self._stock.rows(uids)
        data = [
            _Datum(uid=uid, **dict(zip(Rows._fields, row, strict=True)))
            for uid, *row in zip(uids.tolist(), *(x.unbind() for x in columns), strict=True)
        ]
        return self._stock.weights(uids).tolist(), data

    def push(self, turn: int) -> Call:
        scores, data = self._scored(self._stock.fresh(turn))
        return lambda: self._buffer.add(scores, data)

    def sample(self, turn: int) -> Call:
        return lambda: self._buffer.sample(self._stock.size.drawn)

    def sampled(self, n: int) -> Sampled:
        found = self._buffer.sample(n)
        rows = Rows(*(torch.stack([datum[name] for datum in found]) for name in Rows._fields))
        return Sampled(torch.tensor([datum["uid"] for datum in found]), rows)


FOREIGN = (
    Implementation(
        "cpprb",
        "with replacement, stratified",
        "fixed rows: tokens, mask and log-probs [n, L], and indices",
        ("cpu",),
        Cpprb,
        ("push", "sample"),
        package="cpprb",
        needs="cpprb",
    ),
    Implementation(
        "torchrl",
        "with replacement",
        "fixed rows: tokens, mask and log-probs [n, L]",
        ("cpu", "cuda"),
        Torchrl,
        ("push", "draw", "gather", "sample"),
        package="torchrl",
        needs="torchrl._torchrl",
    ),
    Implementation(
        "TRL",
        "without replacement",
        "a list of n dicts of tensors as they were stored: nothing is copied",
        ("cpu",),
        Trl,
        ("push", "sample"),
        package="trl",
        needs="trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_trainer",
    ),
)
