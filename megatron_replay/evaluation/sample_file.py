"""SampleFile: the records of an evaluation on disk, which a second start goes on from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_replay.evaluation.sample_record import SampleRecord


class SampleFile:
    """A first line {"settings": {...}}, then one line for each sample: benchmark by benchmark, problem by problem.

    `plan` names the problems of each benchmark in the order in which they are sampled. What a kill left behind is
    whole up to some line: of the last problem that is not, the lines are dropped. `records` are those that stay.
    Raises ValueError, naming the first setting that differs and both values, for a file of other settings, and
    PATH:LINE for a whole line that is not the one that belongs there.
    """

    def __init__(
        self, path: str | Path, settings: Mapping[str, Any], plan: Mapping[str, Sequence[int]], samples: int
    ) -> None:
        self.path = Path(path)
        self.plan = plan
        self.samples = samples
        self.records: dict[str, list[SampleRecord]] = {name: [] for name in plan}
        self._settings = json.loads(json.dumps(settings))
        end = self._read() if self.path.exists() else 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "ab")  # noqa: SIM115 - closed in close()
        self._file.truncate(end)
        if end == 0:
            self._write(json.dumps({"settings": self._settings}) + "\n")

    def done(self, benchmark: str) -> int:
        """Problems of a benchmark whose samples are all here: the first so many of its plan."""
        return len(self.records[benchmark]) // self.samples

    def append(self, benchmark: str, records: Sequence[SampleRecord]) -> None:
        """Whole problems, the next ones of the plan, in order. They are on disk when this returns."""
        expected = self._expected(benchmark, self.done(benchmark), len(records))
        if [(r.problem, r.sample) for r in records] != expected:
            raise ValueError(f"records must be the next of {benchmark}, {expected[:1]} on, got {records[:1]}")
        self._write("".join(r.to_line(benchmark) for r in records))
        self.records[benchmark] += records

    def close(self) -> None:
        self._file.close()

    def _expected(self, benchmark: str, first: int, count: int) -> list[tuple[int, int]]:
        problems = self.plan[benchmark][first : first + -(-count // self.samples)]
        return [(problem, sample) for problem in problems for sample in range(self.samples)]

    def _write(self, text: str) -> None:
        self._file.write(text.encode())
        self._file.flush()
        os.fsync(self._file.fileno())

    def _read(self) -> int:
        """Take the records that are whole; returns where they end."""
        with open(self.path, "rb") as file:
            first = file.readline()
            if not first.endswith(b"\n"):
                return 0
            self._check_settings(first)
            end = at = len(first)
            pending: list[SampleRecord] = []
            order = self._places()
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    break
                try:
                    name, record = SampleRecord.from_line(line)
                except ValueError as error:
                    raise ValueError(f"{self.path}:{number}: {error}") from error
                expected = next(order, None)
                if (name, record.problem, record.sample) != expected:
                    raise ValueError(
                        f"{self.path}:{number}: must be (benchmark, problem, sample) {expected}, "
                        f"got {(name, record.problem, record.sample)}"
                    )
                pending.append(record)
                at += len(line)
                if len(pending) == self.samples:
                    self.records[name] += pending
                    end, pending = at, []
        return end

    def _places(self) -> Iterator[tuple[str, int, int]]:
        return (
            (name, problem, sample)
            for name, problems in self.plan.items()
            for problem in problems
            for sample in range(self.samples)
        )

    def _check_settings(self, line: bytes) -> None:
        try:
            saved = json.loads(line)["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path}:1 holds no settings of an evaluation: {line[:80]!r}") from error
        for name in [*self._settings, *(x for x in saved if x not in self._settings)]:
            ours, theirs = self._settings.get(name), saved.get(name)
            if ours != theirs:
                raise ValueError(f"{self.path} was written with {name} {theirs!r}, got {ours!r}")
