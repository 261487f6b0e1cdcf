"""Reasoning Gym in a process of its own: problems by dataset, settings and index, and the score of a response.

`megatron_replay.tasks.reasoning_gym` and grader processes load this file by its path, without the package, so nothing
of the package is imported here. Some datasets walk over sets, and some draw from generators that they share with
everybody. The process has a fixed hash seed, and those generators are set anew for each problem: a problem is a
function of its settings and its index alone.

Some datasets evaluate a response as Python. It runs with all that this process may do.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy
import reasoning_gym
from reasoning_gym.factory import DATASETS

SEEDS = 1 << 32  # numpy takes none above


class Unscorable(Exception):
    """A response that breaks the dataset's own score: a wrong answer, and counted as an error too."""

    reward = 0.0


def problem(*, dataset: str, settings: Mapping[str, Any], index: int | None) -> dict[str, Any]:
    """{"question", "answer"} of problem `index`; {"version"} where that is None; {"refused": why} of what cannot be."""
    if dataset not in DATASETS:
        named = f"one of {', '.join(sorted(DATASETS))}, got {dataset!r}"
        return {"refused": f"--rl-task reasoning-gym:NAME must name {named}"}
    try:
        _dataset(dataset, json.dumps(settings))
    except (TypeError, AssertionError, ValueError) as error:
        words = f"must fit the reasoning-gym dataset {dataset}, got {settings}: {error}"
        return {"refused": f"options {words}"}
    if index is None:
        return {"version": version("reasoning-gym")}
    entry = _entry(dataset, json.dumps(settings), index)
    return {"question": entry["question"], "answer": str(entry["answer"])}


def grade(*, prompt: Any, response: str, answer: str, extra: Mapping[str, Any]) -> float:
    """The dataset's own score of the stripped response; partial credit is the dataset's choice.

    `extra` has the three arguments of `problem`. Raises Unscorable, RuntimeError for a problem that is not `prompt`.
    """
    dataset, settings, index = extra["dataset"], json.dumps(extra["settings"]), extra["index"]
    entry = _entry(dataset, settings, index)
    if (entry["question"], str(entry["answer"])) != (prompt, answer):
        raise RuntimeError(f"problem {index} of reasoning-gym:{dataset} is another one here")
    try:
        score = float(_dataset(dataset, settings).score_answer(response.strip(), entry))
    # also what is no error, such as the exit that a response asks for
    except BaseException as error:
        raise Unscorable(f"{type(error).__name__}: {error}") from error
    if not math.isfinite(score):
        raise Unscorable(f"a score of {score}")
    return score


@lru_cache(maxsize=128)
def _dataset(name: str, settings: str) -> Any:
    return reasoning_gym.create_dataset(name, **json.loads(settings))


# a group asks for one problem many times, and some items take seconds to make
@lru_cache(maxsize=4096)
def _entry(dataset: str, settings: str, index: int) -> dict[str, Any]:
    seed = json.loads(settings)["seed"] + index
    random.seed(seed)
    numpy.random.seed(seed % SEEDS)
    entry: dict[str, Any] = _dataset(dataset, settings)[index]
    return entry
