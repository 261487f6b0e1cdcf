"""Rollouts of frameworks that hold padded matrices: into a RolloutBatch, and out of one.

Dims: N rollouts, L positions of the longest, T tokens (packed).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_replay.rollout import RolloutBatch, cumulative


class PaddedRollouts(NamedTuple):
    """A row for each rollout, its tokens at the left: nothing stands between or before them."""

    tokens: Tensor  # [N, L] int64
    attention_mask: Tensor  # [N, L] bool, False on padding
    loss_mask: Tensor  # [N, L] bool
    behavior_logprobs: Tensor  # [N, L] float32, 0 where the loss mask is False


def pack_padded(
    tokens: Tensor,
    attention_mask: Tensor,
    loss_mask: Tensor,
    behavior_logprobs: Tensor,
    *,
    reward: Tensor,
    group_ids: Tensor,
    birth_step: Tensor,
    uid: Tensor,
    prompt_id: Tensor,
) -> RolloutBatch:
    """The rollouts of padded matrices [N, L], wherever their padding is: left, right, or between prompt and response.

    tokens integers; attention_mask nonzero on real tokens; loss_mask nonzero on those that are trained. What stands on
    padding never matters, nor a log-prob that is not trained. reward, group_ids, birth_step, uid, prompt_id [N].
    Advantages are 0 until `with_group_advantages` sets them. Raises ValueError, beginning with the field, for shapes
    that differ, a loss mask on padding or on a first token (nothing predicts it), and a trained token without a finite
    log-prob.
    """
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be [N, L], got {list(tokens.shape)}")
    real, trained = attention_mask.bool(), loss_mask.bool()
    matrices = {"attention_mask": real, "loss_mask": trained, "behavior_logprobs": behavior_logprobs}
    for name, x in matrices.items():
        if x.shape != tokens.shape:
            raise ValueError(f"{name} must be {list(tokens.shape)} like tokens, got {list(x.shape)}")
    first = real & (real.cumsum(1) == 1)
    for bad, words in ((trained & ~real, "on padding"), (trained & first, "on the first token of a rollout")):
        if bool(bad.any()):
            raise ValueError(f"loss_mask must be False {words}, got True in row {int(bad.nonzero()[0, 0])}")
    logprobs = torch.where(trained, behavior_logprobs.float(), 0)
    if not bool(torch.isfinite(logprobs).all()):
        row, column = (int(x) for x in (~torch.isfinite(logprobs)).nonzero()[0])
        raise ValueError(f"behavior_logprobs must be finite, got {float(logprobs[row, column])} in row {row}")
    zeros = torch.zeros(len(tokens), device=tokens.device)
    return RolloutBatch(
        tokens=tokens[real].long(),
        loss_mask=trained[real],
        behavior_logprobs=logprobs[real],
        cu_seqlens=cumulative(real.sum(1)),
        reward=reward.float(),
        advantage=zeros,
        group_std=zeros.clone(),
        importance_weight=torch.ones_like(zeros),
        group_ids=group_ids.long(),
        birth_step=birth_step.long(),
        uid=uid.long(),
        prompt_id=prompt_id.long(),
    )


def pad_packed(batch: RolloutBatch, padding_token: int, *, rows: int | None = None) -> PaddedRollouts:
    """The rollouts as rows, padded at the right; then, up to `rows`, rows of two padding tokens that train nothing.

    Two, so that a causal model has something to predict in them.

    Raises ValueError for fewer `rows` than rollouts.
    """
    n = len(batch)
    rows = n if rows is None else rows
    if rows < n:
        raise ValueError(f"rows must be at least the {n} rollouts, got {rows}")
    lengths = torch.full((rows,), 2, device=batch.device)
    lengths[:n] = batch.lengths
    longest = int(lengths.max()) if rows else 0
    real = torch.arange(longest, device=batch.device) < lengths[:, None]  # [rows, L]

    def padded(x: Tensor, fill: int) -> Tensor:  # [T] -> [rows, L]
        out = x.new_full(real.shape, fill)
        out[:n][real[:n]] = x
        return out

    return PaddedRollouts(
        padded(batch.tokens, padding_token), real, padded(batch.loss_mask, 0), padded(batch.behavior_logprobs, 0)
    )
