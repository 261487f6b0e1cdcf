"""Task: numbered problems, and the score of a response to one of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Split = Literal["train", "heldout"]
SPLITS = ("train", "heldout")
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Problem:
    """`problem_id` is the index that the task made it from.

    `prompt` is a string, or messages of a chat, {"role", "content"} each. `extra` is what a grader may want beside it.
    """

    prompt: str | tuple[Mapping[str, str], ...]
    answer: str
    problem_id: int
    extra: Mapping[str, Any] = field(default_factory=dict)


class Task(Protocol):
    """Problems 0 .. size - 1 (`size` None: without end), each a function of its index alone."""

    @property
    def size(self) -> int | None: ...

    def problem(self, index: int) -> Problem:
        """Problem `index`. Raises IndexError outside 0 .. size - 1."""

    def score(self, problem: Problem, response: str) -> float | None:
        """Reward of `response`; None or NaN where it cannot be judged, and the rollout is dropped."""


def build_task(
    name: str,
    *,
    split: Split,
    seed: int,
    data_path: str | None = None,
    prompt_key: str | None = None,
    answer_key: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Task:
    """The task that --rl-task names: "sort-digits", "jsonl" (needs `data_path`) or "reasoning-gym:NAME".

    `prompt_key` and `answer_key` name fields of the JSONL lines; `options` go to the Reasoning Gym dataset; other tasks
    take none. Raises ValueError for a name, split, data path, key or option that does not fit.
    """
    if split not in SPLITS:
        raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
    kind, _, dataset = name.partition(":")
    if options and kind != "reasoning-gym":
        raise ValueError(f"options must be empty for --rl-task {name}, got {dict(options)}")
    given = {_data_flag(split): data_path, "--rl-prompt-key": prompt_key, "--rl-answer-key": answer_key}
    for flag, value in given.items():
        if value is not None and name != "jsonl":
            raise ValueError(f"{flag} must not be given for --rl-task {name}, got {value!r}")
    if name == "sort-digits":
        from megatron_replay.tasks.sort_digits import SortDigits

        return SortDigits(split=split, seed=seed)
    if name == "jsonl":
        from megatron_replay.tasks.jsonl import JsonlTask

        if data_path is None:
            raise ValueError(f"{_data_flag(split)} must name a JSONL file for --rl-task jsonl, got None")
        return JsonlTask(data_path, prompt_key=prompt_key, answer_key=answer_key)
    if kind == "reasoning-gym" and dataset:
        from megatron_replay.tasks.reasoning_gym import ReasoningGymTask

        return ReasoningGymTask(dataset, split=split, seed=seed, options=options)
    raise ValueError(f"--rl-task must be one of sort-digits, jsonl, reasoning-gym:NAME, got {name!r}")


def _data_flag(split: Split) -> str:
    return "--data-path" if split == "train" else "--heldout-data-path"


def permuted(index: int, size: int, key: int) -> int:
    """Image of `index` under a permutation of 0 .. size - 1 that `key` picks.

    A four-round Feistel network on the smallest even number of bits that holds `size`, walked until the image
    is below `size` (fewer than four rounds of the walk on average). It needs no memory and no generator state,
    and it is the same on every platform. Raises IndexError outside 0 .. size - 1.
    """
    check_index(index, size)
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    image = index
    while True:
        left, right = image >> half, image & mask
        for turn in range(4):
            left, right = right, left ^ (mixed(mixed(mixed(key) + turn) ^ right) & mask)
        image = left << half | right
        if image < size:
            return image


def mixed(value: int) -> int:
    """A well-mixed 64-bit function of an integer (the finaliser of SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ value >> 27) * 0x94D049BB133111EB & _MASK
    return value ^ value >> 31


def check_index(index: int, size: int | None) -> None:
    if index < 0 or (size is not None and index >= size):
        raise IndexError(f"index must be in [0, {'inf' if size is None else size}), got {index}")
