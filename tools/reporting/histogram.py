"""Histogram: what was drawn against what was stored, as shares of the rollouts in each bin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .axis import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, x_name, y_grid
from .element import Markup, element, number
from .run_folder import Run, value

PARTS = ("stored", "drawn")


@dataclass(frozen=True)
class Tally:
    """Counts of both parts over the same bins, added up over steps. The last bin has no upper edge."""

    edges: tuple[float, ...]
    counts: dict[str, list[float]]

    def share(self, part: str, i: int) -> float:
        return self.counts[part][i] / (sum(self.counts[part]) or 1.0)

    def bins(self) -> int:
        """Up to the last bin in which something is."""
        used = [i for i in range(len(self.edges)) if any(self.counts[p][i] for p in PARTS)]
        return used[-1] + 1 if used else 0

    def label(self, i: int) -> str:
        if i + 1 == len(self.edges):
            return f"{number(self.edges[i])}+"
        low, high = self.edges[i], self.edges[i + 1]
        whole = all(float(e).is_integer() for e in self.edges)
        if whole:
            return number(low) if high - low == 1 else f"{number(low)}-{number(high - 1)}"
        return number(low)


def tally(run: Run, field: str) -> Tally | None:
    """Of the steps that drew something; None where none did. Rows with other bins than the first are left out."""
    drawn = [r for r in run.draws if well_formed(r, field) and sum(r["drawn"][field]) > 0]
    if not drawn:
        return None
    edges = tuple(drawn[0][f"{field}_edges"])
    same = [r for r in drawn if tuple(r[f"{field}_edges"]) == edges]
    if len(same) < len(drawn):
        run.notes.append(f"draws.jsonl: {len(drawn) - len(same)} rows have other bins of {field}; they are left out")
    return Tally(edges, {p: [sum(column) for column in zip(*(r[p][field] for r in same), strict=True)] for p in PARTS})


def well_formed(row: dict[str, Any], field: str) -> bool:
    edges = row.get(f"{field}_edges")
    if not numbers(edges) or not edges:
        return False
    counted = [row[p].get(field) if isinstance(row.get(p), dict) else None for p in PARTS]
    return all(numbers(c) and len(c) == len(edges) for c in counted)


def numbers(values: Any) -> bool:
    return isinstance(values, list) and all(value({"x": v}, "x") is not None for v in values)


def histogram(title: str, found: Tally, about: str, x_label: str) -> Markup:
    """Pairs of bars, and over each pair how much more often than stored its rollouts were drawn."""
    bins = found.bins()
    top = max(found.share(p, i) for p in PARTS for i in range(bins))
    y = Axis(0.0, top * 1.18, HEIGHT - BOTTOM, TOP)
    width = (WIDTH - LEFT - RIGHT) / bins
    bars = []
    # labels that would touch are left out
    every = -(-bins * 30 // (WIDTH - LEFT - RIGHT))
    for i in range(bins):
        left = LEFT + i * width
        share = {p: found.share(p, i) for p in PARTS}
        odds = share["drawn"] / share["stored"] if share["stored"] else None
        said = f"{x_label} {found.label(i)}: stored {share['stored']:.1%}, drawn {share['drawn']:.1%}"
        rects = [
            element(
                "rect",
                x=f"{left + width * (0.08 + 0.42 * k):.1f}",
                width=f"{width * 0.42:.1f}",
                y=f"{y.at(share[p]):.1f}",
                height=f"{HEIGHT - BOTTOM - y.at(share[p]):.1f}",
                class_=f"bar {p}",
            )
            for k, p in enumerate(PARTS)
        ]
        middle = f"{left + width / 2:.1f}"
        high = f"{y.at(max(share.values())) - 4:.1f}"
        bars.append(element("g", element("title", said), *rects))
        if i % every == 0:
            bars.append(element("text", found.label(i), x=middle, y=HEIGHT - BOTTOM + 15, text_anchor="middle"))
            if odds is not None:
                times = f"\N{MULTIPLICATION SIGN}{odds:.2g}"
                bars.append(element("text", times, x=middle, y=high, text_anchor="middle"))
    said = "; ".join(
        f"{found.label(i)}: stored {found.share('stored', i):.1%}, drawn {found.share('drawn', i):.1%}"
        for i in range(bins)
    )
    svg = element(
        "svg",
        y_grid(y, "{:.0%}".format),
        element("g", *bars, x_name(x_label), class_="axes", aria_hidden="true"),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"{title}. {said}.",
    )
    keys = [element("li", element("span", class_=f"chip {p}"), p) for p in PARTS]
    more = element("li", "\N{MULTIPLICATION SIGN}: share of the drawn over share of the stored", class_="note")
    caption = element("figcaption", element("strong", title), element("span", f" {about}", class_="note"))
    return element("figure", caption, svg, element("ul", *keys, more, class_="legend"), class_="chart")
