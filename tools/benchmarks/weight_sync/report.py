"""Report: everything one run has found; written to JSON as each row is finished, so that a cut run keeps its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..written import Written, number
from .row import Row

TITLES = ("transport", "trainer", "engine", "MB", "messages", "s", "floor s", "ratio", "GB/s")


@dataclass
class Report(Written):
    header: dict[str, Any]  # versions, settings, commit
    path: Path | None = None
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # what cannot run here
    complete: bool = False

    @property
    def passed(self) -> bool:
        return self.complete and all(r.passed for r in self.rows)

    def data(self) -> dict[str, Any]:
        return {
            "complete": self.complete,
            "passed": self.passed,
            **self.header,
            "rows": [asdict(r) for r in self.rows],
            "skipped": self.skipped,
        }

    def table(self) -> str:
        """Aligned columns, what is wrong with a row that has no time, and where a push spends its time."""
        text = self.lines(TITLES, _cells, left=3)
        text += [f"not measured: {s['transport']}, {s['why']}" for s in self.skipped]
        for row in self.rows:
            for end, seconds in (row.phases or {}).items():
                parts = ", ".join(f"{phase} {s:.2f}" for phase, s in seconds.items())
                text.append(f"{row.transport}, engine {row.engine_layout}, seconds of the {end}: {parts}")
        return "\n".join(text)


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.transport,
        row.trainer_layout,
        row.engine_layout,
        f"{row.bytes / 1e6:.1f}",
        "-" if row.messages is None else str(row.messages),
        number(row.seconds, 3),
        number(row.floor_seconds, 3),
        number(row.ratio, 2),
        number(row.gigabytes_per_second, 2),
    )
