"""What a CUDA device itself takes for a draw and a gather, and how a gather compares with a copy."""

from __future__ import annotations

from statistics import median

import torch

from ..measure_cuda import Clock, copy_bandwidth
from .implementation import Call, Queued, Subject
from .row import Row

DEVICE_OPERATIONS = ("draw", "gather")


class DeviceTime:
    """Adds device times to rows; called as `measure.AfterTurns`."""

    def __init__(self, repeats: int, device: torch.device) -> None:
        self._clock, self._device = Clock(repeats), device
        self.large_copy_gb_per_s = copy_bandwidth(self._clock)

    def __call__(self, subject: Subject, row: Row) -> None:
        if row.operation not in DEVICE_OPERATIONS:
            return
        queued = subject.queued(row.operation)
        if queued is None:
            # the turns are over: this is another draw of the state that they left
            call, row.device_clock = subject.ready(row.operation, turn=0), "events around the call, host time included"
        else:
            call, row.device_clock = _replay(queued.call), "events around the replay of a CUDA graph"
        row.device_ms_each = self._clock.each(call, lambda: None)
        row.device_ms = median(row.device_ms_each)
        if queued is not None and queued.moved_bytes is not None:
            self._compare(row, queued)

    def _compare(self, row: Row, queued: Queued) -> None:
        """With a copy of as many bytes, by the same clock: a short one reaches no device's full bandwidth."""
        row.moved_bytes = queued.moved_bytes
        source = torch.zeros(row.moved_bytes // 2, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        copy_ms = median(self._clock.each(_replay(lambda: target.copy_(source)), lambda: None))
        row.gb_per_s = row.moved_bytes / row.device_ms / 1e6
        row.fraction_of_copy = copy_ms / row.device_ms
        row.fraction_of_large_copy = row.gb_per_s / self.large_copy_gb_per_s


def _replay(call: Call) -> Call:
    """The replay of a graph of the call: no launch of a kernel waits for the host."""
    # the first calls load kernels and take workspaces, on a stream that is not captured
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
