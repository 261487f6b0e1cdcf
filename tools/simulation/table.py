"""The rows of a run as aligned text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

KIB = 2**10
MIB = 2**20
Row = dict[str, Any]
Columns = dict[str, Callable[[Row], str]]

SETTING: Columns = {name: lambda r, name=name: str(r[name]) for name in ("ranks", "rollouts", "drawn", "shards")}


def _rounds(row: Row) -> str:
    """The number of rounds, or each with the number of draws that took it."""
    if len(row["rounds"]) == 1:
        return next(iter(row["rounds"]))
    return ", ".join(f"{k} ({v}x)" for k, v in row["rounds"].items())


EXCHANGE: Columns = SETTING | {
    "form": lambda r: r["form"],
    "rounds": _rounds,
    "candidates": lambda r: f"{r['candidates']:,.0f}",
    "sent KiB": lambda r: f"{r['ring_sent_bytes'] / KIB:,.1f}",
    "received KiB": lambda r: f"{r['ring_received_bytes'] / KIB:,.1f}",
    "ring ms": lambda r: f"{r['ring_ms']:,.3f}",
    "tree ms": lambda r: f"{r['tree_ms']:,.3f}",
    "doubling ms": lambda r: f"{r['doubling_ms']:,.3f}",
    "select ms": lambda r: f"{r['select_ms']:,.2f}",
    "k": lambda r: str(r.get("k", "-")),
    "P(fallback) <": lambda r: f"{r['fallback_probability']:.1g}" if "k" in r else "-",
}
BALANCE: Columns = SETTING | {
    "rule": lambda r: r["rule"],
    "max / mean": lambda r: f"{r['max_over_mean']:.3f}",
    "bound": lambda r: f"{r['bound']:.3f}",
    "moved": lambda r: f"{r['moved_rollouts']:,.0f}",
    "of": lambda r: f"{r['winners']:,.0f}",
    "moved MiB": lambda r: f"{r['moved_bytes'] / MIB:,.1f}",
    "sent MiB": lambda r: f"{r['sent_bytes'] / MIB:,.2f}",
    "received MiB": lambda r: f"{r['received_bytes'] / MIB:,.2f}",
}


def table(rows: Sequence[Row], columns: Columns) -> str:
    """Text to the left, numbers to the right."""
    cells = [tuple(columns)] + [tuple(value(r) for value in columns.values()) for r in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = ["<" if name in ("shards", "form", "rule", "rounds") else ">" for name in columns]
    return "\n".join(
        "  ".join(f"{x:{s}{w}}" for x, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in cells
    )
