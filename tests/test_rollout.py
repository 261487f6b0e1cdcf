from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_replay.rollout import Completion, Prompt, RolloutBatch, cumulative
from tests.rollouts import batch, completion


def test_mask_is_exactly_the_response_with_first_token_and_eos() -> None:
    made = [
        completion(0, prompt=3, response=4, version=6),
        completion(1, prompt=1, response=1, version=5),
        completion(2, prompt=5, response=2, version=6),
    ]
    b = RolloutBatch.from_completions(made, [1.0, 0.0, 0.5])
    assert b.loss_mask.int().tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0, 0, 1, 1]
    assert b.response_lengths.tolist() == [4, 1, 2] and b.lengths.tolist() == [7, 2, 7]
    assert not b.behavior_logprobs[~b.loss_mask].any()
    for i, c in enumerate(made):
        ids = b.tokens[b.cu_seqlens[i] : b.cu_seqlens[i + 1]].tolist()
        assert ids == [*c.prompt.tokens, *c.tokens], "ids of the engine reach the trainer unchanged"
    assert b.birth_step.tolist() == [6, 5, 6] and b.importance_weight.tolist() == [1, 1, 1]


def test_an_eos_id_inside_the_prompt_or_as_padding_id_changes_nothing() -> None:
    """The mask follows lengths, never token ids."""
    c = Completion(Prompt((1, 1, 0), 0, 0), 0, (0, 1, 1), (-0.1, -0.2, -0.3), "length", 0)
    assert RolloutBatch.from_completions([c], [0.0]).loss_mask.tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logprobs": (-0.1, None, -0.2, -0.3)}, "no finite log-prob at token 1: None"),
        ({"logprobs": (-0.1, -0.2, float("nan"), -0.3)}, "no finite log-prob at token 2: nan"),
        ({"logprobs": (-0.1, -0.2, -0.3)}, "has 3 log-probs for 4 tokens"),
        ({"tokens": (), "logprobs": ()}, "has no tokens"),
    ],
)
def test_a_completion_without_behavior_logprobs_is_refused(change: dict[str, object], words: str) -> None:
    c = dataclasses.replace(completion(3), **change)  # type: ignore[arg-type]
    assert c.problem() is not None
    with pytest.raises(ValueError, match=f"behavior_logprobs: the completion with uid {c.uid} .*{words}"):
        RolloutBatch.from_completions([c], [0.0])


def test_uids_are_unique_over_prompts_samples_and_steps() -> None:
    uids = {Prompt((), counter, 0).uid(s, 8) for counter in range(50) for s in range(8)}
    assert uids == set(range(400))


def test_cat_and_select() -> None:
    a, b = batch([(3, 4), (1, 1)]), batch([(5, 2), (2, 6), (1, 3)], first_counter=10)
    both = RolloutBatch.cat([a, b])
    assert len(both) == 5 and both.uid.tolist() == [0, 1, 10, 11, 12]
    picked = both.select(torch.tensor([3, 0, 3]))
    assert picked.uid.tolist() == [11, 0, 11] and picked.lengths.tolist() == [8, 7, 8]
    assert torch.equal(picked.tokens, torch.cat([b.tokens[7:15], a.tokens[:7], b.tokens[7:15]]))
    assert torch.equal(picked.behavior_logprobs[:8], b.behavior_logprobs[7:15])
    by_mask = both.select(both.uid >= 10)
    assert all(torch.equal(getattr(by_mask, f.name), getattr(b, f.name)) for f in dataclasses.fields(b))
    none = both.select(torch.zeros(5, dtype=torch.bool))
    assert len(none) == 0 and none.tokens.numel() == 0 and none.cu_seqlens.tolist() == [0]
    assert len(RolloutBatch.cat([])) == len(RolloutBatch.empty()) == 0
    assert len(RolloutBatch.cat([none, a])) == 2


def test_select_copies() -> None:
    a = batch([(3, 4), (1, 1)])
    picked = a.select(torch.tensor([0]))
    a.tokens.fill_(-1)
    a.advantage.fill_(99)
    assert bool((picked.tokens >= 0).all()) and picked.advantage.item() != 99
    assert picked.tokens.untyped_storage().nbytes() == 7 * 8


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokens", torch.zeros(9, dtype=torch.int32), r"tokens must be torch.int64 \[9\], got torch.int32"),
        ("loss_mask", torch.zeros(8, dtype=torch.bool), r"loss_mask must be torch.bool \[9\], got torch.bool \[8\]"),
        ("uid", torch.zeros(3, dtype=torch.int64), r"uid must be torch.int64 \[2\], got torch.int64 \[3\]"),
        ("advantage", torch.zeros(2).double(), r"advantage must be torch.float32 \[2\], got torch.float64"),
        ("cu_seqlens", torch.tensor([0, 7, 9]), r"cu_seqlens must be int32 \[N\+1\], got torch.int64"),
    ],
)
def test_wrong_shapes_and_dtypes_name_the_field(name: str, value: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        batch([(3, 4), (1, 1)]).replace(**{name: value})


def test_counts_must_agree() -> None:
    with pytest.raises(ValueError, match="rewards has 2 entries for 1 completions"):
        RolloutBatch.from_completions([completion()], [0.0, 1.0])


def test_more_tokens_than_int32_is_an_error() -> None:
    with pytest.raises(OverflowError, match="cu_seqlens: 4294967296 tokens do not fit int32"):
        cumulative(torch.tensor([2**31, 2**31]))
