"""GraderPool: processes that judge responses, each item within a limit of wall-clock time and memory."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_replay.tasks.worker_process import WorkerDied, WorkerProcess

# --rl-reward -> what the processes load
OWN_GRADERS = {
    "exact": f"{Path(__file__).with_name('reasoning_gym_worker.py')}:grade",
    "math-verify": f"{Path(__file__).with_name('math_grader.py')}:grade",
}
# compiles the patterns and builds the parser's tables before the clock of the first item runs; its value is 1
MATH_WARM_UP = {"prompt": "", "response": r"\boxed{\frac{2}{4}}", "answer": "0.5", "extra": {}}
# importing a grader may take long on a file system that many nodes share
STARTUP_LIMIT = 120.0  # seconds
Item = Mapping[str, Any]  # prompt, response, answer, extra


@dataclass(frozen=True)
class GraderOptions:
    """How responses are judged.

    `reward` is "exact" (the task's own score, which takes a process for Reasoning Gym alone), "math-verify", or the
    MODULE:FUNCTION or FILE.py:FUNCTION that processes call. A process may take `memory_mib` MiB of address space, an
    item `timeout` seconds of wall-clock time.
    """

    reward: str = "exact"
    workers: int = 4
    timeout: float = 10.0
    memory_mib: int = 4096

    def __post_init__(self) -> None:
        place, _, attribute = self.reward.rpartition(":")
        if self.reward not in OWN_GRADERS and not (place and attribute):
            raise ValueError(f"reward must be exact, math-verify or MODULE:FUNCTION, got {self.reward!r}")
        if self.workers < 1:
            raise ValueError(f"workers must be at least 1, got {self.workers}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {self.timeout}")
        if self.memory_mib < 128:
            raise ValueError(f"memory_mib must be at least 128, got {self.memory_mib}")

    @property
    def function(self) -> str:
        """What the processes load."""
        return OWN_GRADERS.get(self.reward, self.reward)

    @property
    def late_reward(self) -> float | None:
        """Of an item past the limit. What holds up a grader of ours is the response: it must not be worth its while."""
        return 0.0 if self.reward in OWN_GRADERS else None


@dataclass(frozen=True)
class Grade:
    """What came of one item. `value` is None where there is no grade; `failure` says what went wrong."""

    value: float | None
    failure: Literal["", "timeout", "error", "bad"] = ""
    words: str = ""
    restarted: bool = False


class GraderPool:
    """`options.workers` processes that call `options.function` on items; they start here, with the variables `env`.

    Each process belongs to a thread of its own. A process that is late, or that dies, is killed with all of its
    session and replaced; its item gets a Grade with a failure. The processes end with `close`, or with this process
    in whatever way (kill -9 included).
    Raises ValueError where the function cannot be loaded or called, RuntimeError where a process does not start.
    """

    def __init__(self, options: GraderOptions, env: Mapping[str, str]) -> None:
        self.options = options
        self._env = env
        self._jobs: queue.SimpleQueue[tuple[Item, Future[Grade]] | None] = queue.SimpleQueue()
        self._closed = False
        started: list[Future[None]] = [Future() for _ in range(options.workers)]
        self._threads = [
            threading.Thread(target=self._serve, args=(future,), name=f"grader-{i}", daemon=True)
            for i, future in enumerate(started)
        ]
        for thread in self._threads:
            thread.start()
        try:
            for future in started:
                future.result()
        except BaseException:
            self.close()
            raise

    def grade(self, items: Sequence[Item]) -> list[Grade]:
        """One Grade for each item, in order; any thread may call it.

        Raises RuntimeError after `close`, and where a process that must be replaced does not start.
        """
        if self._closed:
            raise RuntimeError("the grader pool is closed")
        futures: list[Future[Grade]] = [Future() for _ in items]
        for job in zip(items, futures, strict=True):
            self._jobs.put(job)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the processes once their items are judged. Twice is once."""
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> GraderPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _serve(self, started: Future[None]) -> None:
        try:
            process: _Grader | None = self._start()
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        while (job := self._jobs.get()) is not None:
            item, future = job
            try:
                process = process or self._start()
                grade = process.grade(item, time.monotonic() + self.options.timeout)
            except BaseException as error:
                future.set_exception(error)
                continue
            future.set_result(grade)
            if grade.restarted:
                process = None
                # where this fails, the next item tries again and says why
                with suppress(ValueError, RuntimeError, OSError):
                    process = self._start()
        if process is not None:
            process.kill()

    def _start(self) -> _Grader:
        return _Grader(self.options, self._env)


class _Grader:
    def __init__(self, options: GraderOptions, env: Mapping[str, str]) -> None:
        self._options = options
        deadline = time.monotonic() + STARTUP_LIMIT
        try:
            self._process = WorkerProcess(
                options.function, env, returns="reward", deadline=deadline, memory_bytes=options.memory_mib << 20
            )
        except ValueError as error:
            raise ValueError(f"{self._name} cannot be used: {error}") from None
        except TimeoutError:
            raise RuntimeError(f"{self._name}: a grader did not start within {STARTUP_LIMIT:g} s") from None
        except WorkerDied as error:
            raise RuntimeError(
                f"{self._name}: a grader died at its start, {error} (--rl-grader-memory-mib {options.memory_mib})"
            ) from None
        if options.reward == "math-verify":
            grade = self.grade(MATH_WARM_UP, deadline)
            if grade.value != 1:
                self.kill()
                raise RuntimeError(
                    f"{self._name} does not work here: {grade.words or f'a right answer got {grade.value}'}"
                )

    @property
    def _name(self) -> str:
        return f"--rl-reward {self._options.reward}"

    def grade(self, item: Item, deadline: float) -> Grade:
        """The process is dead afterwards where the Grade says `restarted`."""
        try:
            said = self._process.call(item, deadline)
        except TimeoutError:
            words = f"no grade within {self._options.timeout:g} s"
            return Grade(self._options.late_reward, "timeout", words, restarted=True)
        except WorkerDied as error:
            return Grade(None, "error", f"the grader died, {error}", restarted=True)
        if "error" in said:
            return Grade(said["value"], "error", said["error"])
        if "bad" in said:
            return Grade(None, "bad", said["bad"])
        return Grade(said["value"])

    def kill(self) -> None:
        self._process.kill()
