"""What must be equal in two runs: every number of every row but those of a clock, and the names of the files."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# the engine's own: a killed one is counted, and pushed to again
OF_THE_ENGINE = ("engine/", "sync/")


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows without what a clock measures."""
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"} for row in rows]


def first_difference(expected: Sequence[Row], got: Sequence[Row], *, left_out: Sequence[str] = ()) -> Row | None:
    """{step, key, uninterrupted, soak} of the first number that differs, or None; None stands for what is not there.

    Keys that begin with one of `left_out` are not looked at.
    """
    pairs = zip(comparable(expected), comparable(got), strict=False)
    for number, (one, other) in enumerate(pairs):
        for key in dict.fromkeys((*one, *other)):
            if key.startswith(tuple(left_out)) or (key in one and key in other and same(one[key], other[key])):
                continue
            return difference(one.get("step", number), key, one.get(key), other.get(key))
    if len(expected) != len(got):
        return difference(min(len(expected), len(got)), "rows", len(expected), len(got))
    return None


def same(one: Any, other: Any) -> bool:
    """Equal, bit for bit; NaN equals NaN."""
    return one == other or (one != one and other != other)


def difference(step: int | None, key: str, expected: Any, got: Any) -> Row:
    return {"step": step, "key": key, "uninterrupted": expected, "soak": got}


def summary_difference(expected: Path, got: Path) -> Row | None:
    """Of the two summary.json, but for the seconds."""
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (expected, got))
    for key in dict.fromkeys((*one, *other)):
        if key != "seconds" and not (key in one and key in other and same(one[key], other[key])):
            return difference(None, f"summary.json {key}", one.get(key), other.get(key))
    return None


def files(folder: Path) -> set[str]:
    """Every file and empty folder below, by a name that is the same in all runs.

    TensorBoard begins a file in each process, named by time, host and process.
    """
    paths = (x for x in folder.rglob("*") if not x.is_dir() or not any(x.iterdir()))
    return {re.sub(r"events\.out\.tfevents\..*", "events", str(x.relative_to(folder))) for x in paths}
