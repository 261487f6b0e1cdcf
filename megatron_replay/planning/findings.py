"""Findings: what a dry run has found, as lines for people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Findings:
    problems: list[str] = field(default_factory=list)  # each names a flag and its value
    checked: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # with the reason
    plan: list[str] = field(default_factory=list)  # lines of the table

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def lines(self) -> list[str]:
        """The plan, what was checked, what was not, and what must change."""
        return [
            *self.plan,
            *(f"checked: {line}" for line in self.checked),
            *(f"not checked: {line}" for line in self.skipped),
            *(f"problem: {line}" for line in self.problems),
            f"problems: {len(self.problems)}",
        ]

    def refuse(self, problem: str) -> None:
        """Keep a problem, once: two checks may find the same."""
        if problem not in self.problems:
            self.problems.append(problem)

    def attempt(self, act: Callable[[], T]) -> T | None:
        """act(), or None where it raises ValueError, whose words are kept as a problem."""
        try:
            return act()
        except ValueError as error:
            self.refuse(str(error))
            return None
