"""Row: what is known of the pushes of one transport between two layouts, and of the plain transfer beside them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median


@dataclass
class Row:
    """seconds and floor_seconds are medians, None where the push failed or the engine samples otherwise than it should.

    A floor is the plain transfer of the same bytes to as many receivers in the same run, its turns between the pushes.
    """

    transport: str
    trainer_layout: str
    engine_layout: str
    bytes: int
    floor: str  # what the plain transfer is
    dtype: str = "bfloat16"
    messages: int | None = None  # buckets of a push
    seconds: float | None = None  # from pause to resume
    seconds_each: list[float] = field(default_factory=list)
    first_seconds: float | None = None  # of the first push of the connection, which the median leaves out
    floor_seconds: float | None = None
    floor_seconds_each: list[float] = field(default_factory=list)
    ratio: float | None = None  # seconds over floor_seconds
    gigabytes_per_second: float | None = None  # of the weights, once, however many workers took them
    phases: dict[str, dict[str, float]] | None = None  # seconds of one more push by end and phase, see phases.py
    foreign: bool = False  # what exists without this project
    note: str | None = None
    error: str | None = None

    @property
    def passed(self) -> bool:
        return self.foreign or self.error is None

    def timed(self, first: float, seconds: list[float], floor: list[float]) -> None:
        self.first_seconds, self.seconds_each, self.floor_seconds_each = first, seconds, floor
        self.seconds, self.floor_seconds = median(seconds), median(floor)
        self.ratio = self.seconds / self.floor_seconds
        self.gigabytes_per_second = self.bytes / self.seconds / 1e9

    def failed(self, why: str) -> None:
        self.error = " ".join(why.split())[:300]

    def __str__(self) -> str:
        where = f"{self.transport}, trainer {self.trainer_layout}, engine {self.engine_layout}"
        if self.seconds is None or self.floor_seconds is None:
            return f"{where}: {self.error}"
        return f"{where}: {self.seconds:.3f} s, floor {self.floor_seconds:.3f} s, ratio {self.ratio:.2f}"
