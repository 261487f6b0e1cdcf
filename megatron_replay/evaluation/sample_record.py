"""SampleRecord: what is kept of one response to one problem of a benchmark."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

# a bool is no number here
KINDS: dict[str, tuple[type, ...]] = {
    "problem": (int,),
    "sample": (int,),
    "reward": (float, int, type(None)),
    "tokens": (int,),
    "truncated": (bool,),
    "text": (str, type(None)),
}


@dataclass(frozen=True)
class SampleRecord:
    """`problem` is the problem's number in its task, `sample` counts from 0 within it; `tokens` has the final EOS.

    `reward` None: nobody could judge it. `truncated`: it did not end within the longest response.
    """

    problem: int
    sample: int
    reward: float | None
    tokens: int
    truncated: bool
    text: str | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite or None, got {self.reward}")

    def to_line(self, benchmark: str) -> str:
        """One line of JSON, the same for the same record; `text` only where there is one."""
        row: dict[str, Any] = {
            "benchmark": benchmark,
            "problem": self.problem,
            "sample": self.sample,
            "reward": self.reward,
            "tokens": self.tokens,
            "truncated": self.truncated,
        }
        if self.text is not None:
            row["text"] = self.text
        return json.dumps(row) + "\n"

    @classmethod
    def from_line(cls, line: str | bytes) -> tuple[str, SampleRecord]:
        """The benchmark's name and the record. Raises ValueError for a line that is none."""
        try:
            row = json.loads(line)
            name = row.pop("benchmark")
            record = cls(**row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no record of a sample ({type(error).__name__}: {error}): {line[:80]!r}") from error
        for field, kinds in KINDS.items():
            if type(getattr(record, field)) not in kinds:
                raise ValueError(f"no record of a sample, {field} is {getattr(record, field)!r}: {line[:80]!r}")
        return str(name), record
