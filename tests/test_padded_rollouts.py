"""Padded matrices and packed rollouts hold the same tokens, masks and log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_replay import RolloutBatch, pack_padded, pad_packed

TOKENS = torch.tensor([[0, 5, 6, 7, 8, 0], [4, 5, 9, 3, 0, 0]])
REAL = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
# the second row has a token between two trained ones that is not trained
TRAINED = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 1, 0, 1, 0, 0]])
LOGPROBS = torch.tensor([[float("nan")] * 3 + [-1.0, -2.0, float("nan")], [9.0, -3.0, float("inf"), -4.0, 0.0, 0.0]])


def rows(n: int) -> dict[str, Tensor]:
    return {
        "reward": torch.arange(n, dtype=torch.float32),
        "group_ids": torch.full((n,), 7),
        "birth_step": torch.full((n,), 3),
        "uid": torch.arange(n) + 40,
        "prompt_id": torch.full((n,), 2),
    }


def packed(**changes: Any) -> RolloutBatch:
    given = {"tokens": TOKENS, "attention_mask": REAL, "loss_mask": TRAINED, "behavior_logprobs": LOGPROBS} | rows(2)
    return pack_padded(**(given | changes))


def test_packing_keeps_real_tokens_in_order_and_zeroes_what_is_not_trained() -> None:
    batch = packed()
    assert batch.tokens.tolist() == [5, 6, 7, 8, 4, 5, 9, 3]
    assert batch.cu_seqlens.tolist() == [0, 4, 8]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True, False, True]
    assert batch.behavior_logprobs.tolist() == [0, 0, -1, -2, 0, -3, 0, -4]
    assert batch.response_lengths.tolist() == [2, 2]
    for name, x in rows(2).items():
        assert torch.equal(getattr(batch, name), x), name
    assert batch.advantage.tolist() == [0, 0] and batch.importance_weight.tolist() == [1, 1]


def test_padding_puts_tokens_left_and_adds_rows_that_train_nothing() -> None:
    batch = packed().select(torch.tensor([1, 0, 1]))
    padded = pad_packed(batch, 99, rows=5)
    assert padded.tokens.tolist() == [[4, 5, 9, 3], [5, 6, 7, 8], [4, 5, 9, 3], [99] * 4, [99] * 4]
    assert padded.attention_mask.sum(1).tolist() == [4, 4, 4, 2, 2]
    assert not bool(padded.loss_mask[3:].any())
    again = pack_padded(*(x[:3] for x in padded), **rows(3))
    for name in ("tokens", "loss_mask", "behavior_logprobs", "cu_seqlens"):
        assert torch.equal(getattr(again, name), getattr(batch, name)), name


@pytest.mark.parametrize("n", [0, 1])
def test_rows_of_different_length_and_none(n: int) -> None:
    short = pack_padded(TOKENS[:1, :4], REAL[:1, :4], TRAINED[:1, :4], LOGPROBS[:1, :4], **rows(1))
    batch = RolloutBatch.cat([short.select(torch.arange(n)), packed()])
    padded = pad_packed(batch, 0)
    assert padded.attention_mask.sum(1).tolist() == [3] * n + [4, 4]
    empty = pad_packed(RolloutBatch.empty(), 0, rows=2)
    assert empty.tokens.shape == (2, 2) and not bool(empty.loss_mask.any()) and bool(empty.attention_mask.all())
    assert pad_packed(RolloutBatch.empty(), 0).tokens.shape == (0, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": TOKENS[0]}, r"tokens must be \[N, L\], got \[6\]"),
        ({"loss_mask": TRAINED[:, :5]}, r"loss_mask must be \[2, 6\] like tokens, got \[2, 5\]"),
        ({"loss_mask": REAL | TRAINED.new_tensor([[0] * 6, [0] * 5 + [1]])}, "on padding, got True in row 1"),
        ({"loss_mask": REAL}, "loss_mask must be False on the first token of a rollout, got True in row 0"),
        ({"behavior_logprobs": LOGPROBS.roll(1, 1)}, "behavior_logprobs must be finite, got nan in row 0"),
        ({"uid": torch.arange(3)}, r"uid must be torch.int64 \[2\], got torch.int64 \[3\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(changes: dict[str, Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        packed(**changes)


def test_fewer_rows_than_rollouts_are_refused() -> None:
    with pytest.raises(ValueError, match="rows must be at least the 2 rollouts, got 1"):
        pad_packed(packed(), 0, rows=1)
