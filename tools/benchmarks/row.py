"""Row: what is known of one implementation on one problem, as the JSON, the table and the picture show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from .agreement import Agreement
from .implementations import Implementation
from .problem import Problem, Size, name_of

OUT_OF_MEMORY = "out of memory"


@dataclass
class Row:
    """ms and peak_bytes are None where the implementation failed or does not agree with the truth.

    equal_to_reference is None where it ran out of memory and so computed nothing to compare.
    """

    implementation: str
    level: str
    T: int
    V: int
    H: int | None
    dtype: str
    tp: int
    foreign: bool = False  # another project's
    note: str | None = None
    ms: float | None = None  # median
    ms_each: list[float] = field(default_factory=list)
    peak_bytes: int | None = None  # above the inputs, gradients included
    gradient_bytes: int | None = None
    equal_to_reference: bool | None = None
    errors: dict[str, Any] = field(default_factory=dict)  # `agreement.Error` by name
    error: str | None = None
    gb_per_s: float | None = None
    fraction_of_copy: float | None = None
    fraction_of_gemms: float | None = None

    @classmethod
    def of(cls, implementation: Implementation, size: Size) -> Row:
        note = None if size.tp == 1 else f"simulated shard: V/{size.tp} columns, no communication"
        H = size.H if implementation.level == "head" else None
        return cls(
            implementation.name,
            implementation.level,
            size.T,
            size.V,
            H,
            name_of(size.dtype),
            size.tp,
            foreign=implementation.needs is not None,
            note=note,
        )

    @property
    def passed(self) -> bool:
        """Another project's row may fail: it is reported, and no fault of this one."""
        return self.foreign or self.equal_to_reference is True or (self.error or "").startswith(OUT_OF_MEMORY)

    def judged(self, agreement: Agreement) -> None:
        self.equal_to_reference = agreement.agrees
        self.errors = {name: asdict(e) for name, e in agreement.errors.items()}
        if not agreement.agrees:
            self.error = f"not equal: {agreement.complaint}"

    def failed(self, why: str) -> None:
        if not why.startswith(OUT_OF_MEMORY):
            self.equal_to_reference = False
        self.error = " ".join(why.split())[:300]

    def timed(self, ms_each: list[float], peak_bytes: int) -> None:
        self.ms, self.ms_each, self.peak_bytes = median(ms_each), ms_each, peak_bytes

    def __str__(self) -> str:
        hidden = "" if self.H is None else f" H={self.H}"
        where = f"{self.implementation}, T={self.T} V={self.V}{hidden} {self.dtype} tp={self.tp}"
        if self.ms is None or self.peak_bytes is None:
            return f"{where}: {self.error}"
        return f"{where}: {self.ms:.3f} ms, peak {self.peak_bytes / 2**20:.1f} MiB"


def counted_bytes(problem: Problem) -> float:
    """HBM bytes that a loss on logits must move: read them twice and write dlogits.

    The second read is needed for active tokens alone, since dlogits of a clipped token are 0.
    """
    (logits,) = problem.operands
    return logits.numel() * logits.element_size() * (2 + problem.active_fraction)


def gradient_bytes(gradients: tuple[Tensor, ...]) -> int:
    return sum(x.numel() * x.element_size() for x in gradients)
