"""PromptSource: the prompts of a run in order, resumable from one number."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from megatron_replay.rollout import Prompt
from megatron_replay.tasks.jsonl import JsonlTask
from megatron_replay.tasks.prompt_encoder import PromptEncoder
from megatron_replay.tasks.reasoning_gym import ReasoningGymTask
from megatron_replay.tasks.task import Task, mixed, permuted
from megatron_replay.tokenizer import Tokenizer

HELDOUT_COUNTER = 1 << 48  # held-out prompts count from here: their uids never meet those of a run


class PromptSource:
    """Endless prompts of a task. Every rank holds the same source and takes the same prompts.

    Prompt c of the run belongs to epoch e = c // size and is problem permutation_{seed, e}(c mod size); a task
    without end gives problem c. `cursor`, the number of prompts taken, is the only state.
    `max_prompt_length` is in tokens: --seq-length less --rl-max-response-length.

    `filter_long` leaves out problems whose prompt is longer: the others keep their numbers and their order in each
    epoch, and size and cursor count them alone. `dropped` of them are left out. It encodes every prompt once, at the
    start.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Tokenizer,
        *,
        seed: int,
        max_prompt_length: int,
        chat_template: str = "none",
        filter_long: bool = False,
    ) -> None:
        if max_prompt_length < 1:
            raise ValueError(f"max_prompt_length must be at least 1 token, got {max_prompt_length}")
        if task.size is not None and task.size < 1:
            raise ValueError(f"task must have at least 1 problem, got size {task.size}")
        self._task = task
        self._encode = PromptEncoder(tokenizer, chat_template)
        self._seed = seed
        self._max_prompt_length = max_prompt_length
        self._long = _long_prompts(task, self._encode, max_prompt_length) if filter_long else frozenset()
        self._filter_long = filter_long
        self._epoch: tuple[int, array[int]] = (-1, array("q"))
        self.dropped = len(self._long)
        self.size: int | None = None if task.size is None else task.size - self.dropped
        if self.size == 0:
            raise ValueError(
                f"--rl-filter-long-prompts must leave a prompt, got none of {task.size} with at most "
                f"{max_prompt_length} tokens (--seq-length less --rl-max-response-length)"
            )
        self.cursor = 0

    def take(self, n: int) -> list[Prompt]:
        """The next `n` prompts, across epochs where need be. On an error the cursor stays.

        Raises ValueError for negative `n`, and for a prompt that is empty or longer than `max_prompt_length`.
        """
        if n < 0:
            raise ValueError(f"n must be at least 0, got {n}")
        counters = range(self.cursor, self.cursor + n)
        prompts = [_prompt(self._task, self._encode, self._index(c), c, self._max_prompt_length) for c in counters]
        self.cursor += n
        return prompts

    @property
    def identity(self) -> dict[str, str | None]:
        """What a cursor means nothing without, beside the task and the seed: flag -> value, None where it is off."""
        jsonl = self._task if isinstance(self._task, JsonlTask) else None
        kept = f"{self.size} of {self._task.size} prompts, at most {self._max_prompt_length} tokens"
        return {
            "--data-path (sha256)": None if jsonl is None else jsonl.sha256,
            "--rl-prompt-key": None if jsonl is None else jsonl.fields.prompt_key,
            "--rl-answer-key": None if jsonl is None else jsonl.fields.answer_key,
            "--rl-chat-template (sha256)": self._encode.identity,
            "--rl-filter-long-prompts": kept if self._filter_long else None,
            "--rl-task (version and sha256 of its first problems)": (
                self._task.identity if isinstance(self._task, ReasoningGymTask) else None
            ),
        }

    def report(self) -> str | None:
        """What was read and what was left out, for a person; None where there is nothing to say."""
        said = [self._task.report()] if isinstance(self._task, JsonlTask) else []
        if self._filter_long:
            said.append(
                f"--rl-filter-long-prompts: {self.dropped} of {self._task.size} prompts left out, longer than "
                f"{self._max_prompt_length} tokens"
            )
        return "\n".join(said) or None

    def state_dict(self) -> dict[str, int]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where another source with the same task and seed was. Raises ValueError for a state without cursor."""
        cursor = state.get("cursor")
        if type(cursor) is not int or not 0 <= cursor < HELDOUT_COUNTER:
            raise ValueError(f"cursor must be an integer in [0, 2^48), got {cursor!r}")
        self.cursor = cursor

    def _index(self, counter: int) -> int:
        if self.size is None or self._task.size is None:
            return counter
        epoch, place = divmod(counter, self.size)
        key = mixed(mixed(self._seed) + epoch)
        if not self._long:
            return permuted(place, self._task.size, key)
        if self._epoch[0] != epoch:
            whole = (permuted(i, self._task.size, key) for i in range(self._task.size))
            self._epoch = (epoch, array("q", (i for i in whole if i not in self._long)))
        return self._epoch[1][place]


def heldout_prompts(
    task: Task,
    tokenizer: Tokenizer,
    n: int,
    max_prompt_length: int,
    *,
    chat_template: str = "none",
    filter_long: bool = False,
) -> list[Prompt]:
    """The first `n` problems of a held-out task as prompts, counted from HELDOUT_COUNTER.

    With `filter_long`, the first `n` whose prompt is not longer than `max_prompt_length` tokens.
    Raises ValueError for negative `n`, for more problems than there are, and for a prompt that does not fit.
    """
    encode = PromptEncoder(tokenizer, chat_template)
    long = _long_prompts(task, encode, max_prompt_length) if filter_long else frozenset()
    size = None if task.size is None else task.size - len(long)
    if n < 0 or (size is not None and n > size):
        raise ValueError(f"--eval-prompts must be in [0, {size}], the problems of the held-out task, got {n}")
    numbers = range(n) if task.size is None else [i for i in range(task.size) if i not in long][:n]
    return [_prompt(task, encode, i, HELDOUT_COUNTER + c, max_prompt_length) for c, i in enumerate(numbers)]


def _long_prompts(task: Task, encode: PromptEncoder, limit: int) -> frozenset[int]:
    """Numbers of the problems whose prompt has more than `limit` tokens."""
    if task.size is None:
        raise ValueError("--rl-filter-long-prompts must not be given for a task without end")
    return frozenset(i for i in range(task.size) if len(encode(task.problem(i))) > limit)


def _prompt(task: Task, encode: PromptEncoder, index: int, counter: int, max_prompt_length: int) -> Prompt:
    tokens = encode(task.problem(index))
    if not 1 <= len(tokens) <= max_prompt_length:
        raise ValueError(
            f"prompt {index} must have 1 to {max_prompt_length} tokens (--seq-length less --rl-max-response-length), "
            f"got {len(tokens)}"
        )
    return Prompt(tokens=tokens, counter=counter, prompt_id=index)
