"""RolloutReplayBuffer: a ring of rollouts over a ring of tokens, drawn by priority, bounded in age.

Each data-parallel rank holds a shard; a draw is over all shards and finds the same rollouts on any layout.

Dims: C slots of this shard, A tokens of its arena, N rollouts of a batch, m drawn rollouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_replay.config import ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.ops.priority_draw import draw_keys, draw_with_replacement, largest, replay_weights
from megatron_replay.ops.ragged_gather import ragged_gather, ragged_scatter
from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_FIELDS, RolloutBatch, cumulative

SAVED_FIELDS = (*TOKEN_FIELDS, *ROLLOUT_DTYPES, "cu_seqlens")
COUNTERS = ("evicted_by_age", "evicted_by_capacity")
# ids of any vocabulary fit int32; `push` checks it
STORED_DTYPES = dict(zip(TOKEN_FIELDS, (torch.int32, torch.bool, torch.float32), strict=True))


@dataclass(frozen=True)
class Draw:
    """This shard's drawn rollouts, and the uids [m] of all shards' in the order of the draw."""

    batch: RolloutBatch
    uids: Tensor
    requested: int


class RolloutReplayBuffer:
    """Stores single rollouts with what they were at birth; draws them again by P(i) ~ weight_i.

    Rollouts lie in birth order, so eviction moves `head`. All state is in tensors allocated once: `arena_tokens`
    tokens and ceil(capacity / shards) slots. Drawing removes nothing.
    """

    def __init__(
        self,
        config: ReplayConfig,
        *,
        seed: int,
        arena_tokens: int,
        group: DataParallelGroup | None = None,
        device: torch.device | str = "cpu",
        backend: str | None = None,
    ) -> None:
        if arena_tokens < 1:
            raise ValueError(f"arena_tokens must be at least 1, got {arena_tokens}")
        self.config = config
        self.seed = seed
        self.group = group or DataParallelGroup()
        self.backend = backend
        self.slots = -(-config.capacity // self.group.size)
        self.arena_tokens = arena_tokens
        self.head = 0  # slot of the oldest rollout
        self.size = 0
        self.tail = 0  # token of the arena where the next rollout begins
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._evicted_length_sum = self._evicted_rows = 0  # of the last evict
        self._arena = {n: torch.zeros(arena_tokens, dtype=t, device=device) for n, t in STORED_DTYPES.items()}
        self._rows = {n: torch.zeros(self.slots, dtype=t, device=device) for n, t in ROLLOUT_DTYPES.items()}
        self._start = torch.zeros(self.slots, dtype=torch.int64, device=device)  # first token in the arena
        self._length = torch.zeros(self.slots, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        return self.size

    def total(self) -> int:
        """Rollouts stored over all shards."""
        return self.group.total(self.size)

    def push(self, batch: RolloutBatch) -> None:
        """Store copies of the batch's rollouts, newest last; the oldest go where room is short (FIFO, counted).

        Raises ValueError, with nothing stored, for a rollout without finite behavior log-probs or advantage, with a
        token that is no id, longer than the arena, stored already, or born before the newest stored one.
        """
        if len(batch) == 0:
            return
        batch = batch.to(self._start.device)
        self._check(batch)
        lengths = batch.lengths
        # what cannot fit even in an empty shard: all but the newest rows
        newest_first = lengths.flip(0).cumsum(0)
        fitting = min(self.slots, int((newest_first <= self.arena_tokens).sum()))
        overflow = len(batch) - fitting
        if overflow:
            batch = batch.select(torch.arange(len(batch) - fitting, len(batch), device=batch.device))
            lengths = batch.lengths
        need = int(lengths.sum())
        live = self._length[self._live()]
        freed = torch.cat([live.new_zeros(1), live.cumsum(0)])  # tokens free again once k of the oldest are gone
        tokens_used = int(freed[-1])
        by_tokens = int((tokens_used - freed + need > self.arena_tokens).sum())
        # all that is stored is older than a row of the batch that had to go
        drop = self.size if overflow else max(by_tokens, self.size + len(batch) - self.slots, 0)
        self.counters["evicted_by_capacity"] += overflow + drop
        self._drop_oldest(drop)

        at = (self.head + self.size + torch.arange(len(batch), device=self._start.device)) % self.slots
        cu = cumulative(lengths)
        start = (self.tail + cu[:-1].long()) % self.arena_tokens
        for name, arena in self._arena.items():
            ragged_scatter(arena, start, lengths, cu, getattr(batch, name))
        for name, rows in self._rows.items():
            rows[at] = getattr(batch, name)
        self._start[at], self._length[at] = start, lengths
        self.size += len(batch)
        self.tail = (self.tail + need) % self.arena_tokens

    def evict(self, step: int) -> int:
        """Drop every rollout with step - birth_step > tau_max; returns how many of this shard. Run it before `draw`."""
        live = self._live()
        age = step - self._rows["birth_step"][live]
        count = int((age > self.config.tau_max).sum())  # birth order: exactly the oldest
        self._evicted_length_sum = int(self._length[live[:count]].sum())
        self._evicted_rows = count
        self.counters["evicted_by_age"] += count
        self._drop_oldest(count)
        return count

    def draw(self, n: int, step: int) -> Draw:
        """n rollouts of all shards, P(i) ~ weight_i, the same on every rank and layout; all of them if fewer live.

        Every rank takes part with the same n and step, and receives the drawn rollouts that its shard holds, in the
        order of the draw. With config.with_replacement a rollout may be drawn more than once.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if n == 0:
            return Draw(self._gather(self._live()[:0]), torch.empty(0, dtype=torch.int64), 0)
        live = self._live()
        self._check_ages(step - self._rows["birth_step"][live], step)
        uid, weight = self._rows["uid"][live], self._weights(live)
        seeded = {"seed": self.seed, "step": step, "backend": self.backend}
        if self.config.with_replacement:
            winners, uids = self._agree_with_replacement(*draw_with_replacement(weight, uid, n, **seeded), uid, n)
        else:
            keys = draw_keys(weight, uid, **seeded)
            winners, uids = self._agree(keys, uid, n)
        return Draw(self._gather(live[winners]), uids.cpu(), n)

    def metrics(self, step: int) -> dict[str, float]:
        """State over all shards; eviction counts are since the start of the run, evicted lengths of the last step."""
        live = self._live()
        local = [
            float(self.size),
            float(self._length[live].sum()),
            float(self._weights(live).sum()),
            float((step - self._rows["birth_step"][live]).sum()),
            float(self._evicted_rows),
            float(self._evicted_length_sum),
            *(float(self.counters[name]) for name in COUNTERS),
        ]
        size, tokens, weight, age, rows, length, by_age, by_capacity = self.group.sum(
            torch.tensor(local, dtype=torch.float64)
        ).tolist()
        return {
            "replay/size": int(size),
            "replay/tokens_stored": int(tokens),
            "replay/priority_mean": weight / max(1.0, size),
            "replay/stored_age_mean": age / max(1.0, size),
            "replay/stored_length_mean": tokens / max(1.0, size),
            "replay/evicted_length_mean": length / max(1.0, rows),
            "replay/evicted_by_age": int(by_age),
            "replay/evicted_by_capacity": int(by_capacity),
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The live rollouts of this shard, oldest first, and its counters; flat names, contiguous CPU tensors."""
        batch = self._gather(self._live())
        state = {name: getattr(batch, name) for name in SAVED_FIELDS}
        state |= {name: torch.tensor(value) for name, value in self.counters.items()}
        return {name: x.cpu().contiguous() for name, x in state.items()}

    def load_state_dict(self, shards: Sequence[dict[str, Tensor]]) -> None:
        """Replace the content by the union of saved shards, of any number of ranks.

        This rank keeps the groups with group_ids mod shards == rank, in (birth_step, uid) order; rank 0 keeps the
        counters' sums. Raises ValueError, with nothing changed, for no shards, a missing tensor, tokens that are cut
        off, or a uid that is there twice.
        """
        if not shards:
            raise ValueError("shards must hold every saved shard, got none")
        for i, shard in enumerate(shards):
            if missing := [x for x in (*SAVED_FIELDS, *COUNTERS) if x not in shard]:
                raise ValueError(f"shard {i} of {len(shards)} of the replay buffer lacks {', '.join(missing)}")
            if (want := int(shard["cu_seqlens"][-1])) != (got := shard["tokens"].numel()):
                raise ValueError(f"shard {i} of {len(shards)} of the replay buffer must hold {want} tokens, got {got}")
        union = RolloutBatch.cat([RolloutBatch(**{name: shard[name] for name in SAVED_FIELDS}) for shard in shards])
        uids, times = torch.unique(union.uid, return_counts=True)
        if bool((times > 1).any()):
            raise ValueError(f"uid {int(uids[times > 1][0])} stands in the replay buffer's shards more than once")
        by_uid = union.uid.argsort(stable=True)
        order = by_uid[union.birth_step[by_uid].argsort(stable=True)]
        mine = order[union.group_ids[order] % self.group.size == self.group.rank]
        self.head = self.size = self.tail = 0
        self.counters = {
            name: sum(int(shard[name]) for shard in shards) if self.group.rank == 0 else 0 for name in COUNTERS
        }
        self.push(union.select(mine))

    def _live(self) -> Tensor:
        """Slots of the stored rollouts, oldest first."""
        return (self.head + torch.arange(self.size, device=self._start.device)) % self.slots

    def _weights(self, live: Tensor) -> Tensor:
        c = self.config
        advantage, group_std = self._rows["advantage"][live], self._rows["group_std"][live]
        return replay_weights(advantage, group_std, c.priority, c.priority_alpha, c.priority_eps)

    def _agree(self, keys: Tensor, uid: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """(positions of this shard's winners, all winners' uids), both in the order of the draw."""
        best = largest(keys, uid, n)
        all_keys, all_uids, owner = self._candidates(keys[best], uid[best])
        won = largest(all_keys, all_uids, n)
        mine = won[owner[won] == self.group.rank]
        first = int((owner < self.group.rank).sum())
        return best[mine - first], all_uids[won]

    def _agree_with_replacement(self, best: Tensor, keys: Tensor, uid: Tensor, n: int) -> tuple[Tensor, Tensor]:
        """As `_agree`, for shards that each bring n winners (or none); draw j goes to the largest of the j-th."""
        all_keys, all_uids, owner = self._candidates(keys, uid[best])
        if all_keys.numel() == 0:
            return best, all_uids
        table = all_keys.view(-1, n)  # [shards with rollouts, n]
        top = table == table.amax(0)
        holders = all_uids.view(-1, n).masked_fill(~top, torch.iinfo(torch.int64).max)
        shard = holders.argmin(0)
        mine = owner.view(-1, n)[shard, torch.arange(n, device=shard.device)] == self.group.rank
        return (best[mine] if best.numel() else best), all_uids.view(-1, n).gather(0, shard[None]).squeeze(0)

    def _candidates(self, keys: Tensor, uids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every shard's (key, uid, rank), in rank order: one small all-gather."""
        both = torch.stack([keys.view(torch.int64), uids], 1)  # the bits of the keys, so that one tensor carries both
        gathered = self.group.gather(both)
        owner = torch.cat([torch.full((len(x),), r, device=uids.device) for r, x in enumerate(gathered)])
        rows = torch.cat(gathered)
        return rows[:, 0].contiguous().view(torch.float64), rows[:, 1].contiguous(), owner

    def _gather(self, slots: Tensor) -> RolloutBatch:
        start, lengths = self._start[slots], self._length[slots]
        cu = cumulative(lengths)
        packed = {name: ragged_gather(arena, start, lengths, cu) for name, arena in self._arena.items()}
        packed["tokens"] = packed["tokens"].long()
        return RolloutBatch(cu_seqlens=cu, **packed, **{name: rows[slots] for name, rows in self._rows.items()})

    def _drop_oldest(self, count: int) -> None:
        self.head = (self.head + count) % self.slots
        self.size -= count

    def _check_ages(self, age: Tensor, step: int) -> None:
        if age.numel() and int(age.max()) > self.config.tau_max:
            raise RuntimeError(f"evict({step}) must run before draw: a rollout of age {int(age.max())} is stored")
        if age.numel() and int(age.min()) < 0:
            raise ValueError(f"step must be at least every birth_step, got {step} for one born {-int(age.min())} later")

    def _check(self, batch: RolloutBatch) -> None:
        rollout = torch.repeat_interleave(torch.arange(len(batch), device=batch.device), batch.lengths)
        no_id = (batch.tokens < 0) | (batch.tokens > torch.iinfo(torch.int32).max)

        def any_token(bad: Tensor) -> Tensor:  # [T] -> [N]
            return torch.zeros(len(batch), dtype=torch.int64, device=bad.device).index_add_(0, rollout, bad.long()) > 0

        too_long = batch.lengths > self.arena_tokens
        live = self._live()
        again = torch.isin(batch.uid, self._rows["uid"][live])
        _, inverse, times = torch.unique(batch.uid, return_inverse=True, return_counts=True)
        birth = batch.birth_step
        newest = int(self._rows["birth_step"][live[-1]]) if self.size else int(birth[0])
        earlier = birth < torch.cat([birth.new_tensor([newest]), birth[:-1]])
        for bad, words in (
            (any_token(~torch.isfinite(batch.behavior_logprobs)), "behavior_logprobs must be finite"),
            (any_token(no_id), "tokens must be ids in [0, 2^31)"),
            (~torch.isfinite(batch.advantage), "advantage must be finite"),
            (too_long, f"arena_tokens {self.arena_tokens} must hold every rollout"),
            (again | (times[inverse] > 1), "uid must be stored once"),
            (earlier, f"birth_step must not fall below that of the rollout before, {newest} for the newest stored"),
        ):
            if bool(bad.any()):
                i = int(bad.nonzero()[0])
                raise ValueError(
                    f"{words}, got uid {int(batch.uid[i])} with {int(batch.lengths[i])} tokens, "
                    f"advantage {float(batch.advantage[i])}, birth_step {int(birth[i])}"
                )
