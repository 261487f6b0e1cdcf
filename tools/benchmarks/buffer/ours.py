"""This project's buffer, with each backend of its two ops; the ops alone as `draw` and `gather`.

Dims: N rollouts of L tokens, n of them asked for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_replay.config import ReplayConfig
from megatron_replay.ops.priority_draw import DrawWindow, log_weights, priority_draw
from megatron_replay.ops.ragged_gather import ragged_gather
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import TOKEN_FIELDS

from .implementation import Call, Implementation, Operation, Queued, Sampled, Subject
from .stock import ALPHA, EPS, Rows, Stock

SEED = 1234
CROSS_CHECKS = 3


class Ours(Subject):
    """The buffer moves on with the turns; the ops alone work on a full one as it was before them."""

    def __init__(self, stock: Stock, backend: str) -> None:
        size = stock.size
        config = ReplayConfig(capacity=size.rollouts, tau_max=stock.tau_max, priority_alpha=ALPHA, priority_eps=EPS)
        self._stock, self._backend = stock, backend
        self._buffer = RolloutReplayBuffer(
            config,
            seed=SEED,
            arena_tokens=size.rollouts * size.tokens_per_rollout,
            device=stock.device,
            backend=backend,
        )
        for uids in stock.fill():
            self._buffer.push(stock.batch(uids))
        self._step = stock.first_step(-1)
        uids = stock.all_uids()
        advantage = stock.advantage(uids)
        weights = log_weights(advantage, torch.ones_like(advantage), config.priority, ALPHA, EPS, backend=backend)
        self._window = DrawWindow(weights, uids, head=0, size=size.rollouts)
        parts = zip(*(stock.rows(uids) for uids in stock.fill()), strict=True)
        self._rings = [torch.cat([x.flatten() for x in part]) for part in parts]
        self._cu = torch.arange(size.drawn + 1, dtype=torch.int32, device=stock.device) * size.tokens_per_rollout
        dtypes = (torch.int64, torch.bool, torch.float32)
        self._packed = [torch.empty(size.drawn * size.tokens_per_rollout, dtype=t, device=stock.device) for t in dtypes]

    def evict(self, turn: int) -> Call:
        step = self._step = self._stock.first_step(turn)
        return lambda: self._buffer.evict(step)

    def push(self, turn: int) -> Call:
        batch = self._stock.batch(self._stock.fresh(turn))
        return lambda: self._buffer.push(batch)

    def draw(self, turn: int) -> Call:
        step = self._next_step()
        return lambda: self._draw(step, self._stock.size.drawn)

    def gather(self, turn: int) -> Call:
        start = self._starts(self._draw(self._next_step(), self._stock.size.drawn))
        return lambda: ragged_gather(self._rings, start, self._cu, self._packed, backend=self._backend)

    def sample(self, turn: int) -> Call:
        step = self._next_step()
        return lambda: self._buffer.draw(self._stock.size.drawn, step)

    def sampled(self, n: int) -> Sampled:
        return self._sampled(n, self._next_step())

    def drawn(self, n: int) -> Tensor:
        return self._window.uid[self._draw(self._next_step(), n)]

    def queued(self, operation: Operation) -> Queued | None:
        # the reference waits for the device
        if self._backend != "cuda":
            return None
        if operation == "gather":
            packed = sum(x.numel() * x.element_size() for x in self._packed)
            read = sum(x.numel() * r.element_size() for x, r in zip(self._packed, self._rings, strict=True))
            return Queued(self.gather(0), read + packed)
        return Queued(self._launch()) if operation == "draw" else None

    def cross_check(self) -> None:
        """The ops alone draw and return what the buffer does."""
        n = self._stock.size.drawn
        for _ in range(CROSS_CHECKS):
            step = self._next_step()
            uids, rows = self._sampled(n, step)
            slots = self._draw(step, n)
            if not torch.equal(self._window.uid[slots], uids):
                raise ValueError("priority_draw alone draws other rollouts than the buffer")
            ragged_gather(self._rings, self._starts(slots), self._cu, self._packed, backend=self._backend)
            if not all(torch.equal(x, y.flatten().to(x.dtype)) for x, y in zip(self._packed, rows, strict=True)):
                raise ValueError("ragged_gather alone returns other rows than the buffer")

    def _next_step(self) -> int:
        self._step += 1
        return self._step

    def _draw(self, step: int, n: int) -> Tensor:
        slots, _ = priority_draw(self._window, n, seed=SEED, step=step, backend=self._backend)
        return slots

    def _starts(self, slots: Tensor) -> Tensor:
        return slots * self._stock.size.tokens_per_rollout

    def _sampled(self, n: int, step: int) -> Sampled:
        drawn = self._buffer.draw(n, step)
        batch = drawn.batch
        shape = (len(batch), self._stock.size.tokens_per_rollout)
        if not torch.equal(batch.uid.cpu(), drawn.uids.cpu()):
            raise ValueError("the rows of a draw are not those of its uids")
        fields = (getattr(batch, name).view(shape) for name in TOKEN_FIELDS)
        return Sampled(batch.uid, Rows(*fields))

    def _launch(self) -> Call:
        """The draw's kernels alone: `priority_draw` waits for the device to know how many rollouts could be drawn."""
        from megatron_replay.ops.extension import extension
        from megatron_replay.ops.priority_draw_compiled import launch_priority_draw

        n, device, step = self._stock.size.drawn, self._stock.device, self._next_step()
        outputs = (
            torch.empty(n, dtype=torch.int64, device=device),
            torch.empty(n, dtype=torch.float64, device=device),
            torch.empty(1, dtype=torch.int64, device=device),
        )
        workspace = torch.empty(
            extension().draw_workspace_bytes(self._window.size, n), dtype=torch.uint8, device=device
        )
        return lambda: launch_priority_draw(self._window, n, outputs, workspace, SEED, step)


def _ours(backend: str) -> Callable[[Stock], Subject]:
    return lambda stock: Ours(stock, backend)


OURS = tuple(
    Implementation(
        f"megatron_replay {backend}",
        "without replacement",
        "packed ragged rows: tokens, mask and log-probs [T], cu_seqlens, and 8 fields of each rollout",
        devices,
        _ours(backend),
        ("evict", "push", "draw", "gather", "sample"),
        backend=backend,
    )
    for backend, devices in (("cpp", ("cpu",)), ("cuda", ("cuda",)), ("reference", ("cpu", "cuda")))
)
