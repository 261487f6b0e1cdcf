"""RolloutReplayBuffer: single rollouts, drawn by priority, bounded in age.

Each data-parallel rank holds a shard; a draw is over all shards and finds the same rollouts on any layout.

Dims: N rollouts of a batch, m drawn rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_replay.buffer_shard import COUNTERS, from_shard, to_shard
from megatron_replay.config import ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.draw_size import DrawSize
from megatron_replay.global_draw import Candidates, global_draw
from megatron_replay.global_fifo import oldest_of_all
from megatron_replay.load_balance import assign
from megatron_replay.ops.priority_draw import log_weights, priority_draw
from megatron_replay.rollout import RolloutBatch
from megatron_replay.rollout_check import check_new_rollouts, check_rollouts
from megatron_replay.rollout_exchange import redistribute
from megatron_replay.rollout_ring import RolloutRing

MOST_TOKENS = torch.iinfo(torch.int32).max  # of an arena, and of a batch: cu_seqlens is int32
SAVED_AT_ONCE = 1024  # rollouts


@dataclass(frozen=True)
class Draw:
    """What one rank trains after a draw."""

    batch: RolloutBatch  # the fresh rollouts it was drawn beside, then this rank's part of the draw
    uids: Tensor  # [m] int64, the draw of all ranks, in order
    requested: int  # rollouts asked for
    moved: int = 0  # rollouts that another rank stores than the one that trains them, over all ranks
    fresh: int = 0  # rollouts of the batch that come before the draw


class RolloutReplayBuffer:
    """Stores single rollouts with what they were at birth; draws them again by P(i) ~ weight_i.

    All state is in tensors that are allocated once: on `device` `arena_tokens` tokens, fewer than 2^31, and what a draw
    reads; records on the host. The capacity counts the rollouts of all shards; a shard can hold them all. Drawing
    removes nothing.

    What is stored and drawn does not depend on the number of shards, as long as no arena is too small for its shard.
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
        if not 1 <= arena_tokens <= MOST_TOKENS:
            raise ValueError(f"arena_tokens must be in [1, 2^31), got {arena_tokens}")
        self.config = config
        self.seed = seed
        self.group = group or DataParallelGroup()
        self.backend = backend
        self.ring = RolloutRing(config.capacity, arena_tokens, device, backend)
        self.draw_size = DrawSize(config.ess_floor)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._evicted_length_sum = self._evicted_rows = 0  # of the last evict
        self._largest_uid = -(2**63)  # of all that were ever pushed

    def __len__(self) -> int:
        return len(self.ring)

    def push(self, batch: RolloutBatch) -> None:
        """Store copies of this rank's rollouts; the oldest of all shards go where room is short (FIFO, counted).

        Every rank takes part, with rollouts or without. Oldest first is by (birth_step, uid).

        Raises ValueError, with nothing changed here, for a rollout with behavior log-probs, reward, advantage,
        group_std or importance_weight that are not finite, with a token that is no id, longer than the arena, stored
        already, or that comes before the newest stored one; then RuntimeError on the other ranks.
        """
        refused: ValueError | None = None
        try:
            if len(batch):
                self._push_own(batch)
        except ValueError as error:
            refused = error  # the other ranks wait for this one below
        total, refusals = self.group.sum(torch.tensor([len(self.ring), int(refused is not None)])).tolist()
        if refused is not None:
            raise refused
        if refusals:
            raise RuntimeError("another data-parallel rank cannot store its rollouts; its own error says why")
        excess = total - self.config.capacity
        if excess > 0:
            birth, uid = (self.ring.live(self.ring.fields[name]) for name in ("birth_step", "uid"))
            self._drop_for_capacity(oldest_of_all(birth, uid, excess, self.group))

    def _push_own(self, batch: RolloutBatch) -> None:
        ring, c = self.ring, self.config
        check_new_rollouts(batch, ring, self._largest_uid)
        by_uid = batch.uid.argsort(stable=True)
        order = by_uid[batch.birth_step[by_uid].argsort(stable=True)]
        # what cannot fit even in an empty shard: all but the newest rows
        newest_first = batch.lengths[order].flip(0).cumsum(0)
        fitting = min(ring.slots, int((newest_first <= ring.tokens).sum()))
        overflow = len(batch) - fitting
        as_is = overflow == 0 and bool((order.diff() > 0).all())  # the rule: no copy of the tokens then
        kept = batch if as_is else batch.select(order[overflow:])
        advantage, group_std = kept.advantage.to(ring.device), kept.group_std.to(ring.device)
        priority = (c.priority, c.priority_alpha, c.priority_eps)
        log_weight = log_weights(advantage, group_std, *priority, backend=self.backend)
        # all that is stored is older than a row of the batch that had to go
        self._drop_for_capacity(len(ring) if overflow else self._oldest_in_the_way(kept))
        self.counters["evicted_by_capacity"] += overflow
        ring.append(kept, log_weight)
        self._largest_uid = max(self._largest_uid, int(batch.uid.max()))

    def _drop_for_capacity(self, count: int) -> None:
        self.ring.drop_oldest(count)
        self.counters["evicted_by_capacity"] += count

    def evict(self, step: int) -> int:
        """Drop every rollout with step - birth_step > tau_max; returns how many of this shard. Run it before `draw`."""
        count = self.ring.born_before(step - self.config.tau_max)
        self._evicted_length_sum = self.ring.drop_oldest(count)
        self._evicted_rows = count
        self.counters["evicted_by_age"] += count
        return count

    def draw(self, n: int, step: int, fresh: RolloutBatch | None = None) -> Draw:
        """n rollouts of all shards, P(i) ~ weight_i, the same on every rank and layout; all of them if fewer live.

        Every rank takes part with the same n and step. The batch holds `fresh`, and then this rank's part of the draw,
        in its order: what its shard holds, as far as the tokens of all ranks are balanced that way, and what other
        shards send for that. With config.with_replacement a rollout may be drawn more than once. With config.ess_floor
        fewer than n may be drawn (`DrawSize`).
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        if fresh is not None:
            fresh.check_bounds()
        size, none = self.draw_size.of(n), torch.empty(0, dtype=torch.int64)
        beside = 0 if fresh is None else len(fresh)
        if size == 0:
            return Draw(self.ring.gather(none, fresh), none, n, fresh=beside)
        problem = self._problem(step)
        if self.group.size > 1:
            return self._draw_over_shards(n, size, step, fresh, problem)
        if problem is not None:
            raise RuntimeError(problem)
        slots, _ = self._own_draw(size, step)
        batch = _weighed(self.ring.gather(slots, fresh), self._importance_factors(slots))
        return Draw(batch, self.ring.fields["uid"][slots], n, fresh=beside)

    def metrics(self, step: int) -> dict[str, float]:
        """State over all shards; eviction counts are since the start of the run, evicted lengths of the last step."""
        ring = self.ring
        local = [
            float(len(ring)),
            float(ring.tokens_stored),
            float(ring.live(ring.log_weight).exp().sum()),
            float(step * len(ring) - ring.birth_sum),
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
            "replay/draw_scale": self.draw_size.scale,
        }

    def state_dict(self) -> dict[str, Tensor]:
        """The live rollouts of this shard, oldest first, and its counters; flat names, contiguous CPU tensors."""
        # in parts: a device has no room for the whole shard twice
        parts = torch.arange(self.ring.head, self.ring.head + len(self.ring)).split(SAVED_AT_ONCE)
        batch = RolloutBatch.cat([self.ring.gather(part % self.ring.slots).to("cpu") for part in parts])
        return to_shard(batch, self.counters, self.draw_size.scale)

    def load_state_dict(self, shards: Iterable[dict[str, Tensor]]) -> None:
        """Replace the content by the union of saved shards, of any number of ranks, looked at one after another.

        This rank keeps the groups with group_ids mod shards == rank; rank 0 keeps the counters' sums. Every rank takes
        part. Raises ValueError, with nothing changed and on every rank, for no shards, a missing or damaged tensor, a
        rollout that cannot be stored, or a uid that is there twice.
        """
        kept, uids, counters, scales = [], [], dict.fromkeys(COUNTERS, 0), []
        for i, shard in enumerate(shards):
            try:
                batch, counts, scale = from_shard(shard)
                check_rollouts(batch, self.ring.tokens)
            except ValueError as error:
                raise ValueError(f"shard {i} of the replay buffer: {error}") from error
            kept.append(batch.select(batch.group_ids % self.group.size == self.group.rank))
            uids.append(batch.uid)
            scales.append(scale)
            counters = {name: counters[name] + counts[name] for name in COUNTERS}
        if not kept:
            raise ValueError("shards must hold every saved shard, got none")
        found, times = torch.unique(torch.cat(uids), return_counts=True)
        if bool((times > 1).any()):
            raise ValueError(f"uid {int(found[times > 1][0])} stands in the replay buffer's shards more than once")
        self.ring.clear()
        self._largest_uid = -(2**63)
        self.counters = counters if self.group.rank == 0 else dict.fromkeys(COUNTERS, 0)
        self.draw_size.scale = min(scales)
        self.push(RolloutBatch.cat(kept))

    def _oldest_in_the_way(self, batch: RolloutBatch) -> int:
        """How many of the oldest must go for the batch to fit, in slots and in tokens."""
        ring = self.ring
        over = ring.tokens_stored + batch.tokens.numel() - ring.tokens
        by_tokens = 0
        if over > 0:
            by_tokens = int((ring.live(ring.fields["length"]).cumsum(0) < over).sum()) + 1
        return max(by_tokens, len(ring) + len(batch) - ring.slots, 0)

    def _own_draw(self, n: int, step: int) -> tuple[Tensor, Tensor]:
        """(slots, keys) of this shard's draw, in order, on the host."""
        slots, keys = priority_draw(
            self.ring.window(),
            n,
            seed=self.seed,
            step=step,
            with_replacement=self.config.with_replacement,
            backend=self.backend,
        )
        return slots.cpu(), keys.cpu()

    def _draw_over_shards(
        self, requested: int, n: int, step: int, fresh: RolloutBatch | None, problem: str | None
    ) -> Draw:
        none = torch.empty(0, dtype=torch.int64)
        slots, keys = self._own_draw(n, step) if problem is None else (none, none.double())
        uids, lengths = (self.ring.fields[name][slots] for name in ("uid", "length"))
        own = Candidates(keys, uids, lengths, 0 if fresh is None else fresh.tokens.numel(), problem)
        won = global_draw(own, n, self.group, with_replacement=self.config.with_replacement)
        destination = assign(won.lengths, won.owner, won.loads)
        fullest = int(won.loads.index_add(0, destination, won.lengths).max())
        if fullest > MOST_TOKENS:  # said on every rank, before any goes on to the exchange
            raise OverflowError(f"fresh and drawn rollouts of a rank must have fewer than 2^31 tokens, got {fullest}")
        slots = slots[won.place[won.owner == self.group.rank]]
        factors = self._importance_factors(slots)
        moved = int((destination != won.owner).sum())
        if moved == 0:
            batch = _weighed(self.ring.gather(slots, fresh), factors)
        else:
            own_part = _weighed(self.ring.gather(slots), factors)
            drawn = redistribute(own_part, won.owner, destination, won.lengths, self.group)
            batch = drawn if fresh is None else RolloutBatch.cat([fresh.to(drawn.device), drawn])
        return Draw(batch, won.uids, requested, moved, 0 if fresh is None else len(fresh))

    def _problem(self, step: int) -> str | None:
        """Why nothing can be drawn at this step, or None."""
        if len(self.ring) == 0:
            return None
        if (age := step - self.ring.first_birth) > self.config.tau_max:
            return f"evict({step}) must run before draw: a rollout of age {age} is stored"
        if (age := step - self.ring.last_birth) < 0:
            return f"step must be at least every birth_step, got {step} for a rollout born {-age} later"
        return None

    def _importance_factors(self, slots: Tensor) -> Tensor | None:
        """(w_min / w_i)^beta of this shard's winners, w_min the least weight of all winners; None where beta is 0.

        The importance weight of prioritized replay, (N P(i))^-beta, over its largest: N and the sum of the weights
        cancel. Every rank takes part.
        """
        beta = self.config.importance_beta
        if beta == 0:
            return None
        log_weight = self.ring.log_weight[slots.to(self.ring.device)].cpu()
        least = -self.group.max(torch.cat([-log_weight, log_weight.new_tensor([-torch.inf])]).amax(0, keepdim=True))
        return (beta * (least - log_weight)).exp().float()


def _weighed(batch: RolloutBatch, factors: Tensor | None) -> RolloutBatch:
    """The batch with the importance weights of its last rollouts multiplied by `factors`."""
    if factors is None:
        return batch
    weight = batch.importance_weight.clone()
    weight[len(batch) - factors.numel() :] *= factors.to(weight.device)
    return batch.replace(importance_weight=weight)
