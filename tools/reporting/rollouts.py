"""Sampled rollouts: prompt, response, reward, advantage and age, and each token coloured by its ratio."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from .element import Markup, element, number
from .run_folder import Row, Run, value

CLIP_EPS_LOW, CLIP_EPS_HIGH = 0.2, 0.28  # where the folder holds no flags: the defaults
TOKENS_SHOWN = 400
PROMPT_SHOWN = 2000  # characters
NO_TEXT = "\N{MIDDLE DOT}"  # a token that adds no text, such as the end of the sequence


@dataclass(frozen=True)
class Colours:
    """Seven colours of a ratio; their bounds lie around 1 and around the clip range."""

    low: float
    high: float
    assumed: bool

    @property
    def bounds(self) -> tuple[float, ...]:
        below, above = 1 - self.low, self.high - 1
        return (self.low - below, self.low, 1 - below / 4, 1 + above / 4, self.high, self.high + above)

    def of(self, ratio: float) -> int:
        # a ratio on a bound of the clip range is inside it
        b = self.bounds
        return bisect_right(b[:3], ratio) if ratio < 1 else 3 + bisect_left(b[3:], ratio)

    def outside(self, ratio: float) -> bool:
        return not self.low <= ratio <= self.high

    def names(self) -> list[str]:
        b = [number(round(x, 4)) for x in self.bounds]
        between = [f"{x} to {y}" for x, y in pairwise(b)]
        return [f"below {b[0]}", *between, f"above {b[-1]}"]


def colours(run: Run) -> Colours:
    """By the run's flags; where its folder has none, or none that make a range, by their defaults."""
    low, high = (value({"x": run.flag(f"grpo_clamp_eps_{side}")}, "x") for side in ("lower", "upper"))
    if low is None or high is None or not (0 < low < 1 and high > 0):
        return Colours(1 - CLIP_EPS_LOW, 1 + CLIP_EPS_HIGH, assumed=True)
    return Colours(1 - low, 1 + high, assumed=False)


def rollouts_section(run: Run) -> Markup | None:
    """Legend, choices and cards of one run; None where none was logged."""
    if not run.rollouts:
        return None
    scheme = colours(run)
    steps = len({r["step"] for r in run.rollouts})
    said = f"{number(len(run.rollouts))} of {number(run.rollouts_logged)} logged rollouts, of {steps} steps."
    if len(run.rollouts) < run.rollouts_logged:
        said += " The steps are spread evenly over the run."
    cards = [card(row, scheme) for row in sorted(run.rollouts, key=lambda r: (r["step"], r["kind"]), reverse=True)]
    return element(
        "section",
        element("h3", run.name),
        element("p", said, class_="note"),
        legend(scheme),
        choices(run),
        element("div", *cards, class_="cards"),
        class_="rollouts",
    )


def legend(scheme: Colours) -> Markup:
    swatches = [
        element("li", element("span", "token", class_=f"t r{i}{' out' if i in (0, 1, 5, 6) else ''}"), f" {name}")
        for i, name in enumerate(scheme.names())
    ]
    which = "defaults, since the folder holds no flags" if scheme.assumed else "this run's flags"
    clip = f"{number(round(scheme.low, 4))} to {number(round(scheme.high, 4))}"
    about = (
        f"Ratio exp(log-prob now \N{MINUS SIGN} log-prob at birth) of a token. Underlined: outside the clip range "
        f"{clip} ({which}). Hover over a token, or focus the tokens and use the arrow keys, to read its numbers."
    )
    return element("div", element("p", about), element("ul", *swatches, class_="legend"), class_="ratios")


def choices(run: Run) -> Markup:
    """What the script uses to leave out cards; without it all are there."""
    kinds = sorted({r["kind"] for r in run.rollouts})
    steps = sorted({r["step"] for r in run.rollouts}, reverse=True)

    def choice(name: str, values: Sequence[object]) -> Markup:
        options = [element("option", "all", value=""), *(element("option", str(v), value=str(v)) for v in values)]
        return element("label", f"{name} ", element("select", *options, data_choice=name))

    shown = element("output", class_="shown")
    return element("p", choice("kind", kinds), choice("step", steps), shown, class_="choices", hidden=True)


def card(row: Row, scheme: Colours) -> Markup:
    title = f"step {number(row['step'])}, age {number(row['age'])}"
    facts = [
        ("reward", number(value(row, "reward"))),
        ("advantage", number(value(row, "advantage"), sign=True)),
        ("born", number(row["birth_step"])),
        ("tokens", number(len(row["tokens"]))),
        ("uid", str(row["uid"])),
    ]
    prompt = row["prompt"]
    cut = len(prompt) > PROMPT_SHOWN
    part = f" (the first {number(PROMPT_SHOWN)} of {number(len(prompt))} characters)" if cut else ""
    # a word that is no kind looks like replay, and says what it is
    look = "fresh" if row["kind"] == "fresh" else "replay"
    return element(
        "article",
        element("h4", element("span", row["kind"], class_=f"kind {look}"), f" {title}"),
        element("ul", *(element("li", f"{k} ", element("b", v)) for k, v in facts), class_="facts"),
        element("p", f"prompt{part}", class_="label"),
        element("pre", prompt[:PROMPT_SHOWN], class_="prompt", dir="ltr", tabindex=0),
        element("p", "response", class_="label"),
        tokens(row, scheme, title),
        element("output", class_="readout"),
        class_="card",
        data_kind=row["kind"],
        data_step=row["step"],
        aria_label=f"{row['kind']}, {title}",
    )


def tokens(row: Row, scheme: Colours, title: str) -> Markup:
    spans, texts = [], row["tokens"][:TOKENS_SHOWN]
    for i, text in enumerate(texts):
        now, birth = row["logprobs_now"][i], row["logprobs_birth"][i]
        r = ratio(now, birth)
        look = "none" if r is None else f"r{scheme.of(r)}{' out' if scheme.outside(r) else ''}"
        spans.append(
            element(
                "span",
                text or NO_TEXT,
                class_=f"t {look}" if text else f"t {look} empty",
                tabindex=0 if i == 0 else -1,
                data_r="unknown" if r is None else f"{r:.4g}",
                data_now=logprob(now),
                data_birth=logprob(birth),
            )
        )
    if len(row["tokens"]) > TOKENS_SHOWN:
        left = len(row["tokens"]) - TOKENS_SHOWN
        spans.append(element("span", f" {number(left)} more tokens are not shown", class_="note"))
    if not texts:
        spans.append(element("span", "no tokens", class_="note"))
    return element("div", *spans, class_="tokens", dir="ltr", role="group", aria_label=f"tokens of {title}")


def logprob(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"


def ratio(now: float | None, birth: float | None) -> float | None:
    """exp(now - birth); None where one is not a finite number, infinity where the ratio is too large for a number."""
    if now is None or birth is None or not (math.isfinite(now) and math.isfinite(birth)):
        return None
    try:
        return math.exp(now - birth)
    except OverflowError:
        return math.inf
