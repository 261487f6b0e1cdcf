"""StopRequest: a run that is asked to stop finishes its step, saves, and ends."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

from megatron_replay.trainer.phase_board import PhaseBoard, end_with_the_others

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """SIGTERM or SIGUSR1 on any rank, or `minutes` since the start (0: no limit), asks all ranks to stop.

    torchrun passes SIGTERM on to its ranks; of SIGUSR1 it dies, unless its --signals-to-handle names it.
    A second signal ends the process at once. A signal because another rank died (torchrun sends it to the rest) ends it
    as well: that step would never be finished.
    """

    def __init__(self, board: PhaseBoard, minutes: float, device: torch.device) -> None:
        self._board, self._device = board, device
        self._deadline = time.monotonic() + minutes * 60 if minutes > 0 else float("inf")
        self._signal = 0
        for number in SIGNALS:
            signal.signal(number, self._on_signal)

    def agreed(self) -> str:
        """Why to stop now, the same on every rank; "" to go on. All ranks call it together after a step."""
        mine = self._signal or (-1 if time.monotonic() > self._deadline else 0)
        asked = torch.tensor([mine, -mine], dtype=torch.int64, device=self._device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        number, late = int(asked[0]), int(asked[1])
        if number > 0:
            return f"signal {signal.Signals(number).name}"
        return "--exit-duration-in-mins" if late > 0 else ""

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        self._signal = number
        threading.Thread(target=end_with_the_others, args=(self._board,), daemon=True).start()
