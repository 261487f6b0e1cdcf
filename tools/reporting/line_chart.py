"""LineChart: curves as one SVG that needs no script to be read; with one, a hair line reads values off it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .axis import BOTTOM, HEIGHT, TOP, WIDTH, Axis, axes, grid
from .element import Markup, element, number
from .series import POINTS, Series, thinned


@dataclass(frozen=True)
class Curve:
    label: str
    series: Series
    color: int  # of the palette
    dash: int = 0


@dataclass(frozen=True)
class Mark:
    """A single point beside the curves."""

    label: str
    x: float
    y: float
    color: int


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    about: str = "",
    log: bool = False,
    marks: Sequence[Mark] = (),
    x_label: str = "step",
) -> Markup:
    """A figure with its caption, its legend and, for those who do not see it, what the curves do in words."""
    points = [p for c in curves for p in c.series.points] + [(m.x, m.y) for m in marks]
    # a logarithm needs what is above 0
    log = log and all(y > 0 for _, y in points)
    x, y = axes(points, log)
    notes = [about] if about else []
    if log:
        notes.append("logarithmic scale")
    longest = max(len(c.series.x) for c in curves)
    if longest > POINTS:
        notes.append(f"lowest and highest of each stretch: at most {POINTS:,} of {longest:,} points")
    lost = sum(v is None for c in curves for v in c.series.y)
    if lost:
        notes.append(f"{lost:,} values that are not finite are left out")
    svg = element(
        "svg",
        grid(x, y, x_label),
        *(curve_path(c, x, y) for c in curves),
        *(mark_point(m, x, y) for m in marks),
        element("line", class_="hair", x1=0, x2=0, y1=TOP, y2=HEIGHT - BOTTOM),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        data_x=f"{x.low!r} {x.high!r} {x.start} {x.end}",
        data_y=f"{y.low!r} {y.high!r} {y.start} {y.end}",
        data_log=log,
        role="img",
        aria_label=f"{title}. {words(curves, marks, x_label)}",
    )
    return element(
        "figure",
        element("figcaption", element("strong", title), *(element("span", f" {n}", class_="note") for n in notes[:1])),
        svg,
        legend(curves, marks),
        element("p", "; ".join(notes[1:]), class_="note") if notes[1:] else None,
        class_="chart",
        tabindex=0,
        aria_label=f"{title}, curves; left and right arrow keys read values",
    )


def curve_path(curve: Curve, x: Axis, y: Axis) -> Markup:
    s = thinned(curve.series)
    d, pen = [], "M"
    for a, b in zip(s.x, s.y, strict=True):
        if b is None:
            pen = "M"
            continue
        d.append(f"{pen}{x.at(a):.2f} {y.at(b):.2f}")
        pen = "L"
    # a line of no length is drawn as a dot
    if len(d) == 1:
        d.append("h0")
    classes = f"curve c{curve.color} d{curve.dash}"
    return element("path", d="".join(d), class_=classes, data_label=curve.label)


def mark_point(mark: Mark, x: Axis, y: Axis) -> Markup:
    return element("circle", class_=f"mark c{mark.color}", cx=f"{x.at(mark.x):.1f}", cy=f"{y.at(mark.y):.1f}", r=4)


def legend(curves: Sequence[Curve], marks: Sequence[Mark]) -> Markup:
    entries = [
        element("li", swatch(c.color, c.dash), c.label, " ", element("output", class_="value")) for c in curves
    ] + [element("li", dot(m.color), f"{m.label} {number(m.y)}") for m in marks]
    return element("ul", *entries, element("li", class_="where"), class_="legend")


def swatch(color: int, dash: int = 0) -> Markup:
    line = element("path", d="M0 5h26", class_=f"c{color} d{dash}")
    return element("svg", line, class_="swatch", viewBox="0 0 26 10", aria_hidden="true")


def dot(color: int) -> Markup:
    circle = element("circle", cx=13, cy=5, r=4, class_=f"mark c{color}")
    return element("svg", circle, class_="swatch", viewBox="0 0 26 10", aria_hidden="true")


def words(curves: Sequence[Curve], marks: Sequence[Mark], x_label: str) -> str:
    """First, last, least and largest of each curve."""
    said = []
    for curve in curves:
        points = curve.series.points
        if not points:
            said.append(f"{curve.label}: no finite value")
            continue
        (x0, y0), (x1, y1) = points[0], points[-1]
        low, high = min(y for _, y in points), max(y for _, y in points)
        said.append(
            f"{curve.label}: {number(y0)} at {x_label} {number(x0)}, {number(y1)} at {x_label} {number(x1)}, "
            f"between {number(low)} and {number(high)}"
        )
    return "; ".join(said + [f"{m.label}: {number(m.y)}" for m in marks]) + "."
