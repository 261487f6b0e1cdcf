"""Rollouts that move between data-parallel ranks, as bytes in one all-to-all.

Dims: R ranks, m rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.rollout import ROLLOUT_DTYPES, TOKEN_DTYPES, RolloutBatch, cumulative

# widest first, so that every field of a block is aligned; ids travel as they are stored
ROWS = dict(sorted(ROLLOUT_DTYPES.items(), key=lambda x: -x[1].itemsize))
TOKENS = dict(sorted((TOKEN_DTYPES | {"tokens": torch.int32}).items(), key=lambda x: -x[1].itemsize))
ROW_BYTES = sum(t.itemsize for t in ROWS.values())
TOKEN_BYTES = sum(t.itemsize for t in TOKENS.values())


def exchange(sent: RolloutBatch, destination: Tensor, expected: list[Tensor], group: DataParallelGroup) -> RolloutBatch:
    """What the other ranks send here, in rank order.

    sent: this rank's rollouts that move, destination [m] their ranks; expected: the lengths of the rows that each rank
    sends here, since all ranks know the whole draw. Every rank takes part.
    """
    blocks = [to_bytes(sent.select((destination == rank).to(sent.device))) for rank in range(group.size)]
    received = group.all_to_all(blocks, [block_bytes(lengths) for lengths in expected])
    return RolloutBatch.cat([from_bytes(x, n) for x, n in zip(received, expected, strict=True)]).to(sent.device)


def block_bytes(lengths: Tensor) -> int:
    """Bytes of rows with these lengths."""
    return lengths.numel() * ROW_BYTES + int(lengths.sum()) * TOKEN_BYTES


def to_bytes(batch: RolloutBatch) -> Tensor:
    """[block_bytes] uint8; the lengths are not in it."""
    fields = [getattr(batch, name).to(dtype) for name, dtype in (ROWS | TOKENS).items()]
    return torch.cat([x.contiguous().view(torch.uint8) for x in fields])


def from_bytes(block: Tensor, lengths: Tensor) -> RolloutBatch:
    """The rollouts of `to_bytes`, whose lengths [m] the receiver knows."""
    block = block.clone()  # a storage of its own is aligned
    cu = cumulative(lengths)
    counts = dict.fromkeys(ROWS, lengths.numel()) | dict.fromkeys(TOKENS, int(cu[-1]))
    fields, at = {}, 0
    for name, dtype in (ROWS | TOKENS).items():
        size = counts[name] * dtype.itemsize
        fields[name] = block[at : at + size].view(dtype)
        at += size
    fields["tokens"] = fields["tokens"].long()
    return RolloutBatch(cu_seqlens=cu.to(block.device), **fields)
