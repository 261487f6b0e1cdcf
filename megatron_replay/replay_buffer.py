"""RolloutReplayBuffer: single rollouts, drawn by priority, bounded in age.

Each data-parallel rank holds a shard; a draw is over all shards and finds the same rollouts on any layout.

Dims: N rollouts of a batch, m drawn rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_replay.config import ReplayConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.draw_size import DrawSize
from megatron_replay.global_draw import Candidates, Winners, global_draw
from megatron_replay.load_balance import assign
from megatron_replay.ops.priority_draw import log_weights, priority_draw
from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_FIELDS, RolloutBatch
from megatron_replay.rollout_check import check_new_rollouts
from megatron_replay.rollout_exchange import exchange
from megatron_replay.rollout_ring import RolloutRing

SAVED_FIELDS = (*TOKEN_FIELDS, *ROLLOUT_DTYPES, "cu_seqlens")
COUNTERS = ("evicted_by_age", "evicted_by_capacity")
DRAW_SCALE = "draw_scale"


@dataclass(frozen=True)
class Draw:
    """What one rank trains after a draw."""

    batch: RolloutBatch  # the fresh rollouts it was drawn beside, then this rank's part of the draw
    uids: Tensor  # [m] int64, the draw of all ranks, in order
    requested: int  # rollouts asked for
    moved: int = 0  # rollouts that another rank stores than the one that trains them, over all ranks


class RolloutReplayBuffer:
    """Stores single rollouts with what they were at birth; draws them again by P(i) ~ weight_i.

    All state is in tensors on `device`, allocated once: `arena_tokens` tokens and ceil(capacity / shards) slots.
    Drawing removes nothing.
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
        self.ring = RolloutRing(-(-config.capacity // self.group.size), arena_tokens, device, backend)
        self.draw_size = DrawSize(config.ess_floor)
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._evicted_length_sum = self._evicted_rows = 0  # of the last evict
        self._largest_uid = -(2**63)  # of all that were ever pushed

    def __len__(self) -> int:
        return len(self.ring)

    def total(self) -> int:
        """Rollouts stored over all shards."""
        return self.group.total(len(self.ring))

    def push(self, batch: RolloutBatch) -> None:
        """Store copies of the batch's rollouts, newest last; the oldest go where room is short (FIFO, counted).

        Raises ValueError, with nothing stored, for a rollout without finite behavior log-probs or advantage, with a
        token that is no id, longer than the arena, stored already, or born before the newest stored one.
        """
        if len(batch) == 0:
            return
        ring = self.ring
        check_new_rollouts(batch, ring, self._largest_uid)
        self._largest_uid = max(self._largest_uid, int(batch.uid.max()))
        # what cannot fit even in an empty shard: all but the newest rows
        newest_first = batch.lengths.flip(0).cumsum(0)
        fitting = min(ring.slots, int((newest_first <= ring.tokens).sum()))
        overflow = len(batch) - fitting
        if overflow:
            batch = batch.select(torch.arange(overflow, len(batch), device=batch.device))
        # all that is stored is older than a row of the batch that had to go
        drop = len(ring) if overflow else self._oldest_in_the_way(batch)
        self.counters["evicted_by_capacity"] += overflow + drop
        ring.drop_oldest(drop)
        c = self.config
        advantage, group_std = batch.advantage.to(ring.device), batch.group_std.to(ring.device)
        priority = (c.priority, c.priority_alpha, c.priority_eps)
        ring.append(batch, log_weights(advantage, group_std, *priority, backend=self.backend))

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
        size = self.draw_size.of(n)
        if size == 0:
            return Draw(
                self.ring.gather(torch.empty(0, dtype=torch.int64), fresh), torch.empty(0, dtype=torch.int64), n
            )
        problem = self._problem(step)
        if self.group.size > 1:
            return self._draw_over_shards(n, size, step, fresh, problem)
        if problem is not None:
            raise RuntimeError(problem)
        slots, _ = self._own_draw(size, step)
        batch = _weighed(self.ring.gather(slots, fresh), self._importance_factors(slots))
        return Draw(batch, batch.uid[len(batch) - slots.numel() :].cpu(), n)

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
        batch = self.ring.gather(self.ring.window().slots())
        state = {name: getattr(batch, name) for name in SAVED_FIELDS}
        state |= {name: torch.tensor(value) for name, value in self.counters.items()}
        state[DRAW_SCALE] = torch.tensor(self.draw_size.scale, dtype=torch.float64)
        return {name: x.cpu().contiguous() for name, x in state.items()}

    def load_state_dict(self, shards: Iterable[dict[str, Tensor]]) -> None:
        """Replace the content by the union of saved shards, of any number of ranks, looked at one after another.

        This rank keeps the groups with group_ids mod shards == rank, in (birth_step, uid) order; rank 0 keeps the
        counters' sums. Raises ValueError, with nothing changed, for no shards, a missing tensor, tokens that are cut
        off, or a uid that is there twice.
        """
        kept, uids, counters, scales = [], [], dict.fromkeys(COUNTERS, 0), []
        for i, shard in enumerate(shards):
            if missing := [x for x in (*SAVED_FIELDS, *COUNTERS, DRAW_SCALE) if x not in shard]:
                raise ValueError(f"shard {i} of the replay buffer lacks {', '.join(missing)}")
            if (want := int(shard["cu_seqlens"][-1])) != (got := shard["tokens"].numel()):
                raise ValueError(f"shard {i} of the replay buffer must hold {want} tokens, got {got}")
            batch = RolloutBatch(**{name: shard[name] for name in SAVED_FIELDS})
            kept.append(batch.select(batch.group_ids % self.group.size == self.group.rank))
            uids.append(batch.uid)
            scales.append(float(shard[DRAW_SCALE]))
            counters = {name: counters[name] + int(shard[name]) for name in COUNTERS}
        if not kept:
            raise ValueError("shards must hold every saved shard, got none")
        found, times = torch.unique(torch.cat(uids), return_counts=True)
        if bool((times > 1).any()):
            raise ValueError(f"uid {int(found[times > 1][0])} stands in the replay buffer's shards more than once")
        mine = RolloutBatch.cat(kept)
        by_uid = mine.uid.argsort(stable=True)
        self.ring.clear()
        self._largest_uid = -(2**63)
        self.counters = counters if self.group.rank == 0 else dict.fromkeys(COUNTERS, 0)
        self.draw_size.scale = min(scales)
        self.push(mine.select(by_uid[mine.birth_step[by_uid].argsort(stable=True)]))

    def _oldest_in_the_way(self, batch: RolloutBatch) -> int:
        """How many of the oldest must go for the batch to fit, in slots and in tokens."""
        ring = self.ring
        over = ring.tokens_stored + batch.tokens.numel() - ring.tokens
        by_tokens = 0
        if over > 0:
            by_tokens = int((ring.live(ring.rows["length"]).cumsum(0) < over).sum()) + 1
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
        uids, lengths = (self.ring.rows[name][slots] for name in ("uid", "length"))
        own = Candidates(keys, uids, lengths, 0 if fresh is None else fresh.tokens.numel(), problem)
        won = global_draw(own, n, self.group, with_replacement=self.config.with_replacement)
        destination = assign(won.lengths, won.owner, won.loads)
        slots = slots[won.place[won.owner == self.group.rank]]
        factors = self._importance_factors(slots)
        moved = int((destination != won.owner).sum())
        if moved == 0:
            batch = _weighed(self.ring.gather(slots, fresh), factors)
        else:
            batch = self._moved(won, destination, _weighed(self.ring.gather(slots), factors), fresh)
        return Draw(batch, won.uids, requested, moved)

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

    def _moved(self, won: Winners, destination: Tensor, own: RolloutBatch, fresh: RolloutBatch | None) -> RolloutBatch:
        """`fresh` and this rank's part of the draw, where some winners are trained by another rank than their owner."""
        rank = self.group.rank
        here, stays = won.owner == rank, destination == rank
        goes = destination[here] != rank
        arriving = [
            ((won.owner == r) & stays if r != rank else torch.zeros_like(stays)).nonzero().squeeze(1)
            for r in range(self.group.size)
        ]  # positions in the draw, by sender
        received = exchange(
            own.select(goes.to(own.device)),
            destination[here][goes],
            [won.lengths[positions] for positions in arriving],
            self.group,
        )
        positions = torch.cat([(here & stays).nonzero().squeeze(1), *arriving])
        drawn = RolloutBatch.cat([own.select((~goes).to(own.device)), received])
        drawn = drawn.select(positions.argsort().to(drawn.device))
        return drawn if fresh is None else RolloutBatch.cat([fresh.to(drawn.device), drawn])


def _weighed(batch: RolloutBatch, factors: Tensor | None) -> RolloutBatch:
    """The batch with the importance weights of its last rollouts multiplied by `factors`."""
    if factors is None:
        return batch
    weight = batch.importance_weight.clone()
    weight[len(batch) - factors.numel() :] *= factors.to(weight.device)
    return batch.replace(importance_weight=weight)
