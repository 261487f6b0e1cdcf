"""The page: sections, one style and one script in one file that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path

from .bands import phase_times
from .element import Child, Markup, element, joined, number, table
from .findings import findings
from .header import facts_table, flags_tables
from .histogram import histogram, tally
from .numbers import final_numbers
from .panels import BUFFER, ENGINE, LEARNING, OFF_POLICY, age_profiles, charts, stored_and_drawn
from .rollouts import rollouts_section
from .run_folder import Run

HERE = Path(__file__).resolve().parent
# field of a row of draws, title, name of its axis
DISTRIBUTIONS = (("advantage", "|Advantage|", "|A|"), ("age", "Age", "age"))


def page(runs: Sequence[Run]) -> str:
    """HTML of one run, or of several beside each other."""
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{runs[0].name} and {len(runs) - 1} more runs"
    # sections come first: what they leave out is a note
    sections = [
        section("numbers", "Final numbers", final_numbers(runs)),
        section("learning", "Learning", [grid(charts(LEARNING, runs))]),
        section(
            "off-policy",
            "Fresh and replayed rollouts",
            [lead("Behavior log-probs are those at birth, for both parts."), grid(charts(OFF_POLICY, runs))],
        ),
        section("age", "By age", [grid(age_profiles(runs))]),
        section("buffer", "Buffer and draw", [grid([*charts(BUFFER, runs), *draws(runs)])]),
        section("time", "Time", [grid(times(runs))]),
        section("engine", "Engine and weight sync", [grid(charts(ENGINE, runs))]),
        section("rollouts", "Rollouts", samples(runs)),
    ]
    flags = flags_tables(runs)
    if flags is not None:
        sections.append(section("flags", "Flags", [flags]))
    first = section("warnings", "Skipped updates and warnings", [well_or_not(run) for run in runs])
    links = [element("li", element("a", name, href=f"#{id_}")) for id_, name, _ in (first, *sections)]
    body = [
        element(
            "header",
            element("h1", title),
            element("p", headline(runs), class_="lead"),
            facts_table(runs),
        ),
        element("nav", element("ul", *links), aria_label="sections"),
        element("main", *(html for _, _, html in (first, *sections))),
    ]
    return document(title, body)


def document(title: str, body: Sequence[Child]) -> str:
    style, script = (Markup((HERE / name).read_text()) for name in ("page.css", "page.js"))
    # text of a run can start nothing, since only this style and this script may
    allowed = f"style-src {source(style)}; script-src {source(script)}"
    policy = f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("style", style),
    )
    return f"<!doctype html>\n{element('html', head, element('body', *body, element('script', script)), lang='en')}\n"


def source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def section(id_: str, title: str, children: Sequence[Child]) -> tuple[str, str, Markup]:
    return id_, title, element("section", element("h2", title), *children, id=id_)


def grid(children: Sequence[Child]) -> Markup:
    return element("div", *children, class_="charts")


def lead(text: str) -> Markup:
    return element("p", text, class_="lead")


def headline(runs: Sequence[Run]) -> str:
    """The one line to read."""
    said = []
    for run in runs:
        before, after = (run.summary.get(f"accuracy_{name}") for name in ("before", "after"))
        name = f"{run.name}: " if len(runs) > 1 else ""
        if isinstance(before, (int, float)) and isinstance(after, (int, float)):
            said.append(
                f"{name}held-out accuracy {before:.3f} before and {after:.3f} after {number(len(run.rows))} updates"
            )
        else:
            said.append(f"{name}{number(len(run.rows))} updates")
    return "; ".join(said)


def well_or_not(run: Run) -> Markup:
    found = findings(run)
    rows = [(f.what, number(f.count), f.where) for f in found]
    known = table(("finding", "count", "steps"), rows, f"Findings of {run.name}") if rows else None
    all_well = f"{run.name}: no update was skipped, and its numbers give no warning."
    well = None if rows else element("p", all_well, class_="well")
    notes = element("ul", *(element("li", note) for note in run.notes)) if run.notes else None
    read = element("div", f"While reading {run.name}:", notes, class_="read") if notes else None
    return joined([known, well, read])


def draws(runs: Sequence[Run]) -> list[Child]:
    figures: list[Child] = [stored_and_drawn(runs)]
    for run in runs:
        for field, title, x_label in DISTRIBUTIONS:
            found = tally(run, field)
            if found is None:
                continue
            whose = f"{title} of the stored and the drawn" + (f": {run.name}" if len(runs) > 1 else "")
            about = f"{number(sum(found.counts['drawn']))} drawn, over all steps that drew"
            figures.append(histogram(whose, found, about, x_label))
    return figures


def times(runs: Sequence[Run]) -> list[Child]:
    figures = [(run, phase_times(run)) for run in runs]
    missing = [run.name for run, figure in figures if figure is None]
    note = element("p", f"No seconds of phases in {', '.join(missing)}.", class_="note") if missing else None
    return [*(figure for _, figure in figures), note]


def samples(runs: Sequence[Run]) -> list[Child]:
    parts = [(run, rollouts_section(run)) for run in runs]
    missing = [run.name for run, part in parts if part is None]
    note = element("p", f"No rollouts are logged in {', '.join(missing)}.", class_="note") if missing else None
    return [*(part for _, part in parts), note]
