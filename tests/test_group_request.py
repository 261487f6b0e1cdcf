"""What is asked of vLLM for a group, and what its samples may become."""

from __future__ import annotations

import dataclasses
import re

import pytest

from megatron_replay.config import SamplingConfig
from megatron_replay.engines.group_request import GroupRequest, RawSample
from megatron_replay.rollout import Prompt

EOS = 3
SAMPLING = SamplingConfig(max_response_length=2, temperature=0.7, seed=5)
ASKED = GroupRequest(SAMPLING, EOS, group_size=2, version=4)
PROMPT = Prompt((7, 8), counter=11, prompt_id=2)
GOOD = [
    RawSample((5, EOS), (-0.5, -0.25), "stop", ("4",)),
    RawSample((5, 6), (-0.5, None), "length", ("4",)),
]


def test_what_is_asked_for() -> None:
    sampling = SamplingConfig(max_response_length=9, temperature=0.7, top_p=0.9, top_k=5, allow_truncated_sampling=True)
    assert GroupRequest(sampling, EOS, 4, 0, seeded=False).params(PROMPT) == {
        "n": 4,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_tokens": 9,
        "stop_token_ids": [EOS],
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }


def test_seeds_are_unique_over_all_rollouts_and_fit_63_bits() -> None:
    asked = dataclasses.replace(ASKED, group_size=8)
    seeds = [asked.params(Prompt((1,), c, 0))["seed"] + i for c in range(500) for i in range(8)]
    assert len(set(seeds)) == 4000
    last = Prompt((1,), counter=2**50, prompt_id=0)
    for seed in range(200):
        other = dataclasses.replace(asked, sampling=dataclasses.replace(SAMPLING, seed=seed))
        assert 0 <= other.params(last)["seed"] < 2**63 - 8
        assert seed == SAMPLING.seed or other.params(Prompt((1,), 0, 0))["seed"] not in seeds


def test_a_group_becomes_completions_with_its_ids_and_log_probs_as_they_are() -> None:
    assert ASKED.problem(GOOD) is None
    first, second = ASKED.completions(PROMPT, GOOD)
    assert (first.uid, second.uid) == (22, 23) and first.prompt is PROMPT
    assert (first.tokens, first.finish_reason) == ((5, EOS), "stop")
    assert (second.logprobs, second.finish_reason) == ((-0.5, None), "length")
    assert {c.weight_version for c in (first, second)} == {4}


@pytest.mark.parametrize(
    ("samples", "problem"),
    [
        (GOOD[:1], ("server_failures", "samples must be 2, got 1")),
        (
            [GOOD[0], dataclasses.replace(GOOD[1], finish_reason="abort")],
            ("aborted", "finish_reason must be .* 'abort'"),
        ),
        ([GOOD[0], dataclasses.replace(GOOD[1], finish_reason=None)], ("aborted", "got None")),
        ([GOOD[0], dataclasses.replace(GOOD[1], weight_versions=("4", "5"))], ("wrong_version", "must be 4, got 4, 5")),
        ([GOOD[0], dataclasses.replace(GOOD[1], weight_versions=())], ("wrong_version", "must be 4, got 4, none")),
        (
            [GOOD[0], RawSample((5,), (-0.5,), "length", ("4",))],
            ("server_failures", "--rl-max-response-length 2 tokens, got 1: is the engine's max-model-len below"),
        ),
    ],
)
def test_anything_but_a_whole_group_of_one_version_is_no_group(
    samples: list[RawSample], problem: tuple[str, str]
) -> None:
    found = ASKED.problem(samples)
    assert found is not None and found.counter == problem[0]
    assert re.search(problem[1], found.words), found.words
    assert found.final == ("max-model-len" in found.words)
