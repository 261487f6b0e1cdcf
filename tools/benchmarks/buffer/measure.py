"""Equal first, then time: every implementation is held to its claim, then all take turns with their repeats."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from .distribution import DRAWN, REPEATS, ROLLOUTS, judge
from .implementation import OPERATIONS, Call, Implementation, Operation, Subject
from .report import Report
from .roster import version
from .row import Finding, Row, reason
from .stock import BufferSize, Stock

# a turn evicts and pushes once; it draws as often as this, each time other rollouts
CALLS = 5
ONCE: tuple[Operation, ...] = ("evict", "push")
WARM_UPS = 1
CHECKED = BufferSize(ROLLOUTS, DRAWN, tokens_per_rollout=5)

AfterTurns = Callable[[Subject, Row], None]  # what a device adds to a row


def nothing(subject: Subject, row: Row) -> None:
    """On a CPU nothing is left to add."""


def check(implementation: Implementation, device: torch.device, repeats: int = REPEATS) -> Finding:
    """Draws of a small stock against exact probabilities, and the rows that come with them."""
    finding = Finding.of(implementation, version(implementation))
    stock = Stock(CHECKED, device)
    # one that cannot run must not cost the others their times
    try:
        subject = implementation.prepare(stock)
        finding.rows_equal = _check_rows(subject, stock)
        weights = stock.weights(stock.all_uids()).cpu()
        finding.verdicts = judge(implementation.draws, weights, subject.drawn, repeats)
        if wrong := [v.complaint for v in finding.verdicts if not v.passed]:
            finding.error = f"draws from another distribution: {'; '.join(wrong)}"
    except Exception as error:
        finding.error = reason(error)
    return finding


def measure(
    sizes: Sequence[BufferSize],
    implementations: Sequence[Implementation],
    repeats: int,
    device: torch.device,
    report: Report,
    after_turns: AfterTurns = nothing,
) -> None:
    """A finding for each implementation, and a row for each of its operations at each size, into the report."""
    for implementation in implementations:
        report.find(check(implementation, device))
    for size in sizes:
        report.say(f"filling buffers, {size.label}")
        _measure_size(size, implementations, repeats, device, report, after_turns)
        gc.collect()


def _measure_size(
    size: BufferSize,
    implementations: Sequence[Implementation],
    repeats: int,
    device: torch.device,
    report: Report,
    after_turns: AfterTurns,
) -> None:
    stock = Stock(size, device)
    subjects: dict[str, Subject] = {}
    errors = {f.implementation: f.error for f in report.findings if f.error is not None}
    for implementation in implementations:
        if implementation.name in errors:
            continue
        try:
            subject = implementation.prepare(stock)
            _check_rows(subject, stock)
            subjects[implementation.name] = subject
        except Exception as error:
            errors[implementation.name] = reason(error)
    rows = {(i.name, o): Row.of(i, o, size) for i in implementations for o in OPERATIONS if o in i.operations}
    seen: dict[tuple[str, Operation], list[float]] = {key: [] for key in rows}
    # a heap of a million objects takes the collector seconds, at a moment of its choice
    gc.collect()
    gc.disable()
    try:
        for turn in range(WARM_UPS + repeats):
            for operation in OPERATIONS:
                for name, subject in _rotated(list(subjects.items()), turn):
                    if (name, operation) in rows and name not in errors:
                        try:
                            seen[name, operation].append(_turn(subject, operation, turn, device))
                        except Exception as error:
                            errors[name] = reason(error)
    finally:
        gc.enable()
    for (name, operation), row in rows.items():
        if name in errors:
            row.error = errors[name]
        else:
            row.timed(seen[name, operation][WARM_UPS:])
            try:
                after_turns(subjects[name], row)
            except Exception as error:
                row.error = reason(error)
        report.add(row)


def _rotated(subjects: list[tuple[str, Subject]], turn: int) -> list[tuple[str, Subject]]:
    """Another one goes first in each turn: the first finds the caches as the operation before has left them."""
    first = turn % max(1, len(subjects))
    return subjects[first:] + subjects[:first]


def _turn(subject: Subject, operation: Operation, turn: int, device: torch.device) -> float:
    """Milliseconds, the median of the turn's calls."""
    calls = [subject.ready(operation, turn) for _ in range(1 if operation in ONCE else CALLS)]
    return median(_milliseconds(call, device) for call in calls)


def _milliseconds(call: Call, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def _check_rows(subject: Subject, stock: Stock) -> bool | None:
    """True where the rows of a sample are those of its uids, None where it has none. Raises ValueError otherwise."""
    subject.cross_check()
    uids, rows = subject.sampled(stock.size.drawn)
    if uids.numel() != stock.size.drawn:
        raise ValueError(f"a sample of {stock.size.drawn} has {uids.numel()} rollouts")
    if rows is None:
        return None
    for name, got, stored in zip(rows._fields, rows, stock.rows(uids), strict=True):
        if not _same(got, stored):
            raise ValueError(f"{name} of a sample are not those that were stored")
    return True


def _same(got: Tensor, stored: Tensor) -> bool:
    return got.shape == stored.shape and torch.equal(got.to(stored.dtype), stored)
