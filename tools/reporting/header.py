"""What a run was: length, layout, flags and versions, as far as its folder says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .element import Markup, element, figures, number, table
from .run_folder import Run

UNKNOWN = "not in this folder"


def facts_table(runs: Sequence[Run]) -> Markup:
    rows = [[label, *(cells[i] for cells in map(facts, runs))] for i, label in enumerate(LABELS)]
    if len(runs) == 1:
        return figures(rows, "Run")
    return table(["", *(run.name for run in runs)], rows, "Runs")


LABELS = ("folder", "steps", "updates", "state", "layout", "seed, task", "versions", "rollouts logged")


def facts(run: Run) -> list[str]:
    s = run.summary
    # a part of the layout that is not in the summary may be in a checkpoint
    parts = {
        "TP": s.get("tensor_parallel"),
        "PP": s.get("pipeline_parallel"),
        "DP": s.get("data_parallel", run.saved.get("data_parallel")),
    }
    layout = [f"{name} {size}" for name, size in parts.items() if size is not None]
    fixed = run.saved.get("fixed")
    known = fixed if isinstance(fixed, dict) else {}
    start = [f"{name} {known[name]}" for name in ("--seed", "--rl-task", "--grpo-group-size") if name in known]
    versions = run.facts.get("versions")
    shown = len(run.rollouts)
    return [
        run.folder.name,
        f"{number(run.rows[0]['step'])} to {number(run.last_step)}",
        number(len(run.rows)),
        "ended" if s else "no summary.json: still running, or stopped",
        " x ".join(layout) or UNKNOWN,
        ", ".join(start) or UNKNOWN,
        ", ".join(f"{k} {v}" for k, v in versions.items()) if isinstance(versions, dict) else UNKNOWN,
        f"{number(run.rollouts_logged)}, {number(shown)} shown" if run.rollouts_logged else UNKNOWN,
    ]


def flags_tables(runs: Sequence[Run]) -> Markup | None:
    """All flags; for several runs those that differ come first."""
    flags = [run.facts.get("flags") for run in runs]
    known = [f if isinstance(f, dict) else {} for f in flags]
    names = sorted(set().union(*known))
    if not names:
        return None
    different = [n for n in names if len({written(k.get(n)) for k in known}) > 1]
    same = [n for n in names if n not in different]
    head = ["flag", *(run.name for run in runs)]

    def rows(chosen: Sequence[str]) -> list[list[str]]:
        return [[n, *(written(k[n]) if n in k else "-" for k in known)] for n in chosen]

    tables = []
    if len(runs) > 1:
        differ = table(head, rows(different), "Flags that differ") if different else element("p", "No flag differs.")
        tables.append(differ)
    every = table(head, rows(same), "Flags" if len(runs) == 1 else "Flags that are the same")
    tables.append(element("details", element("summary", f"{len(same)} flags"), every))
    return element("div", *tables)


def written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
