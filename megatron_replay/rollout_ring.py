"""RolloutRing: where rollouts lie, oldest first, in tensors that are allocated once.

A ring of slots holds one value of each per-rollout field, and a ring of tokens holds the rows, of any length, one
behind the other. Both are in birth order, so that dropping the oldest moves `head`.

Dims: C slots, A tokens of the token ring, N rollouts, m rows, T tokens of the m rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.ops.priority_draw import DrawWindow
from megatron_replay.ops.ragged_gather import ragged_gather, ragged_scatter, take_rows
from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_DTYPES, TOKEN_FIELDS, RolloutBatch, cumulative

# ids of any vocabulary fit int32; the buffer checks it
STORED_DTYPES = TOKEN_DTYPES | {"tokens": torch.int32}
# read on the host at every step, for sizes; on a GPU they are kept there too
LEDGER = {"uid": torch.int64, "birth_step": torch.int64, "start": torch.int64, "length": torch.int64}


class RolloutRing:
    """C slots and A tokens on one device. It knows no priorities and no ages; `append` never overwrites."""

    def __init__(self, slots: int, tokens: int, device: torch.device | str, backend: str | None) -> None:
        self.slots, self.tokens, self.backend = slots, tokens, backend
        self.device = torch.device(device)
        self.head = 0  # slot of the oldest rollout
        self.size = 0
        self.tail = 0  # token of the ring where the next rollout begins
        self.arena = {n: torch.zeros(tokens, dtype=t, device=device) for n, t in STORED_DTYPES.items()}
        self.rows = {n: torch.zeros(slots, dtype=t, device=device) for n, t in ROLLOUT_DTYPES.items()}
        self.rows["log_weight"] = torch.zeros(slots, dtype=torch.float64, device=device)
        on_host = self.device.type == "cpu"
        self.ledger = {
            name: self.rows[name] if on_host and name in self.rows else torch.zeros(slots, dtype=dtype)
            for name, dtype in LEDGER.items()
        }

    def __len__(self) -> int:
        return self.size

    def window(self) -> DrawWindow:
        """The live rollouts as the draw sees them."""
        return DrawWindow(self.rows["log_weight"], self.rows["uid"], self.head, self.size)

    def live(self, name: str, limit: int | None = None) -> Tensor:
        """One field of the live rollouts [N], oldest first, or of the `limit` oldest; the ledger's on the host."""
        values = self.ledger[name] if name in self.ledger else self.rows[name]
        last = self.head + (self.size if limit is None else limit)
        if last <= self.slots:
            return values[self.head : last]
        return torch.cat([values[self.head :], values[: last - self.slots]])

    def newest(self, name: str) -> int:
        """A field of the ledger of the newest rollout; there must be one."""
        return int(self.ledger[name][(self.head + self.size - 1) % self.slots])

    def oldest(self, name: str) -> int:
        return int(self.ledger[name][self.head])

    def append(self, batch: RolloutBatch, log_weight: Tensor) -> None:
        """Copy the batch's rollouts behind the newest. Their slots and tokens must be free."""
        count, lengths = len(batch), batch.lengths.cpu()
        cu = batch.cu_seqlens.cpu()
        start = (self.tail + cu[:-1].long()) % self.tokens
        first = (self.head + self.size) % self.slots
        on_device = batch.to(self.device)
        ragged_scatter(
            list(self.arena.values()),
            start.to(self.device),
            on_device.cu_seqlens,
            [getattr(on_device, name) for name in TOKEN_FIELDS],
            backend=self.backend,
        )
        for name, rows in self.rows.items():
            source = log_weight if name == "log_weight" else getattr(on_device, name)
            _write(rows, first, source)
        known = {"start": start, "length": lengths, "uid": batch.uid, "birth_step": batch.birth_step}
        for name, ledger in self.ledger.items():
            if ledger is not self.rows.get(name):
                _write(ledger, first, known[name])
        self.size += count
        self.tail = (self.tail + int(cu[-1])) % self.tokens

    def drop_oldest(self, count: int) -> None:
        self.head = (self.head + count) % self.slots
        self.size -= count

    def clear(self) -> None:
        self.head = self.size = self.tail = 0

    def gather(self, slots: Tensor, after: RolloutBatch | None = None) -> RolloutBatch:
        """The rollouts of slots [m] int64 (repeats allowed), packed behind those of `after`, in one allocation."""
        on_host = slots.cpu()
        lengths = self.ledger["length"][on_host]
        own = cu = cumulative(lengths)
        n = t = 0
        if after is not None:
            n, t = len(after), after.tokens.numel()
            cu = cumulative(torch.cat([after.lengths.cpu(), lengths]))
        total, count = int(cu[-1]), n + slots.numel()
        packed = {name: torch.empty(total, dtype=dtype, device=self.device) for name, dtype in TOKEN_DTYPES.items()}
        rows = {name: torch.empty(count, dtype=dtype, device=self.device) for name, dtype in ROLLOUT_DTYPES.items()}
        if after is not None:
            for name, x in packed.items():
                x[:t] = getattr(after, name)
            for name, x in rows.items():
                x[:n] = getattr(after, name)
        ragged_gather(
            list(self.arena.values()),
            self.ledger["start"][on_host].to(self.device),
            own.to(self.device),
            [x[t:] for x in packed.values()],
            backend=self.backend,
        )
        columns, out = [self.rows[name] for name in rows], [x[n:] for x in rows.values()]
        take_rows(columns, slots.to(self.device), out, backend=self.backend)
        return RolloutBatch(cu_seqlens=cu.to(self.device), **packed, **rows)


def _write(ring: Tensor, first: int, values: Tensor) -> None:
    """ring[(first + i) mod C] = values[i]."""
    straight = min(values.numel(), ring.numel() - first)
    ring[first : first + straight] = values[:straight]
    ring[: values.numel() - straight] = values[straight:]
