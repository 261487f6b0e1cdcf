"""A run of the entry script from its start to its end or its kill, watched from outside."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil

from megatron_replay.telemetry import METRICS_FILE

from .memory import Series
from .plan import Kill
from .processes import POLL, SharedMemory, end_with_parent, engines, ranks, said, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = (sys.executable, "-m", "torch.distributed.run", "--standalone")
ENTRY = ROOT / "examples" / "pretrain_replay_grpo.py"
LATEST = "latest_checkpointed_iteration.txt"
ROW_BYTES = 1 << 16  # more than a row takes
LOG_BYTES = 1 << 14
# variables of a launcher that this program itself may run under
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class ChaosError(RuntimeError):
    """A run did not do what it must."""


def steps_done(run_dir: Path) -> int:
    """Steps that have a row. A last line that is half written does not count."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - ROW_BYTES))
        lines = file.read().split(b"\n")[:-1]
    return json.loads(lines[-1])["step"] + 1 if lines else 0


def checkpoint_step(run_dir: Path) -> int | None:
    path = run_dir / "checkpoints" / LATEST
    return int(path.read_text()) if path.is_file() else None


class Life:
    """One torchrun of the entry script in `run_dir`, its output in `log`. `series` is each rank's memory by step."""

    def __init__(
        self, flags: Sequence[str], run_dir: Path, processes: int, log: Path, temporary: Path, shm: SharedMemory
    ) -> None:
        self.run_dir, self.log, self.shm = run_dir, log, shm
        self.series: dict[int, Series] = {}
        self.first_row: float | None = None  # seconds from the start to the first new row
        self._row_times: list[float] = []
        # a resumed run writes the rows before its checkpoint again, which are not new
        self._steps, self._resumed = steps_done(run_dir), checkpoint_step(run_dir) or 0
        self.began = time.monotonic()
        env = {k: v for k, v in os.environ.items() if k not in FOREIGN}
        env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)}
        env.setdefault("OMP_NUM_THREADS", "1")
        with open(log, "wb") as sink:
            self.launcher = subprocess.Popen(
                [*LAUNCHER, "--nproc-per-node", str(processes), str(ENTRY), *flags],
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )

    @property
    def ended(self) -> bool:
        return self.launcher.poll() is not None

    def wait_for(self, step: int, stall_timeout: float) -> bool:
        """Until the run has `step` rows, one of them from this life; False where it ends first."""
        while (done := self.look()) < step or self.first_row is None:
            if self.ended:
                return False
            if time.monotonic() - (self._row_times or [self.began])[-1] > stall_timeout:
                raise ChaosError(f"no step in {stall_timeout:g} s after step {done}; the end of its log: {self.tail()}")
            time.sleep(POLL)
        return True

    def look(self) -> int:
        """The steps that are done; with each new one the ranks' memory is noted."""
        self.shm.look()
        done = steps_done(self.run_dir)
        if done == self._steps:
            return done
        if done > max(self._steps, self._resumed):
            now = time.monotonic()
            self._row_times.append(now)
            if self.first_row is None:
                self.first_row = now - self.began
            for rank, process in ranks(self.launcher.pid).items():
                try:
                    self.series.setdefault(rank, []).append((done, process.memory_info().rss))
                except psutil.NoSuchProcess:
                    continue
        self._steps = done
        return done

    def step_seconds(self) -> float:
        """Median time of a step so far."""
        times = self._row_times[-20:]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return median(gaps) if gaps else 0.0

    def victim(self, kill: Kill, timeout: float) -> psutil.Process:
        """The process that a kill is for; an engine may yet have to start."""
        deadline = time.monotonic() + timeout
        while True:
            found = {
                "trainer": lambda: list(ranks(self.launcher.pid).values()),
                "launcher": lambda: [psutil.Process(self.launcher.pid)],
                "engine": engines,
            }[kill.kind]()
            if found:
                return found[int(kill.pick * len(found))]
            if self.ended or time.monotonic() > deadline:
                raise ChaosError(f"no process of kind {kill.kind} to kill; the end of the log: {self.tail()}")
            time.sleep(POLL)

    def finish(self, settle: float) -> list[str]:
        """Wait for every process to end; those that live after `settle` seconds."""
        deadline = time.monotonic() + settle
        while not self.ended and time.monotonic() < deadline:
            self.look()
            time.sleep(POLL)
        left = wait_until_gone(max(0.0, deadline - time.monotonic()), self.shm.look)
        return [said(process) for process in left]

    def tail(self) -> str:
        """The last line of the log that says something."""
        lines = [x for x in self.log.read_bytes()[-LOG_BYTES:].decode(errors="replace").splitlines() if x.strip()]
        errors = [x.strip() for x in lines if "Error" in x]
        return (errors or lines or ["nothing"])[-1][-300:]
