from __future__ import annotations

from pathlib import Path

import pytest

from megatron_replay.tasks.jsonl import JsonlTask
from megatron_replay.tasks.prompts import HELDOUT_COUNTER, PromptSource, heldout_prompts
from megatron_replay.tasks.task import Problem


class Characters:
    eos_id = 0
    vocab_size = 128

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(map(chr, ids))


class Numbers:
    """Problem i is the text of i."""

    def __init__(self, size: int | None, long: int | None = None, empty: int | None = None) -> None:
        self.size = size
        self.texts = {long: "x" * 50, empty: ""}

    def problem(self, index: int) -> Problem:
        return Problem(self.texts.get(index, str(index)), "", index)

    def score(self, problem: Problem, response: str) -> float:
        return 0.0


def source(size: int | None, seed: int = 0, **task: int) -> PromptSource:
    return PromptSource(Numbers(size, **task), Characters(), seed=seed, max_prompt_length=8)


def ids(prompts: list) -> list[int]:
    return [p.prompt_id for p in prompts]


def test_an_epoch_holds_each_problem_once_and_the_next_has_another_order() -> None:
    prompts = source(50)
    first, second = ids(prompts.take(50)), ids(prompts.take(50))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    assert first != list(range(50))
    assert ids(source(50, seed=1).take(50)) != first


def test_prompts_carry_counter_and_tokens() -> None:
    for n, prompt in enumerate(source(7).take(20)):
        assert prompt.counter == n
        assert "".join(map(chr, prompt.tokens)) == str(prompt.prompt_id)


@pytest.mark.parametrize("cut", [0, 1, 6, 7, 8, 13, 14, 20])
def test_resume_goes_on_with_the_same_prompts(cut: int) -> None:
    whole = source(7).take(30)
    one = source(7)
    one.take(cut)
    other = source(7)
    other.load_state_dict(one.state_dict())
    assert other.take(30 - cut) == whole[cut:]
    assert other.cursor == 30
    assert one.state_dict() == {"cursor": cut}


def test_resume_at_the_end_of_an_epoch_starts_the_next_at_its_first_prompt() -> None:
    one = source(7)
    one.take(7)
    other = source(7)
    other.load_state_dict({"cursor": 7})
    taken = other.take(7)
    assert taken == one.take(7)
    assert sorted(ids(taken)) == list(range(7))
    assert taken[0].counter == 7


def test_uneven_takes_across_epochs() -> None:
    parts = source(5)
    taken = [p for n in (3, 0, 4, 11, 1) for p in parts.take(n)]
    assert taken == source(5).take(19)


def test_a_task_without_end_is_taken_in_order() -> None:
    prompts = source(None)
    prompts.load_state_dict({"cursor": 10**6})
    assert ids(prompts.take(3)) == [10**6, 10**6 + 1, 10**6 + 2]


def test_a_prompt_that_does_not_fit_is_an_error_and_the_cursor_stays() -> None:
    prompts = source(4, long=3)
    message = r"^prompt 3 must have 1 to 8 tokens \(--seq-length less --rl-max-response-length\), got 50"
    with pytest.raises(ValueError, match=message):
        prompts.take(4)
    assert prompts.cursor == 0
    with pytest.raises(ValueError, match=message):
        heldout_prompts(Numbers(4, long=3), Characters(), 4, 8)
    with pytest.raises(ValueError, match="^prompt 2 must have 1 to 8 tokens .*got 0"):
        source(4, empty=2).take(4)


def test_a_prompt_of_exactly_the_limit_fits() -> None:
    prompts = PromptSource(Numbers(1, long=0), Characters(), seed=0, max_prompt_length=50)
    assert len(prompts.take(1)[0].tokens) == 50


def long_ones(size: int, long: set[int], filter_long: bool = True) -> PromptSource:
    """Problems of which those in `long` have 50 characters."""
    task = Numbers(size)
    task.texts |= dict.fromkeys(long, "x" * 50)
    limit = 8 if filter_long else 50
    return PromptSource(task, Characters(), seed=3, max_prompt_length=limit, filter_long=filter_long)


@pytest.mark.parametrize("long", [set(), {3}, {0, 1, 5, 6}])
def test_the_filter_leaves_the_others_where_they_were(long: set[int]) -> None:
    """Each epoch of the filtered source is the whole one's without the long prompts; counters count what is left."""
    whole, filtered = long_ones(7, long, filter_long=False), long_ones(7, long)
    assert (filtered.dropped, filtered.size) == (len(long), 7 - len(long))
    for epoch in range(4):
        taken = filtered.take(7 - len(long))
        assert ids(taken) == [i for i in ids(whole.take(7)) if i not in long]
        assert [p.counter for p in taken] == list(range(epoch * len(taken), (epoch + 1) * len(taken)))


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 7, 20])
def test_a_filtered_source_resumes_at_the_same_prompt(cut: int) -> None:
    one, other = long_ones(7, {0, 2, 6}), long_ones(7, {0, 2, 6})
    whole = one.take(25)
    other.load_state_dict({"cursor": cut})
    assert other.take(25 - cut) == whole[cut:]


def test_the_filter_says_what_it_did_and_leaves_a_prompt() -> None:
    assert long_ones(7, {1, 2}).report() == "--rl-filter-long-prompts: 2 of 7 prompts left out, longer than 8 tokens"
    assert source(7).report() is None
    with pytest.raises(ValueError, match="^--rl-filter-long-prompts must leave a prompt, got none of 2 with at most 8"):
        long_ones(2, {0, 1})
    with pytest.raises(ValueError, match="^--rl-filter-long-prompts must not be given for a task without end"):
        PromptSource(Numbers(None), Characters(), seed=0, max_prompt_length=8, filter_long=True)
    # an empty prompt is no long one
    with pytest.raises(ValueError, match="^prompt 2 must have 1 to 8 tokens .*got 0"):
        PromptSource(Numbers(4, empty=2), Characters(), seed=0, max_prompt_length=8, filter_long=True).take(4)


def test_heldout_prompts_are_filtered_too() -> None:
    task = Numbers(5, long=1)
    found = heldout_prompts(task, Characters(), 3, 8, filter_long=True)
    assert ids(found) == [0, 2, 3]
    assert [p.counter for p in found] == [HELDOUT_COUNTER + i for i in range(3)]
    with pytest.raises(ValueError, match=r"^--eval-prompts must be in \[0, 4\].* got 5"):
        heldout_prompts(task, Characters(), 5, 8, filter_long=True)


def test_the_identity_tells_data_fields_template_and_filter_apart(tmp_path: Path) -> None:
    def identity(text: str, limit: int = 8, filter_long: bool = True, **keys: str) -> dict[str, str | None]:
        (tmp_path / "x.jsonl").write_text(text)
        task = JsonlTask(str(tmp_path / "x.jsonl"), **keys)
        return PromptSource(task, Characters(), seed=0, max_prompt_length=limit, filter_long=filter_long).identity

    line = '{"prompt": "abc", "question": "abcde", "answer": "3"}\n'
    more = line + '{"prompt": "0123456789", "answer": "3"}\n'
    assert identity(more)["--rl-filter-long-prompts"] == "1 of 2 prompts, at most 8 tokens"
    others = [
        identity(more),
        identity(more, limit=20),
        identity(line + "\n"),
        identity(line),
        identity(line, filter_long=False),
        identity(line, prompt_key="question"),
        identity(line, answer_key="answer"),
    ]
    assert len({str(x) for x in others}) == len(others)
    assert all(x.keys() == others[0].keys() for x in others)
    assert identity(line) == identity(line)
    # so a checkpoint of a task without any of these goes on with the flags it was written with
    assert set(source(5).identity.values()) == {None}


def test_heldout_uids_never_meet_those_of_the_run() -> None:
    heldout = heldout_prompts(Numbers(5), Characters(), 5, 8)
    assert ids(heldout) == [0, 1, 2, 3, 4]
    assert [p.counter for p in heldout] == [HELDOUT_COUNTER + i for i in range(5)]
    assert heldout[-1].uid(1023, 1024) < 2**63
    run = source(5)
    run.load_state_dict({"cursor": HELDOUT_COUNTER - 1})
    assert run.take(1)[0].uid(7, 8) < heldout[0].uid(0, 8)
    assert heldout_prompts(Numbers(5), Characters(), 0, 8) == []


@pytest.mark.parametrize("n", [-1, 6])
def test_heldout_count(n: int) -> None:
    with pytest.raises(ValueError, match=rf"^--eval-prompts must be in \[0, 5\].* got {n}"):
        heldout_prompts(Numbers(5), Characters(), n, 8)


@pytest.mark.parametrize("state", [{}, {"cursor": -1}, {"cursor": 1.5}, {"cursor": True}, {"cursor": HELDOUT_COUNTER}])
def test_bad_state(state: dict) -> None:
    with pytest.raises(ValueError, match="^cursor must be an integer in"):
        source(5).load_state_dict(state)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="^n must be at least 0, got -1"):
        source(5).take(-1)
    with pytest.raises(ValueError, match="^max_prompt_length must be at least 1 token, got 0"):
        PromptSource(Numbers(5), Characters(), seed=0, max_prompt_length=0)
    with pytest.raises(ValueError, match="^task must have at least 1 problem, got size 0"):
        source(0)
