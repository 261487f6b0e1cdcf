"""PromptSource: the prompts of a run in order, resumable from one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_replay.rollout import Prompt
from megatron_replay.tasks.task import Task, mixed, permuted
from megatron_replay.tokenizer import Tokenizer

HELDOUT_COUNTER = 1 << 48  # held-out prompts count from here: their uids never meet those of a run


class PromptSource:
    """Endless prompts of a task. Every rank holds the same source and takes the same prompts.

    Prompt c of the run belongs to epoch e = c // size and is problem permutation_{seed, e}(c mod size); a task
    without end gives problem c. `cursor`, the number of prompts taken, is the only state.
    `max_prompt_length` is in tokens: --seq-length less --rl-max-response-length.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, *, seed: int, max_prompt_length: int) -> None:
        if max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1 token, got {max_prompt_length}")
        if task.size is not None and task.size < 1:
            raise ValueError(f"task must have at least 1 problem, got size {task.size}")
        self._task = task
        self._tokenizer = tokenizer
        self._seed = seed
        self._max_prompt_length = max_prompt_length
        self.cursor = 0

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, across epochs where need be. On an error the cursor stays.

        Raises ValueError for negative `n`, and for a prompt that is empty or longer than `max_prompt_length`.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        counters = range(self.cursor, self.cursor + n)
        prompts = [_prompt(self._task, self._tokenizer, self._index(c), c, self._max_prompt_length) for c in counters]
        self.cursor += n
        return prompts

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another source with the same task and seed was. Raises ValueError for a state without cursor."""
        cursor = state.get("cursor")
        if type(cursor) is not int or not 0 <= cursor < HELDOUT_COUNTER:
            raise ValueError(f"cursor must be an integer in [0, 2^48), got {cursor!r}")
        self.cursor = cursor

    def _index(self, counter: int) -> int:
        if self._task.size is None:
            return counter
        epoch, place = divmod(counter, self._task.size)
        return permuted(place, self._task.size, mixed(mixed(self._seed) + epoch))


def heldout_prompts(task: Task, tokenizer: Tokenizer, n: int, max_prompt_length: int) -> list[Prompt]:
    """The first `n` problems of a held-out task as prompts, counted from HELDOUT_COUNTER.

    Raises ValueError for negative `n`, for more problems than the task has, and for a prompt that does not fit.
    """
    if n < 0 or (task.size is not None and n > task.size):
        raise ValueError(f"--eval-prompts must be in [0, {task.size}], the problems of the held-out task, got {n}")
    return [_prompt(task, tokenizer, i, HELDOUT_COUNTER + i, max_prompt_length) for i in range(n)]


def _prompt(task: Task, tokenizer: Tokenizer, index: int, counter: int, max_prompt_length: int) -> Prompt:
    tokens = tuple(tokenizer.encode(task.problem(index).prompt))
    if not 1 <= len(tokens) <= max_prompt_length:
        raise ValueError(
            f"prompt {index} must have 1 to {max_prompt_length} tokens (--seq-length less --rl-max-response-length), "
            f"got {len(tokens)}"
        )
    return Prompt(tokens=tokens, counter=counter, prompt_id=index)
