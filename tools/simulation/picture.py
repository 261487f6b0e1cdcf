"""The picture of a run: bytes that a rank receives and modelled time, against ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .table import KIB

STYLES = ("-", "--", ":", "-.")


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG: a row of plots for each (rollouts, drawn), a colour for each form, a line style for each layout."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    # one rank sends nothing, and a logarithmic axis has no zero
    rows = [r for r in rows if r["ranks"] > 1]
    sizes = list(dict.fromkeys((r["rollouts"], r["drawn"]) for r in rows))
    names = list(dict.fromkeys(r["form"] for r in rows))
    layouts = list(dict.fromkeys(r["shards"] for r in rows))
    figure, axes = plt.subplots(
        len(sizes), 2, figsize=(14, 0.6 + 4.2 * len(sizes)), squeeze=False, layout="constrained"
    )
    for plots, (rollouts, drawn) in zip(axes, sizes, strict=True):
        for name in names:
            for layout in layouts:
                label = {"rollouts": rollouts, "drawn": drawn, "form": name, "shards": layout}
                line = sorted((r for r in rows if label.items() <= r.items()), key=lambda r: r["ranks"])
                at = names.index(name)
                # forms that cost the same lie on one another, the later ones thinner
                style = {"color": f"C{at}", "linestyle": STYLES[layouts.index(layout)], "linewidth": 4 - 0.9 * at}
                ranks, text = [r["ranks"] for r in line], f"{name}, {layout}"
                plots[0].plot(ranks, [r["ring_received_bytes"] / KIB for r in line], label=text, marker=".", **style)
                plots[1].plot(ranks, [r["doubling_ms"] for r in line], label=text, marker=".", **style)
        plots[0].set_title(f"{drawn:,} drawn of {rollouts:,} stored", loc="left", fontsize=10)
        plots[0].set_ylabel("KiB received by a rank, counted")
        plots[1].set_ylabel("ms of the network, a model, recursive doubling")
        for axis in plots:
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_xlabel("data-parallel ranks")
            axis.grid(alpha=0.3)
    lines = axes[0, 0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)
