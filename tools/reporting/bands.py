"""Bands: how long each phase of a step took, stacked over the steps, and each one's share of all the time."""

from __future__ import annotations

from collections.abc import Sequence

from .axis import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, grid
from .element import Markup, element, number, table
from .run_folder import Run, value
from .series import averaged

PREFIX = "time/"
# in the order of a step; others follow
ORDER = ("sync", "generate", "reward", "logprobs", "draw", "log", "train", "push")
STRETCHES = 300


def phases(run: Run) -> list[str]:
    found = {name.removeprefix(PREFIX) for name in run.names if name.startswith(PREFIX)}
    return sorted(found, key=lambda p: (ORDER.index(p) if p in ORDER else len(ORDER), p))


def phase_times(run: Run) -> Markup | None:
    """The figures of one run, or None where no row has a phase."""
    names = phases(run)
    if not names:
        return None
    # a phase that a row does not name took no time in it
    columns = [[max(0.0, value(row, PREFIX + name) or 0.0) for row in run.rows] for name in names]
    return element("div", stacked(run, names, columns), shares(run, names, columns), class_="pair")


def stacked(run: Run, names: Sequence[str], columns: Sequence[Sequence[float]]) -> Markup:
    steps = [float(row["step"]) for row in run.rows]
    xs, *thin = averaged([steps, *columns], STRETCHES)
    tops = [[0.0] * len(xs)]
    for column in thin:
        tops.append([a + b for a, b in zip(tops[-1], column, strict=True)])
    x = Axis(xs[0], xs[-1] if xs[-1] > xs[0] else xs[0] + 1, LEFT, WIDTH - RIGHT)
    y = Axis(0.0, max(tops[-1]) * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    areas = []
    for i, name in enumerate(names):
        upper = [f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in zip(xs, tops[i + 1], strict=True)]
        lower = [f"{x.at(a):.1f} {y.at(b):.1f}" for a, b in zip(xs, tops[i], strict=True)][::-1]
        areas.append(element("path", element("title", name), d=f"M{'L'.join(upper + lower)}Z", class_=f"band p{i % 8}"))
    averages = ", ".join(f"{n} {number(sum(c) / len(c))}" for n, c in zip(names, columns, strict=True))
    note = f" means of {STRETCHES} stretches of the {len(steps):,} updates" if len(steps) > STRETCHES else ""
    svg = element(
        "svg",
        grid(x, y, "step"),
        *areas,
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        role="img",
        aria_label=f"Seconds of each phase over the steps, stacked. Means: {averages}.",
    )
    title = element("strong", f"Seconds of a step, stacked: {run.name}")
    return element("figure", element("figcaption", title, element("span", note, class_="note")), svg, class_="chart")


def shares(run: Run, names: Sequence[str], columns: Sequence[Sequence[float]]) -> Markup:
    total = sum(map(sum, columns)) or 1.0
    bar, left = [], 0.0
    for i, (name, column) in enumerate(zip(names, columns, strict=True)):
        share = sum(column) / total
        about = element("title", f"{name}: {share:.1%}")
        x, width = f"{left * WIDTH:.2f}", f"{share * WIDTH:.2f}"
        bar.append(element("rect", about, x=x, width=width, height=26, class_=f"band p{i % 8}"))
        left += share
    svg = element("svg", *bar, viewBox=f"0 0 {WIDTH} 26", aria_hidden="true")
    rows = [
        (
            Markup(element("span", class_=f"chip p{i % 8}") + element("span", name)),
            number(sum(c)),
            number(sum(c) / len(c)),
            f"{sum(c) / total:.1%}",
        )
        for i, (name, c) in enumerate(zip(names, columns, strict=True))
    ]
    caption = f"Share of {number(total)} s in all: {run.name}"
    return element("div", svg, table(("phase", "seconds", "mean of an update", "share"), rows, caption))
