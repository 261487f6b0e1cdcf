"""Ratio: one number of a run next to what it is hoped to be. Nothing fails by it: machines differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .row import Row

# the fastest of this project's that was measured stands for it
OURS = ("megatron_replay cuda", "megatron_replay cpp", "megatron_replay reference")
METHOD_SIZE = (30_000, 1024)  # rollouts and drawn, of the paper's buffer
MOST_SAMPLE_OF_CPPRB = 1.0
LEAST_MULTINOMIAL_OF_DRAW = 2.0
MOST_DRAW_US = 40.0
LEAST_OF_COPY = 0.6


@dataclass(frozen=True)
class Ratio:
    name: str
    rollouts: int
    drawn: int
    tokens_per_rollout: int
    value: float
    target: str | None  # None where the target is for another size
    met: bool | None

    def __str__(self) -> str:
        size = f"{self.drawn:,} of {self.rollouts:,}, {self.tokens_per_rollout} tokens"
        verdict = "" if self.target is None else f" (target {self.target}: {'met' if self.met else 'NOT MET'})"
        return f"{self.name}, {size}: {self.value:.2f}{verdict}"


def ratios(rows: Sequence[Row]) -> list[Ratio]:
    """In the order of the sizes; a ratio of which one side was not measured is left out."""
    sizes = list(dict.fromkeys((r.rollouts, r.drawn, r.tokens_per_rollout) for r in rows))
    return [ratio for size in sizes for ratio in _of_size(size, rows)]


def _of_size(size: tuple[int, int, int], rows: Sequence[Row]) -> Iterator[Ratio]:
    here = {(r.implementation, r.operation): r for r in rows if (r.rollouts, r.drawn, r.tokens_per_rollout) == size}
    ms = {key: row.ms for key, row in here.items() if row.ms is not None}
    ours = next((name for name in OURS if (name, "sample") in ms), None)
    if ours is None:
        return
    at_method_size = size[:2] == METHOD_SIZE

    def at_most(name: str, value: float, bound: float, applies: bool) -> Ratio:
        return Ratio(name, *size, value, f"at most {bound:g}" if applies else None, value <= bound if applies else None)

    def at_least(name: str, value: float, bound: float) -> Ratio:
        return Ratio(name, *size, value, f"at least {bound:g}", value >= bound)

    if ("cpprb", "sample") in ms:
        value = ms[ours, "sample"] / ms["cpprb", "sample"]
        yield at_most(f"sample: {ours} / cpprb", value, MOST_SAMPLE_OF_CPPRB, at_method_size and size[2] == 64)
    for name, operation in ms:
        if name.startswith("torch.multinomial"):
            value = ms[name, operation] / ms[ours, "draw"]
            yield at_least(f"draw: {name} / {ours}", value, LEAST_MULTINOMIAL_OF_DRAW)
    # sample is the last operation of a row's implementation
    draw, gather = here[ours, "draw"], here[ours, "gather"]
    if draw.device_ms is not None:
        yield at_most(f"draw: {ours}, us of device time", 1e3 * draw.device_ms, MOST_DRAW_US, at_method_size)
    if gather.fraction_of_copy is not None:
        yield at_least(f"gather: {ours} / copy of as many bytes", gather.fraction_of_copy, LEAST_OF_COPY)
