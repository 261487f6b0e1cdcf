"""RolloutRing: where rollouts lie, oldest first, in tensors that are allocated once.

A ring of slots holds one record of each rollout, and a ring of tokens holds the rows, of any length, one behind the
other. Both are in birth order, so that dropping the oldest moves `head`.

Dims: C slots, A tokens of the token ring, N rollouts, m rows, T tokens of the m rows.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from megatron_replay.ops.priority_draw import DrawWindow
from megatron_replay.ops.ragged_gather import ragged_gather, ragged_scatter, row_bounds, take_rows
from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_DTYPES, TOKEN_FIELDS, RolloutBatch, cumulative

# ids of any vocabulary fit int32; the buffer checks it
STORED_DTYPES = TOKEN_DTYPES | {"tokens": torch.int32}
# one record: 64 bytes, a line of the cache; `start` and `length` are those of the row in the token ring
RECORD_DTYPES = ROLLOUT_DTYPES | {"start": torch.int64, "length": torch.int64}
RECORD_BYTES = sum(dtype.itemsize for dtype in RECORD_DTYPES.values())


class RolloutRing:
    """C slots and A tokens on one device. It knows no priorities and no ages; `append` never overwrites."""

    def __init__(self, slots: int, tokens: int, device: torch.device | str, backend: str | None) -> None:
        self.slots, self.tokens, self.backend = slots, tokens, backend
        # the host's part of the work is not CUDA's, even where that was asked for by name
        self.host_backend = None if backend == "cuda" else backend
        self.device = torch.device(device)
        self.arena = {n: torch.zeros(tokens, dtype=t, device=device) for n, t in STORED_DTYPES.items()}
        self.records = torch.zeros(slots, RECORD_BYTES, dtype=torch.uint8, device=device)
        # what is read on the host at every step, for sizes: of a device it has a copy
        self.ledger = self.records if self.device.type == "cpu" else torch.zeros(slots, RECORD_BYTES, dtype=torch.uint8)
        self.rows, self.host_rows = _columns(self.records), _columns(self.ledger)
        # what every draw reads of all rollouts, without gaps
        self.log_weight = torch.zeros(slots, dtype=torch.float64, device=device)
        self.uid = torch.zeros(slots, dtype=torch.int64, device=device)
        self.clear()

    def __len__(self) -> int:
        return self.size

    def clear(self) -> None:
        self.head = self.size = 0  # slot of the oldest rollout; rollouts
        self.tail = self.tokens_stored = 0  # token of the ring where the next row begins; tokens of all rows
        self.birth_sum = self.first_birth = self.last_birth = 0  # birth steps: all, the oldest's, the newest's

    def window(self) -> DrawWindow:
        """The live rollouts as the draw sees them."""
        return DrawWindow(self.log_weight, self.uid, self.head, self.size)

    def live(self, values: Tensor, limit: int | None = None) -> Tensor:
        """values [C] of the live rollouts [N], oldest first, or of the `limit` oldest."""
        last = self.head + (self.size if limit is None else limit)
        if last <= self.slots:
            return values[self.head : last]
        return torch.cat([values[self.head :], values[: last - self.slots]])

    def birth_step(self, i: int) -> int:
        """Of the i-th oldest rollout."""
        return int(self.host_rows["birth_step"][(self.head + i) % self.slots])

    def born_before(self, step: int) -> int:
        """How many rollouts were: they are the oldest."""
        return bisect.bisect_left(range(self.size), step, key=self.birth_step)

    def append(self, batch: RolloutBatch, log_weight: Tensor) -> None:
        """Copy the batch's rollouts behind the newest. Their slots and tokens must be free."""
        count, first = len(batch), (self.head + self.size) % self.slots
        start = (self.tail + batch.cu_seqlens[:-1].long()) % self.tokens
        here = batch.to(self.device)
        ragged_scatter(
            list(self.arena.values()),
            start.to(self.device),
            here.cu_seqlens,
            [getattr(here, name) for name in TOKEN_FIELDS],
            backend=self.backend,
        )
        record = torch.empty(count, RECORD_BYTES, dtype=torch.uint8, device=batch.device)
        known = {"start": start, "length": batch.lengths}
        for name, column in _columns(record).items():
            column.copy_(known[name] if name in known else getattr(batch, name))
        _write(self.records, first, record)
        if self.ledger is not self.records:
            _write(self.ledger, first, record)
        _write(self.log_weight, first, log_weight)
        _write(self.uid, first, batch.uid)
        total = batch.tokens.numel()
        self.first_birth = self.birth_step(0)
        self.last_birth = int(batch.birth_step[-1])
        self.size += count
        self.tail = (self.tail + total) % self.tokens
        self.tokens_stored += total
        self.birth_sum += int(batch.birth_step.sum())

    def drop_oldest(self, count: int) -> int:
        """Forget the `count` oldest rollouts; returns how many tokens they had."""
        tokens = int(self.live(self.host_rows["length"], count).sum())
        self.birth_sum -= int(self.live(self.host_rows["birth_step"], count).sum())
        self.tokens_stored -= tokens
        self.head = (self.head + count) % self.slots
        self.size -= count
        self.first_birth = self.birth_step(0)
        return tokens

    def gather(self, slots: Tensor, after: RolloutBatch | None = None) -> RolloutBatch:
        """The rollouts of slots [m] int64 (repeats allowed), packed behind those of `after`, in one allocation."""
        rows = self.host_rows
        start, own = row_bounds(rows["start"], rows["length"], slots.cpu(), backend=self.host_backend)
        n, t, cu = 0, 0, own
        if after is not None:
            n, t = len(after), after.tokens.numel()
            cu = cumulative(torch.cat([after.lengths.cpu(), own.diff()]))
        total, count = int(cu[-1]), n + slots.numel()
        packed = {name: torch.empty(total, dtype=dtype, device=self.device) for name, dtype in TOKEN_DTYPES.items()}
        fields = {name: torch.empty(count, dtype=dtype, device=self.device) for name, dtype in ROLLOUT_DTYPES.items()}
        if after is not None:
            for name, x in packed.items():
                x[:t] = getattr(after, name)
            for name, x in fields.items():
                x[:n] = getattr(after, name)
        ragged_gather(
            list(self.arena.values()),
            start.to(self.device),
            own.to(self.device),
            [x[t:] for x in packed.values()],
            backend=self.backend,
        )
        columns, out = [self.rows[name] for name in fields], [x[n:] for x in fields.values()]
        take_rows(columns, slots.to(self.device), out, backend=self.backend)
        return RolloutBatch(cu_seqlens=cu.to(self.device), **packed, **fields)


def _columns(records: Tensor) -> dict[str, Tensor]:
    """Every field [C] of records [C, RECORD_BYTES], as views."""
    columns, at = {}, 0
    for name, dtype in RECORD_DTYPES.items():
        columns[name] = records[:, at : at + dtype.itemsize].view(dtype).squeeze(1)
        at += dtype.itemsize
    return columns


def _write(ring: Tensor, first: int, values: Tensor) -> None:
    """ring[(first + i) mod C] = values[i]."""
    straight = min(values.shape[0], ring.shape[0] - first)
    ring[first : first + straight] = values[:straight]
    ring[: values.shape[0] - straight] = values[straight:]
