"""Row: what is known of one operation of one implementation at one size; Finding: of an implementation's draws."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from .distribution import Verdict
from .implementation import Implementation, Operation
from .stock import BufferSize


@dataclass
class Finding:
    """An implementation, and whether it draws and returns what it claims."""

    implementation: str
    draws: str
    returns: str
    operations: tuple[Operation, ...]
    version: str | None
    note: str | None
    verdicts: list[Verdict] = field(default_factory=list)
    rows_equal: bool | None = None  # None where it returns no rows
    error: str | None = None

    @classmethod
    def of(cls, i: Implementation, version: str | None) -> Finding:
        return cls(i.name, i.draws, i.returns, i.operations, version, i.note)

    @property
    def passed(self) -> bool:
        return self.error is None and bool(self.verdicts) and all(v.passed for v in self.verdicts)


@dataclass
class Row:
    """ms is the time of a call as the caller sees it, None where the implementation failed.

    ms_each has one entry for each repeat: the median of its calls. device_ms is the time of the device's work alone,
    on CUDA; device_clock says how it was taken.
    """

    implementation: str
    operation: Operation
    rollouts: int
    drawn: int
    tokens_per_rollout: int
    pushed: int
    ms: float | None = None
    ms_each: list[float] = field(default_factory=list)
    device_ms: float | None = None
    device_ms_each: list[float] = field(default_factory=list)
    device_clock: str | None = None
    moved_bytes: int | None = None  # read and written by a gather
    gb_per_s: float | None = None
    fraction_of_copy: float | None = None  # of a device copy of as many bytes
    fraction_of_large_copy: float | None = None
    error: str | None = None

    @classmethod
    def of(cls, implementation: Implementation, operation: Operation, size: BufferSize) -> Row:
        return cls(implementation.name, operation, size.rollouts, size.drawn, size.tokens_per_rollout, size.pushed)

    def timed(self, ms_each: list[float]) -> None:
        self.ms, self.ms_each = median(ms_each), ms_each

    def __str__(self) -> str:
        where = f"{self.implementation}, {self.operation}, {self.rollouts:,} rollouts of {self.tokens_per_rollout}"
        if self.ms is None:
            return f"{where}: {self.error}"
        device = "" if self.device_ms is None else f", {1e3 * self.device_ms:.1f} us of device time"
        return f"{where}: {self.ms:.3f} ms{device}"


def reason(error: Exception) -> str:
    """One line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
