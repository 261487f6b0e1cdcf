"""Rollouts that move between data-parallel ranks, as bytes in one all-to-all.

Dims: R ranks, m rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.rollout import ROLLOUT_DTYPES, STORED_TOKEN_DTYPES, RolloutBatch, cumulative

# widest first, so that every field of a block is aligned
ROWS = dict(sorted(ROLLOUT_DTYPES.items(), key=lambda x: -x[1].itemsize))
TOKENS = dict(sorted(STORED_TOKEN_DTYPES.items(), key=lambda x: -x[1].itemsize))
ROW_BYTES = sum(t.itemsize for t in ROWS.values())
TOKEN_BYTES = sum(t.itemsize for t in TOKENS.values())


def redistribute(
    own: RolloutBatch, owner: Tensor, destination: Tensor, lengths: Tensor, group: DataParallelGroup
) -> RolloutBatch:
    """The winners of a draw that this rank trains, in the order of the draw.

    own: the winners that this rank stores, in that order; owner, destination, lengths [m]: who stores and who trains
    each winner, and its tokens, on the host, the same on every rank. Every rank takes part.
    """
    rank = group.rank
    goes = destination[owner == rank] != rank
    stays = ((owner == rank) & (destination == rank)).nonzero().squeeze(1)
    arrives = (destination == rank) & (owner != rank)
    arriving = [(arrives & (owner == r)).nonzero().squeeze(1) for r in range(group.size)]  # by sender
    sent = own.select(goes.to(own.device))
    received = exchange(sent, destination[owner == rank][goes], [lengths[at] for at in arriving], group)
    drawn = RolloutBatch.cat([own.select((~goes).to(own.device)), received])
    return drawn.select(torch.cat([stays, *arriving]).argsort().to(drawn.device))


def exchange(sent: RolloutBatch, destination: Tensor, expected: list[Tensor], group: DataParallelGroup) -> RolloutBatch:
    """What the other ranks send here, in rank order.

    sent: this rank's rollouts that move, destination [m] their ranks, on the host; expected: the lengths of the rows
    that each rank sends here, since all ranks know the whole draw. Every rank takes part.
    """
    nothing = torch.empty(0, dtype=torch.uint8, device=sent.device)
    rows = [(destination == rank).nonzero().squeeze(1) for rank in range(group.size)]
    blocks = [to_bytes(sent.select(x.to(sent.device))) if x.numel() else nothing for x in rows]
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
