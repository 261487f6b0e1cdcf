"""Rollouts to packed microbatches: token budget, equal counts over data-parallel ranks, inert padding.

Dims: T tokens of a pack (padding included), n rollouts of a pack, R rows: positions whose hidden state
predicts a trained token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_replay.rollout import RolloutBatch, cumulative

PADDING_TOKEN = 0


@dataclass(frozen=True)
class PackedMicrobatch:
    """One forward pass. Padding is one more sequence at the end: it attends to itself and trains nothing."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64, restarting at every rollout
    cu_seqlens: Tensor  # [n+1] or, with padding, [n+2] int32
    max_seqlen: int
    rollouts: Tensor  # [n] int64, positions in the source batch
    rows: Tensor  # [R] int64, positions in the pack
    targets: Tensor  # [R] int64, the token each row predicts
    cu_rows: Tensor  # [n+1] int32, rollout boundaries over rows
    token_index: Tensor  # [R] int64, where each target stands in the source batch


def plan_bins(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """First-fit decreasing: positions grouped so that each group holds at most `token_budget` tokens.

    Deterministic (longest first, ties by position). Raises ValueError for a rollout over the budget.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > token_budget:
            raise ValueError(
                f"--micro-batch-size times --seq-length must hold every rollout, "
                f"got {token_budget} tokens for a rollout of {lengths[i]}"
            )
        slot = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if slot is None:
            bins.append([])
            room.append(token_budget)
            slot = len(bins) - 1
        bins[slot].append(i)
        room[slot] -= lengths[i]
    return [sorted(b) for b in bins]


def pack(
    batch: RolloutBatch,
    bins: Sequence[Sequence[int]],
    *,
    count: int,
    multiple: int = 1,
    length: int | None = None,
) -> list[PackedMicrobatch]:
    """`count` microbatches: one for each bin, then inert ones that hold padding alone.

    Every pack is padded to `length`, or, without one, to the next multiple of `multiple` (the tensor-parallel
    size under sequence parallelism). The packs lie where the batch does.
    """
    if count < len(bins):
        raise ValueError(f"count must be at least the number of bins {len(bins)}, got {count}")
    groups = [*bins, *([[]] * (count - len(bins)))]
    return [_pack_one(batch, torch.tensor(g, dtype=torch.int64, device=batch.device), multiple, length) for g in groups]


def padded_length(tokens: int, multiple: int) -> int:
    """The smallest positive multiple that holds `tokens`."""
    return max(1, -(-tokens // multiple)) * multiple


def _pack_one(batch: RolloutBatch, rollouts: Tensor, multiple: int, length: int | None) -> PackedMicrobatch:
    part = batch.select(rollouts)
    tokens = part.tokens.numel()
    total = padded_length(tokens, multiple) if length is None else length
    padding = total - tokens
    if padding < 0 or total % multiple:
        raise ValueError(f"length must hold {tokens} tokens and be a multiple of {multiple}, got {total}")
    cu = part.cu_seqlens
    if padding:
        cu = torch.cat([cu, cu.new_tensor([total])])
    lengths = cu.diff().long()
    position_ids = torch.arange(total, device=batch.device) - torch.repeat_interleave(
        cu[:-1].long(), lengths, output_size=total
    )

    trained = part.loss_mask.nonzero().squeeze(1)  # [R] positions of the targets in the pack
    if bool((position_ids[trained] == 0).any()):
        raise ValueError("loss_mask must be False on the first token of a rollout: nothing predicts it")
    source = torch.arange(tokens, device=batch.device) + torch.repeat_interleave(
        batch.cu_seqlens[rollouts].long() - part.cu_seqlens[:-1].long(), part.lengths, output_size=tokens
    )
    return PackedMicrobatch(
        input_ids=torch.cat([part.tokens, part.tokens.new_full((padding,), PADDING_TOKEN)])[None],
        position_ids=position_ids[None],
        cu_seqlens=cu,
        max_seqlen=int(lengths.max()),
        rollouts=rollouts,
        rows=trained - 1,
        targets=part.tokens[trained],
        cu_rows=cumulative(part.response_lengths),
        token_index=source[trained],
    )
