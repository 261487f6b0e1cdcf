"""Reward: what is scored, by the task or by grader processes, and what becomes of a grade that is missing."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pytest

from megatron_replay.rollout import Completion, Prompt
from megatron_replay.tasks.grader_pool import Grade, GraderOptions
from megatron_replay.tasks.reward import COUNTERS, Graders, Reward
from megatron_replay.tasks.task import Problem

T = TypeVar("T")


class Letters:
    """A tokenizer over a-z: id 0 is EOS, id i the i-th letter."""

    eos_id = 0
    vocab_size = 27

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 96 for c in text]

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(chr(96 + i) for i in ids)


class Scripted:
    """A task whose score is what the test says."""

    size = None

    def __init__(self, outcome: float | Exception | None) -> None:
        self.outcome = outcome
        self.seen: list[tuple[Problem, str]] = []

    def problem(self, index: int) -> Problem:
        return Problem("p", "a", index)

    def score(self, problem: Problem, response: str) -> float | None:
        self.seen.append((problem, response))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def completion(tokens: tuple[int, ...], finish_reason: str = "stop", prompt_id: int = 5) -> Completion:
    prompt = Prompt(tokens=(1,), counter=9, prompt_id=prompt_id)
    return Completion(prompt, 72, tokens, (0.0,) * len(tokens), finish_reason, 0)  # type: ignore[arg-type]


def test_reward_decodes_without_the_final_eos() -> None:
    task = Scripted(1.0)
    reward = Reward(task, Letters())
    assert reward([completion((1, 2, 0)), completion((1, 2), "length"), completion((0,))]) == [1.0, 1.0, 1.0]
    assert [text for _, text in task.seen] == ["ab", "ab", ""]
    assert task.seen[0][0].problem_id == 5
    assert reward([]) == []


def test_reward_passes_on_what_cannot_be_judged() -> None:
    assert Reward(Scripted(None), Letters())([completion((1, 0))]) == [None]
    (value,) = Reward(Scripted(math.nan), Letters())([completion((1, 0))])
    assert value is not None and math.isnan(value)


def test_a_broken_grader_is_not_a_wrong_answer() -> None:
    with pytest.raises(ZeroDivisionError) as error:
        Reward(Scripted(ZeroDivisionError("x")), Letters())([completion((1, 0), prompt_id=41)])
    assert any("uid 72 of problem 41" in note for note in error.value.__notes__)


class Alone:
    """One rank."""

    leads = True

    def from_leader(self, value: T) -> T:
        return value


class Follower:
    """A rank that is told what the leader found."""

    leads = False

    def __init__(self, told: Any) -> None:
        self.told = told

    def from_leader(self, value: Any) -> Any:
        assert value == []
        return self.told


class Words:
    """A tokenizer whose ids are places in a list of texts: a response is one text and the EOS, id 0."""

    eos_id = 0

    def __init__(self, *texts: str) -> None:
        self.texts = ("", *texts)
        self.vocab_size = len(self.texts)

    def encode(self, text: str) -> list[int]:
        return [self.texts.index(text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.texts[i] for i in ids)

    def completions(self) -> list[Completion]:
        return [completion((i, 0), prompt_id=10 + i) for i in range(1, self.vocab_size)]


class Asks:
    size = None

    def problem(self, index: int) -> Problem:
        return Problem(({"role": "user", "content": "q"},), f"answer {index}", index, {"level": index})

    def score(self, problem: Problem, response: str) -> float:
        raise AssertionError("the graders score")


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    graders = Graders(GraderOptions("tests.graders:obey", workers=2, timeout=3.0), os.environ, Alone())
    yield graders
    graders.close()


def test_graders_see_the_problem_and_the_response_without_eos(graders: Graders) -> None:
    seen = repr(([{"role": "user", "content": "q"}], "answer 11", {"level": 11}))
    tokenizer = Words(f"echo {seen}", "equal answer 12", "equal answer 12", "none")
    reward = Reward(Asks(), tokenizer, graders)
    assert reward(tokenizer.completions()) == [1.0, 1.0, 0.0, None]
    assert reward.counters() == dict.fromkeys(COUNTERS, 0)
    assert reward([]) == []


def test_what_no_grader_judged_is_none_counted_and_named(graders: Graders, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Words("value 1", "raise ouch", "hang", "die 4", "value 2")
    reward, other = Reward(Asks(), tokenizer, graders), Reward(Asks(), tokenizer, graders)
    for _ in range(2):
        assert reward(tokenizer.completions()) == [1.0, None, None, None, 2.0]
        said = capfd.readouterr().err.strip().splitlines()
        assert said == [
            "--rl-reward tests.graders:obey: 3 of 5 responses were not judged; the first, uid 72 of problem 12: "
            "ZeroDivisionError: ouch"
        ]
    assert reward.counters() == {"grader_timeouts": 2, "grader_errors": 4, "grader_restarts": 4}
    assert reward.counters() == other.counters() == dict.fromkeys(COUNTERS, 0)


@pytest.mark.parametrize(
    ("order", "words"), [("value nan", "float nan"), ("value -inf", "float -inf"), ("text x", "str")]
)
def test_a_grader_that_returns_no_finite_number_is_an_error(graders: Graders, order: str, words: str) -> None:
    tokenizer = Words("value 1", order)
    message = (
        f"^--rl-reward tests.graders:obey must return a finite number or None, got {words} "
        "for the completion with uid 72 of problem 12"
    )
    with pytest.raises(ValueError, match=message):
        Reward(Asks(), tokenizer, graders)(tokenizer.completions())


def test_ranks_that_do_not_lead_start_no_process_and_take_the_leaders_grades(capfd: pytest.CaptureFixture[str]) -> None:
    """A limit of wall-clock time could pass on one rank and not on the next: they would train on different batches."""
    told = [Grade(0.5), Grade(None, "timeout", "no grade within 3 s", restarted=True)]
    graders = Graders(GraderOptions("no.such.module:f"), {}, Follower(told))
    tokenizer = Words("value 1", "value 2")
    reward = Reward(Asks(), tokenizer, graders)
    assert reward(tokenizer.completions()) == [0.5, None]
    assert reward.counters() == {"grader_timeouts": 1, "grader_errors": 0, "grader_restarts": 1}
    assert capfd.readouterr().err == ""
    graders.close()
