"""Report: everything one run has found; written to JSON as each row is finished, so that a cut run keeps its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .row import Row
from .written import Written, number

MIB = 2**20
TITLES = ("implementation", "T", "V", "H", "dtype", "tp", "ms", "peak MiB", "GB/s", "of copy", "of GEMMs", "equal")


@dataclass
class Report(Written):
    device: str
    header: dict[str, Any]  # versions, settings, commit
    path: Path | None = None
    rows: list[Row] = field(default_factory=list)
    floors: list[dict[str, Any]] = field(default_factory=list)  # what no implementation can be faster than
    skipped: list[dict[str, str]] = field(default_factory=list)  # what is not installed here
    tuning: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False

    @property
    def passed(self) -> bool:
        return self.complete and all(r.passed for r in self.rows)

    def data(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "complete": self.complete,
            **self.header,
            "rows": [asdict(r) for r in self.rows],
            "floors": self.floors,
            "skipped": self.skipped,
            "tuning": self.tuning,
        }

    def table(self) -> str:
        """Aligned columns; where a row has no time, what is wrong with it."""
        text = self.lines(TITLES, _cells, left=1)
        text += [f"floor: {f['name']}, T={f['T']} tp={f['tp']}: {f['ms']:.3f} ms" for f in self.floors]
        return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    peak = None if row.peak_bytes is None else row.peak_bytes / MIB
    return (
        row.implementation,
        str(row.T),
        str(row.V),
        "-" if row.H is None else str(row.H),
        row.dtype,
        str(row.tp),
        number(row.ms, 3),
        number(peak, 1),
        number(row.gb_per_s, 0),
        number(row.fraction_of_copy, 3),
        number(row.fraction_of_gemms, 3),
        {True: "yes", False: "NO", None: "-"}[row.equal_to_reference],
    )
