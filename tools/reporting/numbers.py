"""Final numbers of one run, or of several with their differences from the first."""

from __future__ import annotations

from collections.abc import Sequence

from .element import Markup, element, figures, joined, number, table
from .run_folder import Run, value
from .series import series

LAST = 10  # updates that a final number is the mean of
METRICS = (
    *("reward_mean", "loss", "grad_norm", "response_length", "truncated_fraction", "fresh/entropy_mean"),
    *("replay/entropy_mean", "fresh/ratio_mean", "replay/ratio_mean", "fresh/clip_fraction", "replay/clip_fraction"),
    *("fresh/ess", "replay/ess", "fresh/kl_mean", "replay/behavior_kl_mean", "replay/fraction", "replay/age_mean"),
    *("replay/size", "train_rollout_logprob_abs_diff", "tokens_per_second", "time/generate", "time/train"),
)
SUMMARY = (
    ("accuracy_before", "held-out accuracy before"),
    ("accuracy_after", "held-out accuracy after"),
    ("updates", "updates"),
    ("fresh_rollouts", "fresh rollouts"),
    ("replayed_rollouts", "replayed rollouts"),
    ("seconds", "seconds in all"),
)


def final_numbers(runs: Sequence[Run]) -> list[Markup]:
    """One table; where the runs end at different steps a second one, of the last step that all have."""
    ends = {run.last_step for run in runs}
    rows = [row(label, [value(run.summary, name) for run in runs]) for name, label in SUMMARY]
    out = [numbers_table(runs, None, rows, f"At the end: means of the last {LAST} updates")]
    if len(ends) > 1:
        common = min(ends)
        said = ", ".join(f"{run.name} at step {number(run.last_step)}" for run in runs)
        out.append(element("p", f"The runs end at different steps: {said}.", class_="note"))
        caption = f"At step {number(common)}, the last that all have: means of the {LAST} updates up to it"
        out.append(numbers_table(runs, common, [], caption))
    return out


def numbers_table(runs: Sequence[Run], until: int | None, first: list[list[str]], caption: str) -> Markup:
    rows = list(first)
    for name in METRICS:
        found = [series(run, name) for run in runs]
        rows.append(row(name, [s and s.mean_of_last(LAST, None if until is None else until + 1 - 1e-9) for s in found]))
    kept = [r for r in rows if any(cell != "-" for cell in r[1:])]
    if len(runs) == 1:
        return joined([element("p", caption, class_="note"), figures(kept, caption)])
    head = ["", *(run.name for run in runs), *(f"{run.name} \N{MINUS SIGN} {runs[0].name}" for run in runs[1:])]
    return table(head, kept, caption, class_="numbers")


def row(label: str, values: Sequence[float | None]) -> list[str]:
    first = values[0]
    differences = [None if v is None or first is None else v - first for v in values[1:]]
    return [label, *(number(v) for v in values), *(number(d, sign=True) for d in differences)]
