"""The picture of a report: bars of time and of peak memory, a row of plots for each level and number of shards."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from .report import MIB, Report
from .row import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(report: Report, path: Path) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = [(key, list(rows)) for key, rows in groupby(report.rows, key=lambda r: (r.level, r.tp))]
    bars = [len(rows) for _, rows in groups]
    figure, axes = plt.subplots(
        len(groups),
        2,
        figsize=(13, sum(0.9 + 0.32 * n for n in bars) + 0.6),
        squeeze=False,
        height_ratios=[0.9 + 0.32 * n for n in bars],
        layout="constrained",
    )
    for (left, right), (_, rows) in zip(axes, groups, strict=True):
        first = rows[0]
        hidden = "" if first.H is None else f", H {first.H}"
        shard = "" if first.tp == 1 else f", one shard of {first.tp} without communication"
        title = f"{first.level} level, {first.dtype}, V {first.V}{hidden}{shard}"
        _bars(left, rows, "ms, forward and backward", lambda r: r.ms)
        _floors(left, rows, report)
        _bars(right, rows, "peak MiB above the inputs", lambda r: None if r.peak_bytes is None else r.peak_bytes / MIB)
        right.set_yticklabels([])
        left.set_title(title, loc="left", fontsize=10)
    where = report.header.get("card") or report.header["cpu"] or report.device
    figure.suptitle(f"GRPO loss on {where}, torch {report.header['torch']}", fontsize=11)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _bars(axis: Axes, rows: list[Row], label: str, value: Callable[[Row], float | None]) -> None:
    values = [value(r) for r in rows]
    tokens = sorted({r.T for r in rows})
    known = [v for v in values if v is not None]
    log = bool(known) and min(known) > 0 and max(known) > 20 * min(known)
    axis.set_yticks(range(len(rows)), [f"{r.implementation}, T {r.T}" for r in rows], fontsize=9)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    if log:
        axis.set_xscale("log")
    for at, (row, v) in enumerate(zip(rows, values, strict=True)):
        if v is None:
            why = (row.error or "not measured").partition(":")[0]
            axis.text(0.01, at, why, transform=axis.get_yaxis_transform(), va="center", fontsize=8)
        else:
            axis.barh(at, v, height=0.7, color=f"C{tokens.index(row.T)}")
            axis.text(v, at, f" {v:,.1f}" if v >= 1 else f" {v:.2g}", va="center", fontsize=8)
    axis.set_xlabel(label + (" (log)" if log else ""), fontsize=9)
    axis.margins(x=0.18)
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)


def _floors(axis: Axes, rows: list[Row], report: Report) -> None:
    """A mark in each bar where the matrix products alone would end."""
    known = {(f["T"], f["tp"]): f["ms"] for f in report.floors}
    measured = [(r, at) for at, r in enumerate(rows) if r.level == "head" and r.ms is not None]
    marks = [(known[r.T, r.tp], at) for r, at in measured if (r.T, r.tp) in known]
    if marks:
        axis.plot(*zip(*marks, strict=True), "k|", markersize=14)
        axis.set_xlabel(axis.get_xlabel() + "; black mark: three GEMMs", fontsize=9)
