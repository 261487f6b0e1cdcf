"""ReasoningGymTask: a dataset of the reasoning-gym package, with its own grader."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from megatron_replay.tasks.task import Problem, Split, check_index

DEFAULT_SIZE = 10_000
# Item i of a dataset is drawn from Random(seed + i): splits whose seeds were closer than their size would share items.
HELDOUT_SEED_OFFSET = 1 << 30


class ReasoningGymTask:
    """Problems of `reasoning_gym.create_dataset(name, seed, size, **options)`, scored by its `score_answer`.

    Training uses `seed`, held-out problems use `seed` + 2^30. Both are drawn from the same generator with other
    random numbers: an equal problem can come up in both, the more so the smaller the dataset's space.
    `options` are fields of the dataset's configuration; `size` (default 10,000) is the number of problems.
    Raises ValueError for an unknown dataset, an option it does not have, or a size that is no positive integer.
    """

    def __init__(self, name: str, *, split: Split, seed: int, options: Mapping[str, Any] | None = None) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if name not in DATASETS:
            raise ValueError(
                f"--rl-task reasoning-gym:NAME must name one of {', '.join(sorted(DATASETS))}, got {name!r}"
            )
        settings: dict[str, Any] = {"size": DEFAULT_SIZE, **(options or {})}
        size = settings["size"]
        if not isinstance(size, int) or not 0 < size <= HELDOUT_SEED_OFFSET:
            raise ValueError(f"size must be an integer in [1, {HELDOUT_SEED_OFFSET}], got {size!r}")
        if "seed" in settings:
            raise ValueError(f"options must leave the seed to --seed, got seed {settings['seed']!r}")
        settings["seed"] = seed + (HELDOUT_SEED_OFFSET if split == "heldout" else 0)
        try:
            self._dataset = reasoning_gym.create_dataset(name, **settings)
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"options must fit the reasoning-gym dataset {name}, got {settings}: {error}") from error
        self.size: int = size
        # a group asks for one problem many times, and some items take milliseconds to make
        self._entry = lru_cache(maxsize=4096)(self._dataset.__getitem__)

    def problem(self, index: int) -> Problem:
        check_index(index, self.size)
        entry = self._entry(index)
        return Problem(prompt=entry["question"], answer=str(entry["answer"]), problem_id=index)

    def score(self, problem: Problem, response: str) -> float:
        """The dataset's own score of the stripped response, in [0, 1]; partial credit is the dataset's choice."""
        return float(self._dataset.score_answer(response.strip(), self._entry(problem.problem_id)))
