"""The two runs, uninterrupted and killed again and again, and what is wrong with the second."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron_replay.telemetry import read_metrics

from .comparison import OF_THE_ENGINE, files, first_difference, summary_difference
from .life import ChaosError, Life, checkpoint_step, steps_done
from .memory import median_slope, slope
from .plan import Kill
from .processes import SharedMemory, end_all, said


@dataclass(frozen=True)
class Settings:
    steps: int
    save_interval: int
    engine: str
    processes: int
    flags: tuple[str, ...]  # of the entry script, without what a run sets itself
    settle: float  # seconds until which all processes of a killed run must have ended
    stall_timeout: float  # seconds without a step after which a run is given up
    memory_skip: int  # steps of a process that its memory may grow in
    most_bytes_per_step: float


@dataclass
class Event:
    """One kill, and what came of it."""

    kind: str
    process: str
    steps: int  # that the killed run has rows of
    checkpoint: int | None  # the step that the run goes on from; None: it went on by itself
    saving: bool  # the kill fell into a checkpoint
    seconds_to_end: float  # until nothing of the run lived; of a run that goes on by itself, until its second row
    orphans: list[str]
    seconds_to_row: float | None = None  # from the start of the resumed run to its first row

    def __str__(self) -> str:
        where = f"{self.kind} at {self.steps} steps{', in a checkpoint' if self.saving else ''}"
        if self.checkpoint is None:
            return f"{where}; the run goes on by itself, two more steps in {self.seconds_to_end:.1f} s"
        left = f"; ORPHANS: {len(self.orphans)}" if self.orphans else ""
        return f"{where}; all ended after {self.seconds_to_end:.1f} s, resumed from {self.checkpoint}{left}"


@dataclass
class Soak:
    settings: Settings
    kills: list[Kill]
    folder: Path
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    orphans: int = 0
    lives: list[Life] = field(default_factory=list)
    rows: int = 0
    difference: dict[str, Any] | None = None
    compared: bool = False
    files_left: list[str] = field(default_factory=list)
    files_missing: list[str] = field(default_factory=list)
    shared_memory_left: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Both runs and the comparison. Raises ChaosError where a run does not come to its end."""
        self.shm = SharedMemory()
        (self.folder / "tmp").mkdir()
        began = time.monotonic()
        life = self._start(self.plain)
        life.wait_for(self.settings.steps + 1, self.settings.stall_timeout)
        self._end(life, "the uninterrupted run")
        self.seconds["uninterrupted"] = time.monotonic() - began
        self._fit("uninterrupted", [life])
        say(f"uninterrupted: {self.settings.steps} steps in {self.seconds['uninterrupted']:.0f} s")
        began = time.monotonic()
        self._soak()
        self.seconds["soak"] = time.monotonic() - began
        self._compare()

    @property
    def plain(self) -> Path:
        return self.folder / "uninterrupted"

    @property
    def soaked(self) -> Path:
        return self.folder / "soak"

    def _start(self, run_dir: Path) -> Life:
        s = self.settings
        flags = [*s.flags, "--run-dir", str(run_dir), "--train-iters", str(s.steps), "--rl-engine", s.engine]
        flags += ["--save-interval", str(s.save_interval)]
        if run_dir.exists():
            flags += ["--load", str(run_dir / "checkpoints")]
        log = self.folder / f"{run_dir.name}.{len(self.lives)}.log"
        return Life(flags, run_dir, s.processes, log, self.folder / "tmp", self.shm)

    def _soak(self) -> None:
        life = self._start(self.soaked)
        self.lives.append(life)
        for number, kill in enumerate(self.kills, 1):
            if not life.wait_for(kill.step, self.settings.stall_timeout):
                break
            self._note_resume(life)
            event = self._strike(life, kill)
            if event is None:
                break
            self.events.append(event)
            say(f"kill {number} of {len(self.kills)}: {event}")
            if event.checkpoint is not None:
                life = self._start(self.soaked)
                self.lives.append(life)
        life.wait_for(self.settings.steps + 1, self.settings.stall_timeout)
        self._note_resume(life)
        self._end(life, f"the soak, after {len(self.events)} kills,")
        self._fit("soak", self.lives)

    def _note_resume(self, life: Life) -> None:
        if len(self.lives) > 1 and self.events[-1].checkpoint is not None:
            self.events[-1].seconds_to_row = life.first_row

    def _strike(self, life: Life, kill: Kill) -> Event | None:
        """Kill, and see what is left; None where the run has ended before."""
        victim = life.victim(kill, self.settings.stall_timeout)
        time.sleep(kill.delay * life.step_seconds())
        process = said(victim)
        steps = steps_done(self.soaked)
        # none of ours dies before its parent has seen it, so the number is still its own
        with contextlib.suppress(psutil.NoSuchProcess):
            victim.kill()
        saving = any((self.soaked / "checkpoints").glob("*.partial"))
        began = time.monotonic()
        if kill.kind == "engine":
            # one may have been sampled before
            life.wait_for(steps + 2, self.settings.stall_timeout)
            return Event(kill.kind, process, steps, None, saving, time.monotonic() - began, [])
        orphans = life.finish(self.settings.settle)
        seconds = time.monotonic() - began
        if life.launcher.poll() == 0:
            return None
        end_all()
        self._count_orphans(orphans, f"after kill {len(self.events) + 1} ({kill.kind})")
        steps, checkpoint = steps_done(self.soaked), checkpoint_step(self.soaked)
        if checkpoint is None:
            raise ChaosError(f"no checkpoint to resume from after a kill at {steps} steps")
        return Event(kill.kind, process, steps, checkpoint, saving, seconds, orphans)

    def _end(self, life: Life, name: str) -> None:
        """The run has all its rows or has ended: it must end well, and leave no process."""
        orphans = life.finish(self.settings.settle)
        code = life.launcher.poll()
        end_all()
        if code != 0:
            raise ChaosError(f"{name} ended with exit code {code}: {life.tail()}")
        self._count_orphans(orphans, f"after {name.rstrip(',')}")

    def _count_orphans(self, orphans: list[str], when: str) -> None:
        self.orphans += len(orphans)
        if orphans:
            self.problems.append(f"{len(orphans)} processes lived {self.settings.settle:g} s {when}: {orphans[0]}")

    def _fit(self, name: str, lives: list[Life]) -> None:
        """Bytes per step of every rank; over several lives the median of those that are long enough."""
        found: dict[str, Any] = {}
        for rank in sorted({r for life in lives for r in life.series}):
            series = [life.series[rank] for life in lives if rank in life.series]
            slopes = [x for x in (slope(one, self.settings.memory_skip) for one in series) if x is not None]
            grown = median_slope(slopes)
            first, last = (max(one[i][1] for one in series) for i in (0, -1))
            found[str(rank)] = {"bytes_per_step": grown, "fits": len(slopes), "first_bytes": first, "last_bytes": last}
            if grown is not None and grown > self.settings.most_bytes_per_step:
                self.problems.append(
                    f"memory of rank {rank} grew by {grown:.0f} bytes per step in the {name} run, "
                    f"at most {self.settings.most_bytes_per_step:g} (--max-bytes-per-step)"
                )
        self.memory[name] = found

    def _compare(self) -> None:
        left_out = () if self.settings.engine == "embedded" else OF_THE_ENGINE
        expected, got = read_metrics(self.plain), read_metrics(self.soaked)
        self.rows = len(got)
        self.difference = first_difference(expected, got, left_out=left_out)
        self.difference = self.difference or summary_difference(self.plain, self.soaked)
        self.compared = True
        if (d := self.difference) is not None:
            self.problems.append(
                f"step {d['step']}, {d['key']}: {d['uninterrupted']!r} uninterrupted, {d['soak']!r} in the soak"
            )
        ours, theirs = files(self.soaked), files(self.plain)
        self.files_left, self.files_missing = sorted(ours - theirs), sorted(theirs - ours)
        beside = {x.name for x in self.folder.iterdir() if x.name.startswith(self.soaked.name) and x.is_dir()}
        self.files_left += sorted(beside - {self.soaked.name})
        self.shared_memory_left = [str(x) for x in self.shm.left()]
        for what, names in (
            ("files that the uninterrupted run does not have", self.files_left),
            ("files missing that the uninterrupted run has", self.files_missing),
            ("segments of shared memory left", self.shared_memory_left),
        ):
            if names:
                self.problems.append(f"{len(names)} {what}: {names[0]}")
        if not self.events:
            self.problems.append("no process was killed: the run ended before the first kill")

    def data(self) -> dict[str, Any]:
        s = self.settings
        return {
            "steps": s.steps,
            "save_interval": s.save_interval,
            "engine": s.engine,
            "processes": s.processes,
            "passed": self.compared and not self.problems,
            "problems": self.problems,
            "kills": len(self.events),
            "resumes": max(0, len(self.lives) - 1),
            "equal_to_uninterrupted": self.compared and self.difference is None,
            "rows_compared": self.rows,
            "first_difference": self.difference,
            "orphans": self.orphans,
            "files_left": self.files_left,
            "files_missing": self.files_missing,
            "shared_memory_left": self.shared_memory_left,
            "victims": dict(Counter(e.kind for e in self.events)),
            "kills_in_a_checkpoint": sum(e.saving for e in self.events),
            "memory": self.memory,
            "memory_skip": s.memory_skip,
            "most_bytes_per_step": s.most_bytes_per_step,
            "seconds": {name: round(x, 1) for name, x in self.seconds.items()},
            "events": [asdict(e) for e in self.events],
        }


def say(text: str) -> None:
    print(text, flush=True)
