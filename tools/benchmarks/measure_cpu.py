"""Measurements on a CPU: each in a fresh process, so that its peak memory is its own.

The peak is VmHWM after the call less VmRSS before it, with the mark reset in between: Linux alone tells these.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from .agreement import Judge
from .host_memory import host_memory
from .implementations import IMPLEMENTATIONS, Implementation, Settings
from .problem import Problem, Size, make_problem
from .report import Report
from .row import OUT_OF_MEMORY, Row, gradient_bytes

CPU = torch.device("cpu")
Result = TypeVar("Result")


class Measured(NamedTuple):
    ms: float
    peak_bytes: int


def check() -> None:
    """Raise RuntimeError where the kernel does not reset the high-water mark of a process."""
    try:
        _reset_peak()
        host_memory("VmHWM")
    except (OSError, TypeError) as error:
        raise RuntimeError(f"peak memory on a CPU needs Linux with /proc/self/clear_refs: {error}") from error


def measure(size: Size, settings: Settings, repeats: int, report: Report) -> None:
    """A row for each implementation that runs on a CPU, into the report; the repeats of all of them are interleaved."""
    chosen = [i for i in IMPLEMENTATIONS if "cpu" in i.devices]
    rows = {i.name: Row.of(i, size) for i in chosen}
    seen: dict[str, list[Measured]] = {i.name: [] for i in chosen}
    with tempfile.TemporaryDirectory(prefix="benchmark_loss_") as folder:
        problem_file, result_file = Path(folder, "problem.pt"), Path(folder, "result.pt")
        report.say(f"drawing tokens and computing the truth in float64, {size.label}")
        problem = make_problem("head", size, CPU)
        problem.save(problem_file)
        judge = Judge(problem)
        for turn in range(repeats):
            for implementation in (i for i in chosen if rows[i.name].error is None):
                row = rows[implementation.name]
                # one that cannot run must not cost the rows of the others
                try:
                    measured = _in_a_process(implementation, problem_file, settings, result_file)
                    loss, gradients = torch.load(result_file)
                    row.gradient_bytes = gradient_bytes(gradients)
                    row.judged(judge(loss, gradients))
                except BrokenProcessPool:
                    row.failed(f"{OUT_OF_MEMORY}, or killed: the process died")
                except Exception as error:
                    row.failed(f"{type(error).__name__}: {error}")
                else:
                    seen[row.implementation].append(measured)
                    peak = measured.peak_bytes / 2**20
                    report.say(f"  {row.implementation}, repeat {turn + 1}: {measured.ms:.0f} ms, peak {peak:.1f} MiB")
    for name, row in rows.items():
        if row.equal_to_reference:
            row.timed([m.ms for m in seen[name]], max(m.peak_bytes for m in seen[name]))
        report.add(row)


def _in_a_process(
    implementation: Implementation, problem_file: Path, settings: Settings, result_file: Path
) -> Measured:
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        return pool.submit(_child, implementation.name, problem_file, settings, result_file).result()


def _child(name: str, problem_file: Path, settings: Settings, result_file: Path) -> Measured:
    """Peak of the first call, whose result goes into a file, and time of the second."""
    (implementation,) = (i for i in IMPLEMENTATIONS if i.name == name)
    problem = Problem.load(problem_file)
    # threads, and what libraries keep for themselves, are not the loss's
    small = make_problem("head", replace(problem.size, T=256, V=1024), CPU)
    implementation.prepare(small, settings).call()
    run = implementation.prepare(problem, settings)
    result, peak = peak_bytes(run.call)
    torch.save(run.collect(result), result_file)
    del result
    start = time.perf_counter()
    run.call()
    return Measured(1e3 * (time.perf_counter() - start), peak)


def peak_bytes(call: Callable[[], Result]) -> tuple[Result, int]:
    """The call's result, and how much memory this process had at most during it beyond what it had before."""
    gc.collect()
    # memory that malloc holds after a free would be used again and not be seen
    ctypes.CDLL(None).malloc_trim(0)
    _reset_peak()
    before = host_memory("VmRSS")
    result = call()
    return result, host_memory("VmHWM") - before


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
