"""StepClock: what each step of a run took, read the same way in both programs."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.host_memory import host_memory


class StepClock:
    """A step lasts from the end of the one before to its own end, logging and loading of data included.

    Its `update` is what is neither generation nor reward. The first step has no beginning and no row.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.peak_bytes = 0
        self._ended: float | None = None

    def end_step(self, *, generate: float, reward: float, trained: int, informative: int, reward_mean: float) -> None:
        """generate and reward in seconds; trained: rollouts that went through the update; informative: those of them
        that were sampled in this step and whose groups have variance."""
        now = time.perf_counter()
        if self._ended is not None:
            wall = now - self._ended
            self.rows.append(
                {
                    "wall": wall,
                    "generate": generate,
                    "reward": reward,
                    "update": wall - generate - reward,
                    "trained": trained,
                    "informative": informative,
                    "reward_mean": reward_mean,
                }
            )
        self.peak_bytes = host_memory("VmHWM")
        # reading the memory is of no step
        self._ended = time.perf_counter()

    def record(self, **extra: Any) -> dict[str, Any]:
        return {"rows": self.rows, "peak_bytes": self.peak_bytes, **extra}
