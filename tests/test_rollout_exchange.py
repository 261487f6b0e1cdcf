from __future__ import annotations

import dataclasses

import torch

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.rollout import RolloutBatch
from megatron_replay.rollout_exchange import ROW_BYTES, TOKEN_BYTES, block_bytes, exchange, from_bytes, to_bytes
from tests.rollouts import batch
from tests.shards import run_ranks


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    return all(torch.equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))


def test_rows_as_bytes_and_back() -> None:
    for lengths in ([(2, 3), (1, 1), (4, 7)], [(1, 2)], []):
        source = batch(lengths, birth_step=2**40) if lengths else RolloutBatch.empty()
        block = to_bytes(source)
        assert block.dtype == torch.uint8 and block.numel() == block_bytes(source.lengths)
        # as it arrives: somewhere inside a larger message
        arrived = torch.cat([block.new_zeros(3), block])[3:]
        assert same(from_bytes(arrived, source.lengths), source)
    assert (ROW_BYTES, TOKEN_BYTES) == (48, 9)


def test_every_row_arrives_where_it_was_sent_in_the_sender_s_order() -> None:
    parts = [batch([(2, 3), (1, 4), (3, 1), (2, 2)], first_counter=10 * r, seed=r) for r in range(3)]
    destination = [torch.tensor([1, 2, 1, 2]), torch.tensor([0, 0, 2, 2]), torch.tensor([0, 1, 0, 0])]

    def body(group: DataParallelGroup) -> RolloutBatch:
        expected = [p.lengths[d == group.rank] for p, d in zip(parts, destination, strict=True)]
        return exchange(parts[group.rank], destination[group.rank], expected, group)

    for rank, received in enumerate(run_ranks(3, body)):
        wanted = RolloutBatch.cat([p.select(d == rank) for p, d in zip(parts, destination, strict=True)])
        assert len(wanted) and same(received, wanted)
