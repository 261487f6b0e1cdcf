"""The table and the picture of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def table(evaluation: Mapping[str, Any]) -> str:
    """Markdown, a row for each benchmark; intervals are those of 95 %. `-` stands for what there is not."""
    rows, aes = evaluation["benchmarks"], evaluation["aes"]
    head = ["benchmark", "problems", "avg@k", "95 %", "pass@k", "95 %", "tokens", "correct", "incorrect"]
    head += ["truncated", "unjudged"]
    if aes is not None:
        head += ["accuracy, difference", "95 %", "AES"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for name, r in rows.items():
        k = str(r["samples"])
        cells = [name, str(r["problems"])]
        cells += [f"{_number(r['avg_at_k'], 3)} (k = {k})", _ends(r["ci95"]["avg_at_k"], 3)]
        cells += [_number(r["pass_at_k"][k], 3), _ends(r["ci95"]["pass_at_k"][k], 3)]
        cells += [_number(r[x], 1) for x in ("length_mean", "length_correct", "length_incorrect")]
        cells += [_number(r["truncated_fraction"], 3), str(r["unjudged"])]
        if aes is not None:
            c = aes["benchmarks"][name]
            cells += [_number(c["accuracy_difference"], 3), _ends(c["accuracy_difference_ci95"], 3)]
            cells += [_number(c["score"], 3)]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def draw(evaluation: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: pass@k against k, a line for each benchmark, its interval as a band."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for at, (name, r) in enumerate(evaluation["benchmarks"].items()):
        ks = [k for k, value in r["pass_at_k"].items() if value is not None]
        at_k, ends = [int(k) for k in ks], [r["ci95"]["pass_at_k"][k] for k in ks]
        label = f"{name}, {r['problems']} problems"
        axis.plot(at_k, [r["pass_at_k"][k] for k in ks], marker="o", markersize=4, color=f"C{at}", label=label)
        axis.fill_between(at_k, [low for low, _ in ends], [high for _, high in ends], alpha=0.2, color=f"C{at}")
    axis.set_xscale("log", base=2)
    ticks = sorted({int(k) for r in evaluation["benchmarks"].values() for k in r["pass_at_k"]})
    axis.set_xticks(ticks, [str(k) for k in ticks])
    axis.minorticks_off()
    axis.set_xlabel("k")
    axis.set_ylabel("pass@k, unbiased; band: 95 % over problems")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110, format="png")
    plt.close(figure)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _ends(ends: list[float] | None, digits: int) -> str:
    return "-" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"
