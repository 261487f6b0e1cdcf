from __future__ import annotations

import itertools
import random

import pytest

from megatron_replay.tasks.sort_digits import SortDigits
from megatron_replay.tasks.task import Problem, build_task, permuted


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 65, 1000])
def test_permuted_is_a_permutation(size: int) -> None:
    for key in (0, 1, -3, 2**70):
        assert sorted(permuted(i, size, key) for i in range(size)) == list(range(size))


def test_permuted_depends_on_the_key_and_leaves_no_order() -> None:
    a, b = ([permuted(i, 1000, key) for i in range(1000)] for key in (1, 2))
    assert sum(x == y for x, y in zip(a, b, strict=True)) < 20
    assert sum(y == x + 1 for x, y in itertools.pairwise(a)) < 20
    assert abs(sum(i * x for i, x in enumerate(a)) / 1000 - 499.5**2) < 10_000  # 3.5 standard deviations
    for index in (-1, 1000):
        with pytest.raises(IndexError, match=rf"^index must be in \[0, 1000\), got {index}"):
            permuted(index, 1000, 0)


def test_sort_digits_splits_are_whole_and_share_no_answer() -> None:
    train, heldout = SortDigits(split="train", seed=0), SortDigits(split="heldout", seed=1)
    a = [train.problem(i) for i in range(train.size)]
    b = [heldout.problem(i) for i in range(heldout.size)]
    assert sorted(p.prompt for p in a + b) == [f"{n:05d}=" for n in range(100_000)]
    assert not {p.answer for p in a} & {p.answer for p in b}
    assert all(p.answer == "".join(sorted(p.prompt[:-1])) and p.problem_id == i for i, p in enumerate(a))
    for place in range(5):
        assert {p.prompt[place] for p in b} == set("0123456789")


def test_sort_digits_seed_sets_the_order() -> None:
    first = [SortDigits(split="train", seed=s).problem(0) for s in range(20)]
    assert len({p.prompt for p in first}) > 15
    random.seed(0)
    again = SortDigits(split="train", seed=3).problem(0)
    assert again == first[3]


def test_sort_digits_score() -> None:
    task = SortDigits(split="train", seed=0)
    problem = Problem("83052=", "02358", 0)
    assert task.score(problem, "02358") == 1.0
    for wrong in ("", "0235", "023588", "02385", " 02358", "02358="):
        assert task.score(problem, wrong) == 0.0
    for index in (-1, task.size):
        with pytest.raises(IndexError, match=f"^index must be in .*, got {index}"):
            task.problem(index)


@pytest.mark.parametrize("name", ["", "sort", "reasoning-gym", "reasoning-gym:", "sort-digits:x"])
def test_unknown_task(name: str) -> None:
    with pytest.raises(ValueError, match=f"^--rl-task must be one of sort-digits, .*got '{name}'"):
        build_task(name, split="train", seed=0)


def test_unknown_split_path_and_options() -> None:
    with pytest.raises(ValueError, match="^split must be one of train, heldout, got 'test'"):
        build_task("sort-digits", split="test", seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="^--data-path must name a JSONL file"):
        build_task("jsonl", split="train", seed=0)
    with pytest.raises(ValueError, match="^--heldout-data-path must name a JSONL file"):
        build_task("jsonl", split="heldout", seed=0)
    with pytest.raises(ValueError, match="^--data-path must not be given for --rl-task sort-digits, got 'x'"):
        build_task("sort-digits", split="train", seed=0, data_path="x")
    for key in ("prompt_key", "answer_key"):
        flag = f"--rl-{key.replace('_', '-')}"
        with pytest.raises(ValueError, match=f"^{flag} must not be given for --rl-task sort-digits, got 'x'"):
            build_task("sort-digits", split="train", seed=0, **{key: "x"})
    with pytest.raises(ValueError, match="^options must be empty for --rl-task sort-digits"):
        build_task("sort-digits", split="train", seed=0, options={"digits": 4})
