"""Reward: the task's score of each completion."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_replay.rollout import Completion
from megatron_replay.tasks.task import Task
from megatron_replay.tokenizer import Tokenizer


class Reward:
    """Scores completions of prompts that were made from `task`."""

    def __init__(self, task: Task, tokenizer: Tokenizer) -> None:
        self._task = task
        self._tokenizer = tokenizer

    def __call__(self, completions: Sequence[Completion]) -> list[float | None]:
        """One reward for each completion, in order.

        None and NaN from the task are passed on. An error in `score` is raised, with the problem named in a note:
        a grader that breaks is not a wrong answer.
        """
        return [self._score(c) for c in completions]

    def _score(self, completion: Completion) -> float | None:
        problem = self._task.problem(completion.prompt.prompt_id)
        tokens = completion.tokens
        if completion.finish_reason == "stop":
            tokens = tokens[:-1]  # the final EOS
        try:
            return self._task.score(problem, self._tokenizer.decode(tokens))
        except Exception as error:
            error.add_note(f"while scoring the completion with uid {completion.uid} of problem {problem.problem_id}")
            raise
