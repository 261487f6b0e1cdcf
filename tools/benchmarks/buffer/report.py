"""Report: everything one run has found; written to JSON as each row is finished, so that a cut run keeps its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..written import Written, number
from .ratio import ratios
from .row import Finding, Row

TITLES = ("implementation", "operation", "rollouts", "drawn", "tokens", "ms", "device us", "GB/s", "of copy")


@dataclass
class Report(Written):
    device: str
    header: dict[str, Any]  # versions, settings, commit
    path: Path | None = None
    findings: list[Finding] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    skipped: list[dict[str, str]] = field(default_factory=list)  # what cannot run here
    complete: bool = False

    @property
    def passed(self) -> bool:
        return self.complete and all(f.passed for f in self.findings) and all(r.error is None for r in self.rows)

    def find(self, finding: Finding) -> None:
        self.findings.append(finding)
        p_values = ", ".join(f"p {v.p_value:.2g}" for v in finding.verdicts)
        self.say(f"{finding.implementation}: draws {finding.draws}, {finding.error or p_values}")
        self.write()

    def data(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "complete": self.complete,
            "passed": self.passed,
            **self.header,
            "rows": [asdict(r) for r in self.rows],
            "ratios": [asdict(r) for r in ratios(self.rows)],
            "implementations": [asdict(f) | {"passed": f.passed} for f in self.findings],
            "skipped": self.skipped,
        }

    def table(self) -> str:
        """Aligned columns, what is wrong with a row that has no time, and the ratios."""
        text = self.lines(TITLES, _cells, left=2)
        text += [f"not measured: {s['implementation']}, {s['why']}" for s in self.skipped]
        return "\n".join([*text, *map(str, ratios(self.rows))])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.implementation,
        row.operation,
        f"{row.rollouts:,}",
        f"{row.drawn:,}",
        str(row.tokens_per_rollout),
        number(row.ms, 3),
        number(None if row.device_ms is None else 1e3 * row.device_ms, 1),
        number(row.gb_per_s, 0),
        number(row.fraction_of_copy, 3),
    )
