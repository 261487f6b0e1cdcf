from __future__ import annotations

import pytest
import torch

from megatron_replay.rollout import RolloutBatch
from megatron_replay.trainer.packing import longest_pack, pack, padded_length, plan_bins
from tests.rollouts import batch, sharing_prompts


def test_bins_hold_every_rollout_once_within_the_budget() -> None:
    lengths = [5, 9, 1, 7, 7, 3, 10, 2, 2, 4, 6]
    bins = plan_bins(lengths, 10)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 10 for b in bins)
    assert len(bins) == 6  # 56 tokens: first-fit decreasing reaches the lower bound here
    assert plan_bins(lengths, 10) == bins


def test_a_rollout_over_the_budget_names_the_flag() -> None:
    with pytest.raises(ValueError, match="--micro-batch-size.*got 8 tokens for a rollout of 9"):
        plan_bins([3, 9], 8)


def test_rows_predict_exactly_the_response_tokens() -> None:
    """First response token and EOS included, no prompt token, whatever stands beside them in the pack."""
    source = batch([(3, 4), (1, 1), (5, 2), (2, 6)])
    (p,) = pack(source, [[2, 0, 3, 1]], count=1)
    assert p.rows.numel() == 4 + 1 + 2 + 6
    ids = p.input_ids[0]
    assert torch.equal(ids[p.rows + 1], p.targets)
    assert torch.equal(source.tokens[p.token_index], p.targets)
    assert bool(source.loss_mask[p.token_index].all())
    assert p.cu_rows.tolist() == [0, 2, 6, 12, 13]
    assert p.position_ids[0, p.cu_seqlens[:-1].long()].tolist() == [0, 0, 0, 0]
    # a row and its target belong to one rollout
    segment = torch.searchsorted(p.cu_seqlens[1:].contiguous(), torch.arange(ids.numel()), right=True)
    assert torch.equal(segment[p.rows], segment[p.rows + 1])


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_padding_is_one_inert_sequence(multiple: int) -> None:
    source = batch([(3, 4), (2, 2)])
    (p,) = pack(source, [[0, 1]], count=1, multiple=multiple)
    assert p.input_ids.shape == (1, padded_length(11, multiple))
    assert p.cu_seqlens[2] == 11 and p.cu_seqlens[-1] == p.input_ids.size(1)
    assert p.rows.max() < 11


def test_a_prime_number_of_rollouts_gives_equal_counts_with_inert_microbatches() -> None:
    source = batch([(2, 3)] * 13)
    bins = plan_bins(source.lengths.tolist(), 10)
    packs = pack(source, bins, count=9, multiple=2, length=12)
    assert len(packs) == 9 and {p.input_ids.size(1) for p in packs} == {12}
    assert [p.rows.numel() for p in packs[len(bins) :]] == [0, 0]
    assert sum(p.rows.numel() for p in packs) == 13 * 3


def test_an_empty_batch_is_one_inert_microbatch() -> None:
    (p,) = pack(RolloutBatch.empty(), [], count=1, multiple=2)
    assert p.input_ids.shape == (1, 2) and p.rows.numel() == 0 and p.cu_rows.tolist() == [0]


def test_a_trained_first_token_is_refused() -> None:
    source = batch([(2, 2)])
    with pytest.raises(ValueError, match="loss_mask must be False on the first token"):
        pack(source.replace(loss_mask=torch.ones(4, dtype=torch.bool)), [[0]], count=1)


@pytest.mark.parametrize("multiple", [1, 4])
def test_equal_prompts_are_in_a_pack_once(multiple: int) -> None:
    source = sharing_prompts(batch([(3, 4), (2, 1), (3, 2), (3, 6), (5, 2)]))
    order = [4, 2, 0, 1, 3]
    assert longest_pack(source, [order], share_prompts=True) == 3 + 4 + 2 + 6 + 2 + 1 + 5 + 2
    (p,) = pack(source, [order], count=1, multiple=multiple, share_prompts=True)
    assert p.input_ids.size(1) == padded_length(25, multiple)
    ids, positions, part = p.input_ids[0], p.position_ids[0], source.select(torch.tensor(order))
    padding = p.input_ids.size(1) - 25
    # each rollout is whole where its members say
    assert torch.equal(ids[p.members], torch.cat([part.tokens, torch.zeros(padding, dtype=torch.int64)]))
    assert torch.equal(positions[p.members], torch.cat([torch.arange(n) for n in p.cu_seqlens.diff().tolist()]))
    assert sorted(set(p.members.tolist())) == list(range(p.input_ids.size(1)))
    # what a rollout trains is what it trains without sharing
    (alone,) = pack(source, [order], count=1)
    for name in ("targets", "cu_rows", "token_index", "rollouts"):
        assert torch.equal(getattr(p, name), getattr(alone, name)), name
    assert torch.equal(ids[p.rows], alone.input_ids[0][alone.rows])
    assert torch.equal(positions[p.rows], alone.position_ids[0][alone.rows])
    # three rollouts begin to answer at the same place
    assert p.rows.numel() == 15 and p.rows.unique().numel() == 13


def test_only_whole_prompts_are_shared() -> None:
    """Prompts of 2, 3, 4 and 3 equal tokens: the last response begins after three, one of its tokens is not trained."""
    source = batch([(2, 2), (3, 2), (4, 2), (4, 2)])
    mask = source.loss_mask.clone()
    mask[-3:] = torch.tensor([True, False, True])
    source = source.replace(tokens=torch.full_like(source.tokens, 7), loss_mask=mask)
    (p,) = pack(source, [[0, 1, 2, 3]], count=1, share_prompts=True)
    members = [m.tolist() for m in p.members.split(source.lengths.tolist())]
    assert members == [[0, 1, 2, 3], [4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [4, 5, 6, 15, 16, 17]]
    assert p.rows.tolist() == [1, 2, 6, 7, 12, 13, 6, 16]
