"""What a rollout must be to be stored.

Dims: N rollouts of a batch, T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.rollout import RolloutBatch
from megatron_replay.rollout_ring import RolloutRing


def check_new_rollouts(batch: RolloutBatch, ring: RolloutRing, largest_uid: int) -> None:
    """Raise ValueError for the first rollout of the batch that cannot be appended to the ring.

    largest_uid: of all that were ever stored. Runs where the batch is, which is the host for what an engine returns.
    """
    birth, uid = batch.birth_step, batch.uid
    newest = ring.last_birth if len(ring) else int(birth[0])
    earlier = birth < torch.cat([birth.new_tensor([newest]), birth[:-1]])
    no_id = (batch.tokens < 0) | (batch.tokens > torch.iinfo(torch.int32).max)
    for bad, words in (
        (_any_token(batch, ~torch.isfinite(batch.behavior_logprobs)), "behavior_logprobs must be finite"),
        (_any_token(batch, no_id), "tokens must be ids in [0, 2^31)"),
        (~torch.isfinite(batch.advantage), "advantage must be finite"),
        (batch.lengths > ring.tokens, f"arena_tokens {ring.tokens} must hold every rollout"),
        (_repeated(uid, ring, largest_uid), "uid must be stored once"),
        (earlier, f"birth_step must not fall below that of the rollout before, {newest} for the newest stored"),
    ):
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            raise ValueError(
                f"{words}, got uid {int(uid[i])} with {int(batch.lengths[i])} tokens, "
                f"advantage {float(batch.advantage[i])}, birth_step {int(birth[i])}"
            )


def _any_token(batch: RolloutBatch, bad: Tensor) -> Tensor:
    """[T] -> [N]: whether any token of the rollout is bad."""
    if not bool(bad.any()):
        return bad.new_zeros(len(batch))
    rollout = torch.repeat_interleave(torch.arange(len(batch), device=bad.device), batch.lengths)
    return bad.new_zeros(len(batch)).index_put((rollout[bad],), bad.new_ones(()))


def _repeated(uid: Tensor, ring: RolloutRing, largest_uid: int) -> Tensor:
    """[N]: whether a uid stands in the batch twice, or in the ring. Uids that rise need no look at the ring."""
    _, inverse, times = torch.unique(uid, return_inverse=True, return_counts=True)
    repeated = times[inverse] > 1
    if int(uid.min()) > largest_uid:
        return repeated
    return repeated | torch.isin(uid, ring.live(ring.rows["uid"]).to(uid.device))
