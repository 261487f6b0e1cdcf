"""Run: what a run folder holds, read with care: a killed run leaves half a line, and its text is not to be trusted."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

# named as in the package, which is not imported: a page can be made where there is no torch
METRICS_FILE = "metrics.jsonl"
ROLLOUTS_FILE = "rollouts.jsonl"
DRAWS_FILE = "draws.jsonl"
FACTS_FILE = "run.json"
ROLLOUTS_SHOWN = 48
Row = dict[str, Any]


class RunError(ValueError):
    """A folder that holds no run, or a damaged one; one line that names it."""


@dataclass
class Run:
    name: str
    folder: Path
    rows: list[Row]  # of metrics.jsonl, by step and iteration
    summary: Row = field(default_factory=dict)
    facts: Row = field(default_factory=dict)  # of run.json: flags, versions, layout
    saved: Row = field(default_factory=dict)  # of the newest checkpoint's run.json
    draws: list[Row] = field(default_factory=list)
    rollouts: list[Row] = field(default_factory=list)  # those that are shown
    rollouts_logged: int = 0
    notes: list[str] = field(default_factory=list)  # what was skipped while reading, and why

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"]

    @cached_property
    def names(self) -> set[str]:
        """Every metric that some row has."""
        return set().union(*self.rows)

    @cached_property
    def x(self) -> list[float]:
        """Where each row lies on the axis: at its step, or, for a later iteration of one, between two."""
        moments = [moment(row) for row in self.rows]
        updates = 1 + max(i for _, i in moments)
        return [step + i / updates for step, i in moments]

    def flag(self, name: str) -> Any:
        """A flag's value, by its name in Python, or None where the folder does not say."""
        flags = self.facts.get("flags")
        return flags.get(name) if isinstance(flags, dict) else None


def read_run(folder: Path, name: str | None = None, most_rollouts: int = ROLLOUTS_SHOWN) -> Run:
    """Raises RunError, naming the folder, for one without a run."""
    if not folder.is_dir():
        raise RunError(f"RUN {folder}: there is no such folder")
    path = folder / METRICS_FILE
    if not path.is_file():
        raise RunError(f"RUN {folder}: has no {METRICS_FILE}")
    run = Run(name or folder.resolve().name, folder, [])
    run.rows = [row for _, row in read_lines(path, run.notes)]
    if not run.rows:
        raise RunError(f"RUN {folder}: {METRICS_FILE} holds no update")
    ordered = sorted(run.rows, key=moment)
    if ordered != run.rows:
        run.notes.append(f"{METRICS_FILE}: rows are not in the order of their steps; they are shown in it")
        run.rows = ordered
    run.summary = read_object(folder / "summary.json", run.notes, "the run has not ended, or was stopped")
    run.facts = read_object(folder / FACTS_FILE, run.notes, "flags and versions are not known")
    run.saved = newest_checkpoint(folder, run.notes)
    if (draws := folder / DRAWS_FILE).is_file():
        run.draws = [row for _, row in read_lines(draws, run.notes)]
    else:
        run.notes.append(f"no {DRAWS_FILE}: no distributions of what was stored and drawn")
    if (rollouts := folder / ROLLOUTS_FILE).is_file():
        read_rollouts(rollouts, run, most_rollouts)
    else:
        run.notes.append(f"no {ROLLOUTS_FILE}: no rollouts to show")
    return run


def moment(row: Row) -> tuple[int, int]:
    """When an update was: its step, and its place in it."""
    iteration = row.get("iteration", 0)
    return row["step"], iteration if isinstance(iteration, int) else 0


def read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Row]]:
    """(position, row) of each line. A last line that a kill cut off is skipped, and `notes` says so; raises RunError,
    naming the line, for any other that is no JSON object with a step."""
    at, number, bad = 0, 0, None
    with open(path, "rb") as file:
        for line in file:
            number += 1
            if bad is not None:
                raise RunError(bad)
            row = parsed(line)
            if row is None:
                bad = f"{path}:{number} is no JSON object with a step: {line[:80]!r}"
            else:
                yield at, row
            at += len(line)
    if bad is not None:
        notes.append(f"{path.name}: line {number}, the last, is cut off, as a kill leaves it; it is skipped")


def parsed(line: bytes) -> Row | None:
    # bytes that are no UTF-8 stay in the text, and are shown as such
    try:
        row = json.loads(line.decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        return None
    step = row.get("step") if isinstance(row, dict) else None
    return row if isinstance(step, int) and not isinstance(step, bool) else None


def read_object(path: Path, notes: list[str], absent: str) -> Row:
    """The JSON object in a file, or {} with a note."""
    if not path.is_file():
        notes.append(f"no {path.name}: {absent}")
        return {}
    try:
        value = json.loads(path.read_bytes().decode(errors="surrogateescape"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is no JSON object; it is skipped")
        return {}
    return value


def newest_checkpoint(folder: Path, notes: list[str]) -> Row:
    """run.json of the newest checkpoint, or {}."""
    found = sorted(folder.glob("checkpoints/iter_*/run.json"))
    return read_object(found[-1], notes, "") if found else {}


def read_rollouts(path: Path, run: Run, most: int) -> None:
    """Count all rollouts, and keep those that are shown: of steps spread evenly over the run, the first and last in."""
    steps: dict[int, list[int]] = {}
    problems = []
    for at, row in read_lines(path, run.notes):
        run.rollouts_logged += 1
        if (why := problem(row)) is None:
            steps.setdefault(row["step"], []).append(at)
        else:
            problems.append(f"one of step {row['step']} {why}")
    if problems:
        run.notes.append(f"{path.name}: {len(problems)} rollouts are skipped; the first: {problems[0]}")
    with open(path, "rb") as file:
        for step in spread(sorted(steps), [len(steps[s]) for s in sorted(steps)], most):
            for at in steps[step][: most - len(run.rollouts)]:
                file.seek(at)
                row = parsed(file.readline())
                assert row is not None
                run.rollouts.append(row)


def spread(steps: Sequence[int], sizes: Sequence[int], most: int) -> list[int]:
    """As many steps as have at most `most` rollouts in all, evenly apart."""
    if not steps:
        return []
    count = min(len(steps), max(1, most // max(sizes)))
    if count == 1:
        return [steps[-1]]
    return [steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)]


def problem(row: Row) -> str | None:
    """What keeps a rollout from being shown, or None."""
    for name in ("uid", "birth_step", "age"):
        if not isinstance(row.get(name), int):
            return f"has no whole {name}, got {row.get(name)!r}"
    for name in ("kind", "prompt"):
        if not isinstance(row.get(name), str):
            return f"has no text {name}, got {row.get(name)!r}"
    for name in ("reward", "advantage"):
        if value(row, name) is None and row.get(name, "") is not None:
            return f"has no number {name}, got {row.get(name)!r}"
    tokens, now, birth = (row.get(name) for name in ("tokens", "logprobs_now", "logprobs_birth"))
    if not (isinstance(tokens, list) and all(isinstance(t, str) for t in tokens)):
        return "has tokens that are no texts"
    for name, values in (("logprobs_now", now), ("logprobs_birth", birth)):
        if not (isinstance(values, list) and len(values) == len(tokens)):
            return f"has not one of {name} for each token"
        if not all(v is None or (isinstance(v, (int, float)) and not isinstance(v, bool)) for v in values):
            return f"has {name} that are no numbers"
    return None


def value(row: Row, name: str) -> float | None:
    """A finite number of a row, or None."""
    x = row.get(name)
    return x if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) else None
