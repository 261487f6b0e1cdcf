"""ReasoningGymTask: a dataset of the reasoning-gym package, made and scored in processes of their own."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from megatron_replay.tasks.task import Problem, Split, check_index
from megatron_replay.tasks.worker_process import WorkerDied, WorkerProcess

WORKER = Path(__file__).with_name("reasoning_gym_worker.py")
DEFAULT_SIZE = 10_000
# Item i of a dataset is drawn from Random(seed + i): splits whose seeds were closer than their size would share items.
HELDOUT_SEED_OFFSET = 1 << 30
# seconds that the process may take to start, on a file system that many nodes share, and to make one problem
LIMIT = 120.0
DIGESTED = 3  # problems; some take a second


class ReasoningGymTask:
    """Problems of `reasoning_gym.create_dataset(name, seed, size, **options)`. Graders score them, by `extra`.

    Training uses `seed`, held-out problems use `seed` + 2^30. Both are drawn from the same generator with other
    random numbers: an equal problem can come up in both, the more so the smaller the dataset's space.
    `options` are fields of the dataset's configuration, as JSON has them; `size` (default 10,000) is the number of
    problems. Every process of every run sees the same problems, whatever its hash seed.
    Raises ValueError for an unknown dataset, an option it does not have, or a size that is no positive integer.
    """

    def __init__(self, name: str, *, split: Split, seed: int, options: Mapping[str, Any] | None = None) -> None:
        settings: dict[str, Any] = {"size": DEFAULT_SIZE, **(options or {})}
        size = settings["size"]
        if not isinstance(size, int) or not 0 < size <= HELDOUT_SEED_OFFSET:
            raise ValueError(f"size must be an integer in [1, {HELDOUT_SEED_OFFSET}], got {size!r}")
        try:
            json.dumps(options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"options must be what JSON holds, got {settings}: {error}") from error
        if "seed" in settings:
            raise ValueError(f"options must leave the seed to --seed, got seed {settings['seed']!r}")
        settings["seed"] = seed + (HELDOUT_SEED_OFFSET if split == "heldout" else 0)
        self.size: int = size
        self._of = {"dataset": name, "settings": settings}
        self._version: str = _maker.make(self._of | {"index": None})["version"]
        self._problem = lru_cache(maxsize=4096)(self._made)

    def problem(self, index: int) -> Problem:
        check_index(index, self.size)
        return self._problem(index)

    def score(self, problem: Problem, response: str) -> float:
        """Some datasets evaluate a response as Python, which must not happen here."""
        raise TypeError(f"problem {problem.problem_id} of reasoning-gym:{self._of['dataset']} is scored by graders")

    @cached_property
    def identity(self) -> str:
        """The package's version and a digest of the first problems."""
        first = [self.problem(i) for i in range(min(DIGESTED, self.size))]
        digest = hashlib.sha256(json.dumps([(p.prompt, p.answer) for p in first]).encode()).hexdigest()
        return f"reasoning-gym {self._version}, {digest}"

    def _made(self, index: int) -> Problem:
        item = self._of | {"index": index}
        made = _maker.make(item)
        return Problem(prompt=made["question"], answer=made["answer"], problem_id=index, extra=item)


class _Maker:
    """One process for all tasks of this one. It keeps nothing: where it has ended, the next call starts another."""

    def __init__(self) -> None:
        self._process: WorkerProcess | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def make(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError for what is refused, RuntimeError where the process does not do its work."""
        name, index = f"--rl-task reasoning-gym:{item['dataset']}", item["index"]
        what = "its data set" if index is None else f"problem {index}"
        try:
            with self._lock:
                said = self._call(item)
        except ValueError as error:
            raise ValueError(f"{name} cannot be used: {error}") from None
        except TimeoutError:
            raise RuntimeError(f"{name}: {what} was not made within {LIMIT:g} s") from None
        except WorkerDied as error:
            raise RuntimeError(f"{name}: the process that makes {what} died, {error}") from None
        if "error" in said:
            raise RuntimeError(f"{name}: {what} cannot be made: {said['error']}")
        made: dict[str, Any] = said["value"]
        if "refused" in made:
            raise ValueError(made["refused"])
        return made

    def _call(self, item: Mapping[str, Any]) -> dict[str, Any]:
        # a process that was forked from ours must not share it
        if self._process is not None and self._owner == os.getpid():
            try:
                return self._process.call(item, time.monotonic() + LIMIT)
            except TimeoutError:
                self._process = None
                raise
            except WorkerDied:
                # it ends with the thread that started it
                pass
        self._process = None
        process = WorkerProcess(f"{WORKER}:problem", os.environ, returns="value", deadline=time.monotonic() + LIMIT)
        answer = process.call(item, time.monotonic() + LIMIT)
        self._process, self._owner = process, os.getpid()
        return answer


_maker = _Maker()
