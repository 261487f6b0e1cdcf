"""Reward: the score of each completion, by the task itself or by grader processes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from megatron_replay.rollout import Completion
from megatron_replay.tasks.grader_pool import Grade, GraderOptions, GraderPool
from megatron_replay.tasks.reasoning_gym import ReasoningGymTask
from megatron_replay.tasks.task import Problem, Task
from megatron_replay.tokenizer import Tokenizer

T = TypeVar("T")
COUNTERS = ("grader_timeouts", "grader_errors", "grader_restarts")


class Ranks(Protocol):
    """The ranks that hold the same completions: one of them grades."""

    @property
    def leads(self) -> bool: ...

    def from_leader(self, value: T) -> T: ...


class Graders:
    """A grader pool on the leading rank; the other ranks are told its grades, since a clock is no function of an item.

    Every rank of a replica makes one. `env` holds the variables of the processes.
    """

    def __init__(self, options: GraderOptions, env: Mapping[str, str], ranks: Ranks) -> None:
        self.name = options.reward
        self._ranks = ranks
        self._pool = GraderPool(options, env) if ranks.leads else None

    @property
    def leads(self) -> bool:
        return self._ranks.leads

    def grade(self, items: Sequence[Mapping[str, Any]]) -> list[Grade]:
        """One Grade for each item, in order, equal on every rank; all of them call it."""
        return self._ranks.from_leader(self._pool.grade(items) if self._pool is not None else [])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


def needs_graders(reward: str, task: Task) -> bool:
    """Whether `--rl-reward` takes grader processes for this task: all do but the own score of a task that is ours."""
    return reward != "exact" or isinstance(task, ReasoningGymTask)


class Reward:
    """Scores completions of prompts that were made from `task`: by `graders`, or without any by the task itself.

    Graders of the reward "exact" are there for Reasoning Gym: another task scores for itself beside them.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, graders: Graders | None = None) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._graders = graders if graders is not None and needs_graders(graders.name, task) else None
        self._counters: Counter[str] = Counter()

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        """One reward for each completion, in order.

        None and NaN from the task are passed on. An error in the task's `score` is raised, with the problem named in
        a note: a grader that breaks is not a wrong answer. A grader process that is late, breaks or dies gives
        None, or 0 where the response is to blame, counted, and the first such item is named on standard error; one
        that returns no finite number is a ValueError.
        """
        if self._graders is None:
            return [self._score(c) for c in completions]
        grades = self._graders.grade([self._item(c) for c in completions])
        failed = [(g, c) for g, c in zip(grades, completions, strict=True) if g.failure]
        for grade, completion in failed:
            if grade.failure == "bad":
                raise ValueError(
                    f"--rl-reward {self._graders.name} must return a finite number or None, got {grade.words} for "
                    f"the completion with uid {completion.uid} of problem {completion.prompt.prompt_id}"
                )
        self._counters["grader_timeouts"] += sum(g.failure == "timeout" for g in grades)
        self._counters["grader_errors"] += sum(g.failure == "error" for g in grades)
        self._counters["grader_restarts"] += sum(g.restarted for g in grades)
        if failed and self._graders.leads:
            grade, completion = failed[0]
            print(
                f"--rl-reward {self._graders.name}: {len(failed)} of {len(grades)} responses were not judged; "
                f"the first, uid {completion.uid} of problem {completion.prompt.prompt_id}: {grade.words}",
                file=sys.stderr,
                flush=True,
            )
        return [g.value for g in grades]

    def counters(self) -> dict[str, int]:
        """What happened on this replica since the last call, with every name of COUNTERS; equal on its ranks."""
        counted = {name: self._counters[name] for name in COUNTERS}
        self._counters.clear()
        return counted

    def _item(self, completion: Completion) -> dict[str, Any]:
        problem, response = self._answered(completion)
        return {
            "prompt": problem.prompt,
            "response": response,
            "answer": problem.answer,
            "extra": dict(problem.extra),
        }

    def _score(self, completion: Completion) -> float | None:
        problem, response = self._answered(completion)
        try:
            return self._task.score(problem, response)
        except Exception as error:
            error.add_note(f"while scoring the completion with uid {completion.uid} of problem {problem.problem_id}")
            raise

    def _answered(self, completion: Completion) -> tuple[Problem, str]:
        tokens = completion.tokens
        if completion.finish_reason == "stop":
            tokens = tokens[:-1]  # the final EOS
        return self._task.problem(completion.prompt.prompt_id), self._tokenizer.decode(tokens)
