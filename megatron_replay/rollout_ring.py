"""RolloutRing: where rollouts lie, oldest first, in tensors that are allocated once.

A ring of slots holds one record of each rollout, and the arena, a ring of tokens, holds the rows, of any length, one
behind the other. Both are in birth order, so that dropping the oldest moves `head`. The arena and what a draw reads are
on the training device; records are on the host, which needs them at every step for sizes.

Dims: C slots, A tokens of the arena, N rollouts, m rows, T tokens of the m rows.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from megatron_replay.ops.priority_draw import DrawWindow
from megatron_replay.ops.ragged_gather import ragged_gather, ragged_scatter, take_records
from megatron_replay.rollout import (
    ROLLOUT_DTYPES,
    STORED_TOKEN_DTYPES,
    TOKEN_DTYPES,
    TOKEN_FIELDS,
    RolloutBatch,
    cumulative,
)

# one record: 8 words, a line of the cache; first the float32 fields, two in a word, at the end those of the row in the
# arena
RECORD_DTYPES = ROLLOUT_DTYPES | {"start": torch.int64, "length": torch.int64}
WORDS = sum(dtype.itemsize for dtype in RECORD_DTYPES.values()) // 8
FLOATS = sum(dtype == torch.float32 for dtype in RECORD_DTYPES.values())


class RolloutRing:
    """C slots and A tokens. It knows no priorities and no ages; `append` never overwrites."""

    def __init__(self, slots: int, tokens: int, device: torch.device | str, backend: str | None) -> None:
        self.slots, self.tokens, self.backend = slots, tokens, backend
        self.arena = {n: torch.zeros(tokens, dtype=t, device=device) for n, t in STORED_TOKEN_DTYPES.items()}
        # what every draw reads of all rollouts, without gaps
        self.log_weight = torch.zeros(slots, dtype=torch.float64, device=device)
        self.uid = torch.zeros(slots, dtype=torch.int64, device=device)
        self.device = self.uid.device
        self.records = torch.zeros(slots, WORDS, dtype=torch.int64)
        self.fields = _fields(self.records)
        self.clear()

    def __len__(self) -> int:
        return self.size

    def clear(self) -> None:
        self.head = self.size = 0  # slot of the oldest rollout; rollouts
        self.tail = self.tokens_stored = 0  # token of the arena where the next row begins; tokens of all rows
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
        return int(self.fields["birth_step"][(self.head + i) % self.slots])

    def newest_uid(self) -> int:
        return int(self.fields["uid"][(self.head + self.size - 1) % self.slots])

    def born_before(self, step: int) -> int:
        """How many rollouts were: they are the oldest."""
        return bisect.bisect_left(range(self.size), step, key=self.birth_step)

    def append(self, batch: RolloutBatch, log_weight: Tensor) -> None:
        """Copy the batch's rollouts behind the newest. Their slots and tokens must be free."""
        first = (self.head + self.size) % self.slots
        start = (self.tail + batch.cu_seqlens[:-1].long()) % self.tokens
        here = batch.to(self.device)
        ragged_scatter(
            list(self.arena.values()),
            start.to(self.device),
            here.cu_seqlens.contiguous(),
            [getattr(here, name).contiguous() for name in TOKEN_FIELDS],
            backend=self.backend,
        )
        _write(self.records, first, _record(batch, {"start": start, "length": batch.lengths}))
        _write(self.log_weight, first, log_weight)
        _write(self.uid, first, batch.uid)
        total = batch.tokens.numel()
        self.size += len(batch)
        self.tail = (self.tail + total) % self.tokens
        self.tokens_stored += total
        self.birth_sum += int(batch.birth_step.sum())
        self.first_birth, self.last_birth = self.birth_step(0), int(batch.birth_step[-1])

    def drop_oldest(self, count: int) -> int:
        """Forget the `count` oldest rollouts; returns how many tokens they had."""
        tokens = int(self.live(self.fields["length"], count).sum())
        self.birth_sum -= int(self.live(self.fields["birth_step"], count).sum())
        self.tokens_stored -= tokens
        self.head = (self.head + count) % self.slots
        self.size -= count
        self.first_birth = self.birth_step(0)
        return tokens

    def gather(self, slots: Tensor, after: RolloutBatch | None = None) -> RolloutBatch:
        """The rollouts of slots [m] int64 (repeats allowed), packed behind those of `after`, in one allocation.

        slots is on the host, the batch on the device. Its per-rollout fields are columns of copied records.
        """
        host = None if self.backend == "cuda" else self.backend  # the host's part is not CUDA's
        record, start, own = take_records(self.records, slots, start=WORDS - 2, length=WORDS - 1, backend=host)
        t, cu = 0, own
        if after is not None:
            t, cu = after.tokens.numel(), cumulative(torch.cat([after.lengths.cpu(), own.diff()]))
            record = torch.cat([_record(after, {}).cpu(), record])
        total = int(cu[-1])
        packed = {name: torch.empty(total, dtype=dtype, device=self.device) for name, dtype in TOKEN_DTYPES.items()}
        if after is not None:
            for name, x in packed.items():
                x[:t] = getattr(after, name)
        ragged_gather(
            list(self.arena.values()),
            start.to(self.device),
            own.to(self.device),
            [x[t:] for x in packed.values()],
            backend=self.backend,
        )
        fields = _fields(record.to(self.device))
        return RolloutBatch(cu_seqlens=cu.to(self.device), **packed, **{name: fields[name] for name in ROLLOUT_DTYPES})


def _fields(records: Tensor) -> dict[str, Tensor]:
    """Every field [N] of records [N, WORDS], as views."""
    floats = records.view(torch.float32).unbind(1)[:FLOATS]
    return dict(zip(RECORD_DTYPES, floats + records.unbind(1)[FLOATS // 2 :], strict=True))


def _record(batch: RolloutBatch, more: dict[str, Tensor]) -> Tensor:
    """[N, WORDS] int64: the batch's fields, and `more`; what neither has is 0."""
    record = torch.zeros(len(batch), WORDS, dtype=torch.int64, device=batch.device)
    for name, column in _fields(record).items():
        if name in ROLLOUT_DTYPES or name in more:
            column.copy_(more[name] if name in more else getattr(batch, name))
    return record


def _write(ring: Tensor, first: int, values: Tensor) -> None:
    """ring[(first + i) mod C] = values[i]."""
    straight = min(values.shape[0], ring.shape[0] - first)
    ring[first : first + straight] = values[:straight]
    ring[: values.shape[0] - straight] = values[straight:]
