"""Written: a report that is written to JSON as each row is finished, so that a cut run keeps its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .command_line import aligned
from .json_file import write_json


class Written:
    """What the reports of all benchmarks do with rows. A row says itself; its `error` is None where it is good."""

    path: Path | None
    rows: list[Any]
    complete: bool

    def data(self) -> dict[str, Any]:
        """What is written."""
        raise NotImplementedError

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, row: Any) -> None:
        self.rows.append(row)
        self.say(str(row))
        self.write()

    def finish(self) -> None:
        self.complete = True
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, self.data())

    def lines(self, titles: Sequence[str], cells: Callable[[Any], tuple[str, ...]], left: int) -> list[str]:
        """Aligned columns, the first `left` to the left; behind a row what is wrong with it."""
        errors = ["", *("" if r.error is None else f"  {r.error}" for r in self.rows)]
        text = aligned([titles, *map(cells, self.rows)], left=left)
        return [line + error for line, error in zip(text, errors, strict=True)]


def number(x: float | None, digits: int) -> str:
    return "-" if x is None else f"{x:.{digits}f}"
