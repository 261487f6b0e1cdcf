"""Rollouts to packed microbatches: token budget, equal counts over data-parallel ranks, inert padding, shared prompts.

Dims: T tokens of a pack (padding included), n rollouts of a pack, S their tokens (T without shared prompts), R rows:
positions whose hidden state predicts a trained token.
"""

from __future__ import annotations

import itertools
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
    position_ids: Tensor  # [1, T] int64, of each token in its rollout
    cu_seqlens: Tensor  # [n+1] or, with padding, [n+2] int32, rollout boundaries over members
    members: Tensor  # [S] int64, positions in the pack of the rollouts' tokens, one rollout after the other
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
    share_prompts: bool = False,
) -> list[PackedMicrobatch]:
    """`count` microbatches: one for each bin, then inert ones that hold padding alone.

    Every pack is padded to `length`, or, without one, to the next multiple of `multiple` (the tensor-parallel
    size under sequence parallelism). With `share_prompts` rollouts of equal prompts have them in a pack once: what
    stands before the first trained token depends on nothing else. The packs lie where the batch does.
    """
    if count < len(bins):
        raise ValueError(f"count must be at least the number of bins {len(bins)}, got {count}")
    groups = [*bins, *([[]] * (count - len(bins)))]
    return [_pack_one(batch, _positions(g, batch), multiple, length, share_prompts) for g in groups]


def longest_pack(batch: RolloutBatch, bins: Sequence[Sequence[int]], share_prompts: bool) -> int:
    """Tokens of the longest pack, without padding; 1 without bins."""
    parts = (batch.select(_positions(b, batch)) for b in bins)
    return max((int(_place(part, share_prompts).max()) + 1 for part in parts), default=1)


def _positions(group: Sequence[int], batch: RolloutBatch) -> Tensor:
    return torch.tensor(group, dtype=torch.int64, device=batch.device)


def _place(part: RolloutBatch, share_prompts: bool) -> Tensor:
    """[S] where each token stands in its pack: in order, and a prompt where an equal one stands already."""
    here = torch.arange(part.tokens.numel(), device=part.device)
    if not share_prompts:
        return here
    tokens, trained = part.tokens.tolist(), part.loss_mask.tolist()
    bounds = part.cu_seqlens.tolist()
    first_of: dict[tuple[int, ...], int] = {}
    source = list(range(len(tokens)))
    for start, end in itertools.pairwise(bounds):
        prompt_end = trained.index(True, start, end) if any(trained[start:end]) else end
        at = first_of.setdefault(tuple(tokens[start:prompt_end]), start)
        source[start:prompt_end] = range(at, at + prompt_end - start)
    origin = torch.tensor(source, dtype=torch.int64, device=part.device)
    return ((origin == here).cumsum(0) - 1)[origin]


def padded_length(tokens: int, multiple: int) -> int:
    """The smallest positive multiple that holds `tokens`."""
    return max(1, -(-tokens // multiple)) * multiple


def _pack_one(
    batch: RolloutBatch, rollouts: Tensor, multiple: int, length: int | None, share_prompts: bool
) -> PackedMicrobatch:
    part = batch.select(rollouts)
    place = _place(part, share_prompts)
    tokens = int(place.max()) + 1 if place.numel() else 0
    total = padded_length(tokens, multiple) if length is None else length
    padding = total - tokens
    if padding < 0 or total % multiple:
        raise ValueError(f"length must hold {tokens} tokens and be a multiple of {multiple}, got {total}")
    cu = part.cu_seqlens
    if padding:
        cu = torch.cat([cu, cu[-1:] + padding])
    lengths = cu.diff().long()
    members = torch.cat([place, torch.arange(tokens, total, device=batch.device)])
    of_member = torch.arange(members.numel(), device=batch.device) - torch.repeat_interleave(
        cu[:-1].long(), lengths, output_size=members.numel()
    )

    def in_pack(x: Tensor) -> Tensor:  # [S] -> [1, T]; a shared token has the same value in all its rollouts
        return x.new_empty(total).scatter_(0, members, x)[None]

    trained = part.loss_mask.nonzero().squeeze(1)  # [R] members that are targets
    if bool((of_member[trained] == 0).any()):
        raise ValueError("loss_mask must be False on the first token of a rollout: nothing predicts it")
    source = torch.arange(part.tokens.numel(), device=batch.device) + torch.repeat_interleave(
        batch.cu_seqlens[rollouts].long() - part.cu_seqlens[:-1].long(), part.lengths, output_size=part.tokens.numel()
    )
    return PackedMicrobatch(
        input_ids=in_pack(torch.cat([part.tokens, part.tokens.new_full((padding,), PADDING_TOKEN)])),
        position_ids=in_pack(of_member),
        cu_seqlens=cu,
        members=members,
        max_seqlen=int(lengths.max()),
        rollouts=rollouts,
        rows=members[trained - 1],
        targets=part.tokens[trained],
        cu_rows=cumulative(part.response_lengths),
        token_index=source[trained],
    )
