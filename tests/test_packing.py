from __future__ import annotations

import pytest
import torch

from megatron_replay.rollout import RolloutBatch
from megatron_replay.trainer.packing import pack, padded_length, plan_bins
from tests.rollouts import batch


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
