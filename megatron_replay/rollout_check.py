"""What a rollout must be to be stored.

Dims: N rollouts of a batch, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.rollout import RolloutBatch
from megatron_replay.rollout_ring import RolloutRing

# what a NaN of would reach the loss, or keep the rollout from ever being drawn
FINITE = ("reward", "advantage", "group_std", "importance_weight")


def check_rollouts(batch: RolloutBatch, arena_tokens: int) -> None:
    """Raise ValueError for the first rollout that no buffer with such an arena can hold.

    Runs where the batch is, which is the host for what an engine returns.
    """
    batch.check_bounds()
    no_id = (batch.tokens < 0) | (batch.tokens > torch.iinfo(torch.int32).max)
    _refuse(batch, _any_token(batch, ~torch.isfinite(batch.behavior_logprobs)), "behavior_logprobs must be finite")
    _refuse(batch, _any_token(batch, no_id), "tokens must be ids in [0, 2^31)")
    for name in FINITE:
        _refuse(batch, ~torch.isfinite(getattr(batch, name)), f"{name} must be finite")
    _refuse(batch, batch.lengths > arena_tokens, f"arena_tokens {arena_tokens} must hold every rollout")
    _, inverse, times = torch.unique(batch.uid, return_inverse=True, return_counts=True)
    _refuse(batch, times[inverse] > 1, "uid must be stored once")


def check_new_rollouts(batch: RolloutBatch, ring: RolloutRing, largest_uid: int) -> None:
    """Raise ValueError for the first rollout of the batch, in (birth_step, uid) order, that the ring cannot append.

    largest_uid: of all that were ever stored; above it no look at the ring is needed.
    """
    check_rollouts(batch, ring.tokens)
    if len(ring) == 0:
        return
    if int(batch.uid.min()) <= largest_uid:
        again = torch.isin(batch.uid, ring.live(ring.fields["uid"]).to(batch.device))
        _refuse(batch, again, "uid must be stored once")
    birth, uid = ring.last_birth, ring.newest_uid()
    earlier = (batch.birth_step < birth) | ((batch.birth_step == birth) & (batch.uid < uid))
    _refuse(batch, earlier, f"birth_step and uid must not come before the newest stored, {birth} and {uid}")


def _refuse(batch: RolloutBatch, bad: Tensor, words: str) -> None:
    """bad [N]."""
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise ValueError(
            f"{words}, got uid {int(batch.uid[i])} with {int(batch.lengths[i])} tokens, "
            f"{', '.join(f'{name} {float(getattr(batch, name)[i])}' for name in FINITE)}, "
            f"birth_step {int(batch.birth_step[i])}"
        )


def _any_token(batch: RolloutBatch, bad: Tensor) -> Tensor:
    """[T] -> [N]: whether any token of the rollout is bad."""
    if not bool(bad.any()):
        return bad.new_zeros(len(batch))
    rollout = torch.repeat_interleave(torch.arange(len(batch), device=bad.device), batch.lengths)
    return bad.new_zeros(len(batch)).index_put((rollout[bad],), bad.new_ones(()))
