"""Measurements on a CUDA device: median time by events with a cold L2, and peak memory by torch's allocator."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch

from .agreement import Judge
from .foreign import FOREIGN
from .implementations import IMPLEMENTATIONS, Implementation, Run, Settings
from .problem import Level, Problem, Size, make_problem
from .report import Report
from .row import OUT_OF_MEMORY, Row, counted_bytes, gradient_bytes

L2_BYTES = 256 << 20  # more than any L2
COPY_BYTES = 2 << 30
WARM_UPS = 2


class Clock:
    """Median milliseconds of a call; every repeat finds an L2 that holds none of its data."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self._flush = torch.empty(L2_BYTES, dtype=torch.uint8, device="cuda")

    def each(self, call: Callable[[], Any], restore: Callable[[], None]) -> list[float]:
        for _ in range(WARM_UPS):
            restore()
            call()
        found = []
        for _ in range(self.repeats):
            restore()
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            call()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end))
        return found


def copy_bandwidth(clock: Clock) -> float:
    """GB/s of a device-to-device copy, bytes read and bytes written."""
    free, _ = torch.cuda.mem_get_info()
    source = torch.zeros(min(COPY_BYTES, free // 8), dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(source)
    ms = median(clock.each(lambda: copy.copy_(source), lambda: None))
    return 2 * source.numel() / ms / 1e6


def three_gemms(problem: Problem, clock: Clock) -> float:
    """Milliseconds of logits, dhidden and dweight as matrix products alone, over all tokens at once."""
    hidden, weight = problem.operands
    logits = torch.empty(problem.size.T, problem.size.columns, dtype=hidden.dtype, device=hidden.device)
    dhidden, dweight = torch.empty_like(hidden), torch.empty_like(weight)

    def call() -> None:
        torch.mm(hidden, weight.T, out=logits)
        torch.mm(logits, weight, out=dhidden)
        torch.mm(logits.T, hidden, out=dweight)

    return median(clock.each(call, lambda: None))


def importable() -> tuple[list[Implementation], list[dict[str, str]]]:
    """What can run here, this project's first, and why the rest cannot."""
    usable, skipped = [i for i in IMPLEMENTATIONS if "cuda" in i.devices], []
    for implementation in FOREIGN:
        try:
            importlib.import_module(implementation.needs)
        except ImportError as error:
            skipped.append({"implementation": implementation.name, "reason": str(error)})
        else:
            usable.append(implementation)
    return usable, skipped


def measure(sizes: Sequence[Size], settings: Settings, clock: Clock, report: Report) -> None:
    """A row for each implementation and size, and the GEMM floor of each size, into the report."""
    usable, report.skipped = importable()
    for s in report.skipped:
        report.say(f"{s['implementation']}: not measured, {s['reason']}")
    levels: tuple[Level, ...] = ("logits", "head")
    for level in levels:
        chosen = [i for i in usable if i.level == level]
        for size in sizes:
            _measure_size(level, size if level == "head" else replace(size, H=None), chosen, settings, clock, report)
            torch.cuda.empty_cache()


def _measure_size(
    level: Level,
    size: Size,
    chosen: list[Implementation],
    settings: Settings,
    clock: Clock,
    report: Report,
) -> None:
    report.say(f"drawing tokens and computing the truth in float64, {size.label}")
    try:
        problem = make_problem(level, size, torch.device("cuda"))
        judge = Judge(problem)
        floor = None if level == "logits" else three_gemms(problem, clock)
    except torch.OutOfMemoryError as error:
        for implementation in chosen:
            row = Row.of(implementation, size)
            row.failed(_reason(error))
            report.add(row)
        return
    if floor is not None:
        report.floors.append({"name": "three GEMMs", "T": size.T, "V": size.V, "H": size.H, "tp": size.tp, "ms": floor})
    for implementation in chosen:
        row = Row.of(implementation, size)
        # one that cannot run must not cost the rows of the others
        try:
            _fill(row, implementation.prepare(problem, settings), judge, clock)
        except Exception as error:
            row.failed(_reason(error))
        _relate(row, problem, floor, report.header["copy_bandwidth"])
        report.add(row)
        torch.cuda.empty_cache()


def _fill(row: Row, run: Run, judge: Judge, clock: Clock) -> None:
    run.restore()
    # compiles, and lets libraries take their workspaces
    run.call()
    run.restore()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run.call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    loss, gradients = run.collect(result)
    row.gradient_bytes = gradient_bytes(gradients)
    row.judged(judge(loss, gradients))
    # time is measured with the memory free that the result held
    del result, loss, gradients
    if row.equal_to_reference:
        row.timed(clock.each(run.call, run.restore), peak)


def _relate(row: Row, problem: Problem, floor: float | None, copy_gb_per_s: float) -> None:
    if row.ms is None:
        return
    if floor is None:
        row.gb_per_s = counted_bytes(problem) / row.ms / 1e6
        row.fraction_of_copy = row.gb_per_s / copy_gb_per_s
    else:
        row.fraction_of_gemms = floor / row.ms


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return f"{OUT_OF_MEMORY}: {error}"
    return f"{type(error).__name__}: {error}"
