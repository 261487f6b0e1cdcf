"""Report: everything one run has found; written to JSON as each row is finished, so that a cut run keeps its rows."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..command_line import aligned
from ..json_file import write_json
from .ratio import ratios
from .row import Finding, Row

TITLES = ("implementation", "operation", "rollouts", "drawn", "tokens", "ms", "device us", "GB/s", "of copy")


@dataclass
class Report:
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

    def say(self, text: str) -> None:
        print(text, flush=True)

    def find(self, finding: Finding) -> None:
        self.findings.append(finding)
        p_values = ", ".join(f"p {v.p_value:.2g}" for v in finding.verdicts)
        self.say(f"{finding.implementation}: draws {finding.draws}, {finding.error or p_values}")
        self.write()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.say(str(row))
        self.write()

    def finish(self) -> None:
        self.complete = True
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

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, self.data())

    def table(self) -> str:
        """Aligned columns, what is wrong with a row that has no time, and the ratios."""
        lines = aligned([TITLES, *map(_cells, self.rows)], left=2)
        errors = ["", *("" if r.error is None else f"  {r.error}" for r in self.rows)]
        text = [line + error for line, error in zip(lines, errors, strict=True)]
        text += [f"not measured: {s['implementation']}, {s['why']}" for s in self.skipped]
        return "\n".join([*text, *map(str, ratios(self.rows))])


def _cells(row: Row) -> tuple[str, ...]:
    def number(x: float | None, digits: int) -> str:
        return "-" if x is None else f"{x:.{digits}f}"

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
