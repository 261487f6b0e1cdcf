"""What the tools' command lines and printed tables have in common."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the whole usage."""
        self.exit(2, f"{self.prog}: {message}\n")


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """One line for each row; the first `left` columns begin together, the others end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(x.ljust(w) if i < left else x.rjust(w) for i, (x, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
