"""Reasoning Gym: equal problems everywhere, scored where no response can end a rank or run in it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_replay import arguments
from megatron_replay.planning.findings import Findings
from megatron_replay.run.data_check import check_data
from megatron_replay.tasks import reasoning_gym as module
from megatron_replay.tasks.grader_pool import Grade, GraderOptions, GraderPool
from megatron_replay.tasks.prompts import PromptSource
from megatron_replay.tasks.reasoning_gym import HELDOUT_SEED_OFFSET, ReasoningGymTask
from megatron_replay.tasks.reward import Reward, needs_graders
from megatron_replay.tasks.sort_digits import SortDigits
from megatron_replay.tasks.task import Problem, build_task
from tests.launch import ROOT, environment
from tests.reasoning_gym_rank import RIGHT, SETS, SHARED, TEXTS, Texts


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(GraderOptions("exact", workers=1), os.environ) as pool:
        yield pool


def item(problem: Problem, response: str) -> dict[str, Any]:
    extra = dict(problem.extra)
    return {"prompt": problem.prompt, "response": response, "answer": problem.answer, "extra": extra}


def test_right_and_wrong_answers_of_both_splits(pool: GraderPool) -> None:
    options = {"max_value": 50, "size": 40}
    for split in ("train", "heldout"):
        task = build_task("reasoning-gym:gcd", split=split, seed=3, options=options)
        assert task.size == 40
        for index in (0, 39):
            problem = task.problem(index)
            assert problem == build_task("reasoning-gym:gcd", split=split, seed=3, options=options).problem(index)
            asked = [item(problem, f" {problem.answer}\n"), item(problem, "no")]
            assert pool.grade(asked) == [Grade(1.0), Grade(0.0)]
        with pytest.raises(IndexError, match="^index"):
            task.problem(40)


def test_the_trainer_neither_scores_nor_imports_it() -> None:
    task = ReasoningGymTask("gcd", split="train", seed=0)
    assert "import reasoning_gym" not in Path(module.__file__).read_text()
    # whatever the other end imported of the package would bring torch along
    assert not re.search(r"^\s*(from|import) megatron_replay", module.WORKER.read_text(), re.MULTILINE)
    with pytest.raises(TypeError, match="^problem 4 of reasoning-gym:gcd is scored by graders"):
        Reward(task, Texts())._task.score(task.problem(4), "1")
    assert needs_graders("exact", task) and not needs_graders("exact", SortDigits(split="train", seed=0))
    assert needs_graders("math-verify", SortDigits(split="train", seed=0))


def test_a_grader_that_sees_another_problem_does_not_judge(pool: GraderPool) -> None:
    task = ReasoningGymTask("gcd", split="train", seed=0)
    (found,) = pool.grade([item(task.problem(4), "1") | {"prompt": "another"}])
    assert found == Grade(None, "error", "RuntimeError: problem 4 of reasoning-gym:gcd is another one here")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks of a replica have found, each with a hash seed of its own."""
    folder = tmp_path_factory.mktemp("ranks")
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.reasoning_gym_rank", str(rank), folder / "store", folder / f"{rank}.json"],
            env=environment() | {"PYTHONHASHSEED": str(11 + rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    for process in started:
        _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def test_problems_do_not_depend_on_the_hash_seed(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["problems"].keys() == {*SETS, SHARED[0]}
    for name, problems in first["problems"].items():
        assert problems == second["problems"][name], name
    assert first["identity"] == second["identity"]


def test_no_response_ends_a_rank_or_runs_in_it(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["rewards"] == second["rewards"] and first["counters"] == second["counters"]
    assert not first["planted"] and not second["planted"]
    rewards, counters = first["rewards"], first["counters"]
    for name, texts in TEXTS.items():
        assert [r for r, text in zip(rewards[name], texts, strict=True) if text == RIGHT] == [1.0] * texts.count(RIGHT)
    # an exit is a wrong answer; of a process that has died nothing is known, and the next response finds another one
    assert rewards["spiral_matrix"] == [1.0, 0.0, 0.0, None, 1.0]
    assert counters["spiral_matrix"] == {"grader_timeouts": 0, "grader_errors": 2, "grader_restarts": 1}
    assert rewards["prime_factorization"] == [1.0, 0.0] and counters["prime_factorization"]["grader_errors"] == 1
    assert rewards["countdown"] == [1.0, 0.0]
    assert counters["countdown"] == {"grader_timeouts": 1, "grader_errors": 0, "grader_restarts": 1}
    assert all(counters[name]["grader_errors"] for name in ("boxnet", "coin_flip", "game_of_life")), counters
    assert all(r is not None for name in ("boxnet", "coin_flip", "game_of_life") for r in rewards[name])


def test_a_dry_run_scores_its_gold_answers(tmp_path: Path) -> None:
    flags = ["--load-hf", tmp_path, "--run-dir", tmp_path, "--rl-task", "reasoning-gym:prime_factorization"]
    flags += ["--seq-length", 64, "--rl-max-response-length", 32, "--train-iters", 1]
    flags += ["--grpo-prompts-per-step", 1, "--grpo-group-size", 2, "--lr", 1e-3]
    found = Findings()
    check_data(found, arguments.parse_args([str(x) for x in flags]), Texts(), 3)
    assert found.problems == []
    assert (
        "--rl-reward exact of --rl-task reasoning-gym:prime_factorization: 3 gold answers have a mean reward of 1.000"
        in found.checked
    )


def test_the_identity_holds_the_version_and_the_problems() -> None:
    def identity(name: str, **more: Any) -> str | None:
        task = ReasoningGymTask(name, split="train", **({"seed": 3} | more))
        named = "--rl-task (version and sha256 of its first problems)"
        return PromptSource(task, Texts(), seed=3, max_prompt_length=9).identity[named]

    found = identity("gcd")
    assert found is not None and found.startswith("reasoning-gym 0.1.25, ") and found == identity("gcd")
    assert len({found, identity("lcm"), identity("gcd", seed=4), identity("gcd", options={"max_value": 50})}) == 4


def test_the_process_that_makes_problems_is_replaced() -> None:
    """It ends with the thread that started it, and may be killed."""
    task = ReasoningGymTask("gcd", split="train", seed=0)
    before = task.problem(0)
    assert module._maker._process is not None
    module._maker._process._process.kill()
    assert ReasoningGymTask("gcd", split="train", seed=0).problem(0) == before

    def start() -> None:
        assert module._maker._process is not None
        module._maker._process.kill()
        module._maker._process = None
        task.problem(1)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert ReasoningGymTask("gcd", split="train", seed=0).problem(0) == before


def test_splits_use_other_seeds() -> None:
    settings = {"max_value": 10**9}
    train = {ReasoningGymTask("gcd", split="train", seed=0, options=settings).problem(i).prompt for i in range(300)}
    heldout = ReasoningGymTask("gcd", split="heldout", seed=0, options=settings)
    assert heldout.size < HELDOUT_SEED_OFFSET  # item i comes from seed + i
    assert not train & {heldout.problem(i).prompt for i in range(300)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"colour": 3}, "^options must fit the reasoning-gym dataset gcd, got .*colour"),
        ({"min_numbers": 0}, "^options must fit the reasoning-gym dataset gcd, got .*min_numbers"),
        ({"size": 0}, "^size must be an integer in .*, got 0"),
        ({"seed": 4}, "^options must leave the seed to --seed, got seed 4"),
        ({"max_value": {3}}, "^options must be what JSON holds, got "),
    ],
)
def test_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_task("reasoning-gym:gcd", split="train", seed=0, options=options)


def test_an_unknown_dataset() -> None:
    with pytest.raises(ValueError, match="^--rl-task reasoning-gym:NAME must name one of .*gcd.*, got 'nope'"):
        build_task("reasoning-gym:nope", split="train", seed=0)


def test_without_the_package_the_task_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "reasoning_gym.py").write_text("raise ModuleNotFoundError(\"No module named 'reasoning_gym'\")")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_maker", module._Maker())
    message = "^--rl-task reasoning-gym:gcd cannot be used: ModuleNotFoundError: No module named 'reasoning_gym'"
    with pytest.raises(ValueError, match=message):
        ReasoningGymTask("gcd", split="train", seed=0)
