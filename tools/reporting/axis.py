"""Axis: numbers onto the pixels of a chart, with its ticks and grid."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .element import Markup, element, number

WIDTH, HEIGHT = 460, 214
LEFT, RIGHT, TOP, BOTTOM = 54, 10, 10, 24
TICKS = 5


@dataclass(frozen=True)
class Axis:
    """Numbers onto pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, x: float) -> float:
        low, high, x = (math.log10(v) if self.log else v for v in (self.low, self.high, x))
        return self.start + (x - low) / (high - low) * (self.end - self.start)


def axes(points: Sequence[tuple[float, float]], log: bool) -> tuple[Axis, Axis]:
    xs, ys = ([p[i] for p in points] or [0.0, 1.0] for i in (0, 1))
    low, high = min(ys), max(ys)
    if log:
        low, high = (low / 1.5, high * 1.5) if low == high else (low, high)
    elif low == high:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    else:
        pad = (high - low) * 0.05
        # 0 is a place to begin where all is above it, and near it
        low, high = 0.0 if 0 <= low < high - low else low - pad, high + pad
    first, last = min(xs), max(xs)
    last = last if last > first else first + 1
    return Axis(first, last, LEFT, WIDTH - RIGHT), Axis(low, high, HEIGHT - BOTTOM, TOP, log)


def ticks(axis: Axis) -> list[float]:
    """Round numbers within the axis."""
    if axis.log:
        powers = range(math.floor(math.log10(axis.low)), math.floor(math.log10(axis.high)) + 1)
        every = -(-len(powers) // TICKS)
        factors = (1, 2, 5) if len(powers) <= 3 else (1,)
        return [t for p in powers[::every] for f in factors if axis.low <= (t := f * 10.0**p) <= axis.high]
    rough = (axis.high - axis.low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def grid(x: Axis, y: Axis, x_label: str) -> Markup:
    """Lines across, numbers at both axes, and the name of the lower one."""
    parts = [y_grid(y, number)]
    for tick in ticks(x):
        at = x.at(tick)
        anchor = "end" if at > WIDTH - RIGHT - 8 else "middle"
        parts.append(element("text", number(tick), x=f"{at:.1f}", y=HEIGHT - BOTTOM + 15, text_anchor=anchor))
    parts.append(x_name(x_label))
    return element("g", *parts, class_="axes", aria_hidden="true")


def y_grid(y: Axis, text: Callable[[float], str]) -> Markup:
    parts = []
    for tick in ticks(y):
        at = f"{y.at(tick):.1f}"
        parts.append(element("line", class_="grid", x1=LEFT, x2=WIDTH - RIGHT, y1=at, y2=at))
        parts.append(element("text", text(tick), x=LEFT - 6, y=at, dy="0.32em", text_anchor="end"))
    return element("g", *parts, class_="axes", aria_hidden="true")


def x_name(label: str) -> Markup:
    return element("text", label, class_="axis", x=LEFT - 14, y=HEIGHT - BOTTOM + 15, text_anchor="end")
