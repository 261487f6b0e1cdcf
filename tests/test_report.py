"""tools/report.py: what stands on the page of a run, that untrusted text stays text, and what a browser makes of it."""

from __future__ import annotations

import html.parser
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_replay import rollout_log, telemetry
from tests.browser import Browser, missing
from tests.launch import ROOT
from tools.reporting.element import VOID, element, number, plain, visible
from tools.reporting.findings import findings, ranges
from tools.reporting.page import page
from tools.reporting.rollouts import CLIP_EPS_HIGH, CLIP_EPS_LOW, TOKENS_SHOWN, Colours, ratio
from tools.reporting.run_folder import DRAWS_FILE, METRICS_FILE, ROLLOUTS_FILE, ROLLOUTS_SHOWN, Run, RunError, read_run
from tools.reporting.series import POINTS, Series, averaged, series, thinned

needs_browser = pytest.mark.skipif(missing() is not None, reason=str(missing()))
MINUS = "\N{MINUS SIGN}"
HOSTILE = (
    "</script><script>window.pwned = 1</script>",
    '"><img src=x onerror="window.pwned = 1">',
    "' onfocus='window.pwned = 1' autofocus='",
    "<!--",
    "]]>",
    "&lt;b&gt;",
    "\N{RIGHT-TO-LEFT OVERRIDE}drawkcab",
    "zero\N{ZERO WIDTH SPACE}width",
    "nul\0 bell\a escape\x1b[31m",
    "lone \ud800 surrogate",
    "line\u2028end",
)


class Reader(html.parser.HTMLParser):
    """The page as a tree is built of it: every tag that opens closes; `text` is what stands in none of the scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] not in (["script"], ["style"]):
            self.text += data

    def count(self, tag: str, word: str = "") -> int:
        """Tags, of those the ones with a word in their class."""
        return sum(t == tag and (not word or word in (a.get("class") or "").split()) for t, a in self.tags)


def metrics(step: int, **more: Any) -> dict[str, Any]:
    drawn = 4 if step >= 3 else 0
    row: dict[str, Any] = {"step": step, "iteration": 0, "reward_mean": step / 100, "loss": 0.5 - step / 50}
    row |= {"replay/draw_size": drawn, "replay/draw_requested": drawn, "replay/age_mean": 2.5 if drawn else 0.0}
    row |= {"replay/size": 8 * step, "replay/stored_age_mean": 2.0, "fresh/kl_mean": 0.0, "replay/kl_mean": 0.0}
    for part, rollouts in (("fresh", 8), ("replay", drawn)):
        row |= {f"{part}/rollouts": rollouts, f"{part}/ess": 0.9 - step / 1000 if rollouts else 0.0}
        row |= {f"{part}/ratio_max": 1.5 + step if rollouts else 0.0}
    row |= {"age_00/ess": 1.0, "age_01/ess": 0.8, "time/generate": 0.5, "time/train": 0.25 + step / 100}
    return row | more


def rollout(step: int, uid: int, **more: Any) -> dict[str, Any]:
    row = {"step": step, "kind": "replay" if uid % 2 else "fresh", "uid": uid, "birth_step": step - uid % 2}
    row |= {"age": uid % 2, "reward": 1.0, "advantage": -0.5, "prompt": f"prompt {uid}", "tokens": ["a", " b", ""]}
    return row | {"logprobs_birth": [-1.0, -1.0, -1.0], "logprobs_now": [-1.0, -0.5, -2.0]} | more


def draws(step: int, drawn: list[int]) -> dict[str, Any]:
    part = {"age": [0, 4, 4], "advantage_abs_mean": 0.6}
    stored = {"rollouts": 8, "advantage": [6, 2, 0]} | part
    one = {"rollouts": sum(drawn), "advantage": drawn} | part | {"age": [0, 1, 3]}
    return {"step": step, "advantage_edges": [0.0, 1.0, 2.0], "age_edges": [0, 1, 2], "stored": stored, "drawn": one}


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(folder: Path, steps: int = 20, **more: Any) -> Path:
    """A run folder with all its files."""
    write(folder, "metrics.jsonl", [metrics(s, **more) for s in range(steps)])
    write(folder, "rollouts.jsonl", [rollout(s, 4 * s + i) for s in range(0, steps, 10) for i in range(4)])
    write(folder, "draws.jsonl", [draws(s, [1, 3, 0]) for s in range(3, steps)])
    summary = {"accuracy_before": 0.125, "accuracy_after": 0.5, "tensor_parallel": 2, "seconds": 9.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    facts = {"flags": {"lr": 0.001, "grpo_clamp_eps_lower": 0.1, "grpo_clamp_eps_upper": 0.3}}
    (folder / "run.json").write_text(json.dumps(facts | {"versions": {"torch": "2.13.0"}}))
    return folder


def read(*folders: Path) -> Reader:
    return Reader(page([read_run(f) for f in folders]))


def tool(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "report.py"), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)


def test_the_page_holds_all_that_the_folder_does(tmp_path: Path) -> None:
    found = read(make(tmp_path / "run"))
    for words in ("held-out accuracy 0.125 before and 0.500 after 20 updates", "TP 2", "torch 2.13.0", "lr0.001"):
        assert words in found.text, words
    assert found.count("article") == 8 and found.count("span", "t") == 8 * 3 + 7
    for title in ("Reward", "Effective sample size", "Ratio, largest", "Seconds of a step", "Age of the stored"):
        assert title in found.text, title
    assert "no update was skipped" in found.text
    assert "The same at every update, so without a chart: fresh/kl_mean, replay/kl_mean (0)" in found.text
    assert "Not in this run, or about no rollout of it: fresh/loss, replay/loss" in found.text
    assert "clip range 0.9 to 1.3 (this run's flags)" in found.text
    # what only the eye would find is in words too
    svgs = [a for t, a in found.tags if t == "svg" and a.get("role") == "img"]
    assert svgs and all(a["aria-label"] for a in svgs)
    reward = next(a["aria-label"] or "" for a in svgs if (a["aria-label"] or "").startswith("Reward."))
    assert "training prompts: 0 at step 0, 0.19 at step 19, between 0 and 0.19" in reward


def test_the_page_asks_for_nothing_and_stays_small(tmp_path: Path) -> None:
    text = page([read_run(make(tmp_path / "run", steps=5000))])
    assert len(text) < 2_000_000
    found = Reader(text)
    assert not [a for _, a in found.tags if {"src", "srcset", "data"} & a.keys()]
    assert all((a["href"] or "").startswith("#") for t, a in found.tags if t == "a")
    assert found.count("script") == 1 and "url(" not in text and "@import" not in text
    assert f"at most {POINTS:,} of 5,000 points" in found.text
    assert f"{ROLLOUTS_SHOWN} of 2,000 logged rollouts" in found.text


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_of_a_run_stays_text(tmp_path: Path, hostile: str) -> None:
    folder = make(tmp_path / "run", **{f"time/{hostile}": 1.0, f"age_00/{hostile}": 1.0, hostile: None})
    bad = {"prompt": hostile, "tokens": [hostile] * 3, "kind": hostile}
    write(folder, "rollouts.jsonl", [rollout(0, 0, **bad), rollout(0, 1, **bad | {"tokens": hostile})])
    facts = {"flags": {hostile: hostile, "list": [hostile]}, "versions": {hostile: hostile}}
    (folder / "run.json").write_text(json.dumps(facts))
    run = read_run(folder, name=hostile)
    run.notes.append(hostile)
    text = page([run, read_run(make(tmp_path / "other"))])
    text.encode()
    found = Reader(text)
    assert found.count("script") == 1 and found.count("img") == 0
    assert not [k for _, a in found.tags for k in a if k.startswith("on")]
    # nothing that acts unseen is left; a line end is the only control
    assert not re.search("[\0-\x09\x0b-\x1f\x7f\u200b\u2028\u202e\ud800]", text)
    seen = "".join(f"U+{ord(c):04X}" if c in "\0\a\x1b\u200b\u2028\u202e\ud800" else c for c in hostile)
    # in the prompt, in each token, and as the kind
    assert found.text.count(seen) >= 6


def test_bytes_that_are_no_text_are_shown(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    line = json.dumps(rollout(0, 0, prompt="PLACE")).encode().replace(b"PLACE", b"caf\xe9\xff")
    (folder / "rollouts.jsonl").write_bytes(line + b"\n")
    assert "caf\\xE9\\xFF" in read(folder).text


def test_a_line_that_a_kill_cut_off_is_skipped_and_said(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    for name in ("metrics.jsonl", "rollouts.jsonl", "draws.jsonl"):
        with open(folder / name, "a") as file:
            file.write('{"step": 20, "rew')
    found = read(folder)
    for name, line in (("metrics.jsonl", 21), ("rollouts.jsonl", 9), ("draws.jsonl", 18)):
        assert f"{name}: line {line}, the last, is cut off, as a kill leaves it; it is skipped" in found.text
    assert "steps0 to 19" in found.text


@pytest.mark.slow
def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    empty, none, damaged = tmp_path / "empty", tmp_path / "none", make(tmp_path / "damaged")
    write(empty, "metrics.jsonl", [])
    none.mkdir()
    (damaged / "metrics.jsonl").write_text('{"step": 0}\nnot json\n{"step": 2}\n')
    for folder, words in (
        (tmp_path / "absent", "there is no such folder"),
        (none, "has no metrics.jsonl"),
        (empty, "metrics.jsonl holds no update"),
        (damaged, "metrics.jsonl:2 is no JSON object with a step: b'not json"),
    ):
        done = tool(folder)
        assert done.returncode == 2 and done.stdout == "", done
        assert done.stderr.count("\n") == 1 and str(folder) in done.stderr and words in done.stderr
    assert not list(tmp_path.rglob("*.html"))


def test_files_are_named_as_the_package_names_them() -> None:
    assert (METRICS_FILE, ROLLOUTS_FILE, DRAWS_FILE) == (
        telemetry.METRICS_FILE,
        rollout_log.ROLLOUTS_FILE,
        rollout_log.DRAWS_FILE,
    )


@pytest.mark.slow
def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", steps=12)
    (two / "summary.json").unlink()
    done = tool(one)
    assert done.returncode == 0 and done.stdout.startswith(f"{one}/report.html: ") and done.stderr == ""
    done = tool(one, two)
    assert done.stdout.startswith(f"{one}/comparison.html: ")
    assert done.stderr == "two: no summary.json: the run has not ended, or was stopped\n"
    for args, words in (
        ((one, one), f"RUN {one} is given twice"),
        ((one,) * 7, "RUN must be given at most 6 times, got 7"),
        ((one, "--out", tmp_path / "no" / "x.html"), f"--out {tmp_path}/no/x.html: No such file or directory"),
    ):
        done = tool(*args)
        assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_runs_beside_each_other(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two", steps=12, **{"engine/tokens": 7.0, "reward_mean": 0.5})
    (two / "rollouts.jsonl").unlink()
    (two / "draws.jsonl").unlink()
    found = read(one, two)
    assert "The runs end at different steps: one at step 19, two at step 11." in found.text
    assert "At step 11, the last that all have" in found.text
    # means of the last ten: of one at the end, of two, their difference; then of one at the common step
    assert "reward_mean0.1450.5+0.355" in found.text and "reward_mean0.0650.5+0.435" in found.text
    assert "engine/tokens of one" in found.text
    assert "No rollouts are logged in two." in found.text
    assert "no draws.jsonl: no distributions of what was stored and drawn" in found.text
    labels = [a["data-label"] for t, a in found.tags if t == "path" and "data-label" in a]
    assert {"one", "two", "one: fresh", "two: replay"} <= set(labels)


def test_what_is_0_for_want_of_a_rollout_is_no_point(tmp_path: Path) -> None:
    run = read_run(make(tmp_path / "run"))
    for name in ("replay/ess", "replay/age_mean"):
        found = series(run, name)
        assert found is not None and found.x == list(range(3, 20)), name
    whole = series(run, "replay/draw_size")
    assert whole is not None and len(whole.x) == 20
    assert series(run, "replay/loss") is None
    rows = [metrics(s, iteration=i) for s in range(2) for i in range(4)]
    again = series(Run("", tmp_path, rows), "loss")
    assert again is not None and again.x == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


def test_thinning_keeps_the_extremes_and_the_gaps() -> None:
    n = 50_000
    y: list[float | None] = [math.sin(i / 900) for i in range(n)]
    y[33_333], y[41_000] = 40.0, -40.0
    y[10_000:12_000] = [None] * 2000
    found = thinned(Series(range(n), y))
    assert len(found.x) <= POINTS and found.x == sorted(found.x)
    assert (33_333, 40.0) in found.points and (41_000, -40.0) in found.points
    assert None in found.y and not [x for x, _ in found.points if 10_000 <= x < 12_000]
    short = Series(range(POINTS), y[:POINTS])
    assert thinned(short) is short
    assert averaged([[1.0, 3.0, 5.0, 7.0]], 2) == [[2.0, 6.0]] and averaged([[1.0, 3.0]], 9) == [[1.0, 3.0]]


def test_numbers_that_are_none_are_gaps_and_said(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    rows = [metrics(s, loss={5: math.nan, 6: None, 7: "x"}.get(s, 1.0 + s)) for s in range(20)]
    write(folder, "metrics.jsonl", rows)
    run, found = read_run(folder), read(folder)
    assert "3 values that are not finite are left out" in found.text
    assert "updates whose loss is not a finite number" in [f.what for f in findings(run)]
    path = next(a["d"] or "" for t, a in found.tags if a.get("data-label") == "global batch")
    assert path.count("M") == 2 and path.count("L") == 15


def test_findings_count_and_say_where(tmp_path: Path) -> None:
    rows = [metrics(s) for s in range(12) if s not in (4, 5)]
    rows[2]["update_skipped"] = rows[3]["update_skipped"] = 1.0
    rows[6]["dropped_rewards"], rows[8]["dropped_rewards"] = 2, 3
    rows[9]["replay/draw_requested"] = 9
    rows.append(metrics(11))
    found = {f.what: (f.count, f.where) for f in findings(Run("", tmp_path, rows))}
    assert [v for k, v in found.items() if "(update_skipped)" in k] == [(2, "2-3")]
    assert [v for k, v in found.items() if "(dropped_rewards)" in k] == [(5, "8, 10")]
    assert found["updates that drew fewer rollouts than asked for"] == (1, "11")
    assert found["steps without a row"] == (2, "4-5") and found["updates that stand more than once"] == (1, "11")
    assert len(found) == 5
    assert ranges(range(0, 40, 2), most=2) == "0, 2, and 18 more"


def test_long_rollouts_and_many_are_cut_and_said(tmp_path: Path) -> None:
    folder = make(tmp_path / "run")
    n = TOKENS_SHOWN + 50
    long = {"tokens": ["x"] * n, "logprobs_now": [None] * n, "logprobs_birth": [-1.0] * n, "prompt": "p" * 3000}
    write(folder, "rollouts.jsonl", [rollout(s, 9 * s + i, **long) for s in range(60) for i in range(9)])
    run, found = read_run(folder), read(folder)
    assert {r["step"] for r in run.rollouts} == {0, 15, 30, 44, 59} and len(run.rollouts) == 45
    assert "45 of 540 logged rollouts, of 5 steps" in found.text
    assert "50 more tokens are not shown" in found.text and "the first 2,000 of 3,000 characters" in found.text
    write(folder, "rollouts.jsonl", [rollout(0, 1, logprobs_now=[1.0]), rollout(0, 2, age="x"), rollout(0, 3)])
    note = "rollouts.jsonl: 2 rollouts are skipped; the first: one of step 0 has not one of logprobs_now for each token"
    assert note in read_run(folder).notes


def test_a_colour_is_that_of_the_ratio() -> None:
    scheme = Colours(1 - CLIP_EPS_LOW, 1 + CLIP_EPS_HIGH, assumed=True)
    assert scheme.bounds == pytest.approx((0.6, 0.8, 0.95, 1.07, 1.28, 1.56))
    at = {
        0.0: 0,
        0.59: 0,
        0.7: 1,
        scheme.low: 2,
        0.94: 2,
        0.96: 3,
        1.0: 3,
        1.06: 3,
        1.1: 4,
        scheme.high: 4,
        1.5: 5,
        9.0: 6,
    }
    assert {r: scheme.of(r) for r in at} == at
    # outside exactly where the colour is one of the two outer pairs
    assert {r: scheme.outside(r) for r in at} == {r: c in (0, 1, 5, 6) for r, c in at.items()}
    assert ratio(-0.5, -1.0) == math.exp(0.5) and ratio(None, 0.0) is None and ratio(math.nan, 0.0) is None
    assert ratio(5000.0, 0.0) == math.inf


def test_markup_escapes_what_is_no_markup() -> None:
    assert element("a", "<b>", element("i", "x"), None, 3, href='"&', class_="c", hidden=False, open=True) == (
        '<a href="&quot;&amp;" class="c" open>&lt;b&gt;<i>x</i>3</a>'
    )
    assert plain("a\nb\x00\udcff") == "a\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}bU+0000\\xFF"
    assert (
        visible("\N{GREEK SMALL LETTER PI} \N{HEBREW LETTER ALEF}")
        == "\N{GREEK SMALL LETTER PI} \N{HEBREW LETTER ALEF}"
    )
    shown = [number(x) for x in (0, 1234, 12345.6, 1213.4, 0.00012346, None, -2.5)]
    assert shown == ["0", "1,234", "12,346", "1,213", "0.0001235", "-", "\N{MINUS SIGN}2.5"]
    assert [number(x, sign=True) for x in (0.0, 1.5, -1.5)] == ["0", "+1.5", "\N{MINUS SIGN}1.5"]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A hostile run beside a tame one, in the browser."""
    folder = tmp_path_factory.mktemp("pages")
    run = make(folder / "run")
    texts = [rollout(0, i, prompt=text, tokens=[text, "b", "c"]) for i, text in enumerate(HOSTILE)]
    write(run, "rollouts.jsonl", texts + [rollout(10, 40 + i) for i in range(2)])
    out = folder / "page.html"
    done = tool(run, "--out", out)
    assert done.returncode == 0, done.stderr
    with Browser() as browser:
        browser.open(out)
        yield browser


def pixels(png: bytes) -> np.ndarray:
    import matplotlib.image

    return (matplotlib.image.imread(io.BytesIO(png))[..., :3] * 255).round().astype(np.uint8)


@pytest.mark.slow
@needs_browser
def test_a_browser_shows_curves_and_rollouts(opened: Browser) -> None:
    visible_ = "[...document.querySelectorAll('{}')].filter((x) => x.getBoundingClientRect().width > 0).length"
    assert opened.evaluate(visible_.format("path.curve")) == opened.evaluate(
        "document.querySelectorAll('path.curve').length"
    )
    charts = opened.evaluate("[...document.querySelectorAll('figcaption strong')].map((x) => x.textContent)")
    assert len(charts) == len(set(charts)) >= 12
    # reward, loss; largest ratio and sample size of both parts, by age in two thirds; size, drawn, age, |advantage|
    expected = 2 + 2 + 2 + 2 + 1 + 2 + 2 + 2
    assert opened.evaluate("document.querySelectorAll('figure.chart[tabindex] path.curve').length") == expected
    assert opened.evaluate(visible_.format(".card")) == len(HOSTILE) + 2
    assert opened.evaluate("document.documentElement.scrollWidth") <= 1280
    assert opened.evaluate("window.pwned") is None
    assert opened.problems == [] and len(opened.requests) == 1 and opened.requests[0].startswith("file://")


@pytest.mark.slow
@needs_browser
def test_the_keyboard_reads_a_token(opened: Browser) -> None:
    readout = "document.activeElement.closest('.card').querySelector('.readout').textContent"
    for _ in range(200):
        opened.press("Tab")
        if opened.evaluate("document.activeElement.matches('.card[data-step=\"10\"] .t')"):
            break
    assert opened.evaluate(readout) == f"token 1 of 3 “a”: ratio 1 = exp(-1 {MINUS} (-1))"
    opened.press("ArrowRight")
    assert opened.evaluate(readout) == f"token 2 of 3 “ b”: ratio 1.649 = exp(-0.5 {MINUS} (-1))"
    assert opened.evaluate("document.activeElement.matches('.r6.out:focus-visible')")
    # one stop for all tokens of a rollout, the one that was last read
    stops = "[...document.activeElement.parentNode.querySelectorAll('.t')].map((x) => x.tabIndex)"
    assert opened.evaluate(stops) == [-1, 0, -1]
    opened.press("Tab")
    assert not opened.evaluate("document.activeElement.matches('.t:not(:first-child)')")


@pytest.mark.slow
@needs_browser
def test_the_keyboard_reads_a_curve(opened: Browser) -> None:
    figure = "[...document.querySelectorAll('figure.chart')].find((x) => x.textContent.startsWith('Reward'))"
    opened.evaluate(f"{figure}.focus()")
    values = f"[...{figure}.querySelectorAll('.value, .where')].map((x) => x.textContent)"
    for key, expected in (("ArrowRight", ["0", "step 0"]), ("ArrowRight", ["0.01", "step 1"])):
        opened.press(key)
        assert opened.evaluate(values) == expected
    for _ in range(30):
        opened.press("ArrowRight")
    assert opened.evaluate(values) == ["0.19", "step 19"]
    opened.press("Home")
    assert opened.evaluate(values) == ["0", "step 0"]
    opened.evaluate("document.activeElement.blur()")
    assert opened.evaluate(values) == ["", ""]
    # an axis that does not begin at 0, and a curve that begins later
    values = values.replace("startsWith('Reward')", "startsWith('Effective')")
    opened.evaluate(f"{figure.replace('Reward', 'Effective')}.focus()")
    opened.press("ArrowRight")
    assert opened.evaluate(values) == ["0.9", "", "step 0"]


@pytest.mark.slow
@needs_browser
def test_choices_leave_out_rollouts(opened: Browser) -> None:
    choose = (
        "(() => {{ const select = document.querySelector('[data-choice={}]'); select.value = '{}'; "
        "select.dispatchEvent(new Event('change', {{bubbles: true}})); }})()"
    )
    shown = "[...document.querySelectorAll('.card')].filter((x) => x.getBoundingClientRect().width > 0).length"
    for name, value, count in (
        ("step", "10", 2),
        ("kind", "fresh", 1),
        ("step", "", len(HOSTILE) // 2 + 2),
        ("kind", "", len(HOSTILE) + 2),
    ):
        opened.evaluate(choose.format(name, value))
        assert opened.evaluate(shown) == count, (name, value)


@pytest.mark.slow
@needs_browser
def test_what_is_seen_on_screen_and_on_paper(opened: Browser) -> None:
    shots = {}
    for scheme in ("light", "dark"):
        with opened.media(scheme=scheme):
            opened.evaluate("document.getElementById('learning').scrollIntoView()")
            shots[scheme] = pixels(opened.screenshot())
    for scheme, shot in shots.items():
        assert len(np.unique(shot.reshape(-1, 3), axis=0)) > 50, scheme
        # the first curve's colour is there, and most is background
        color = {"light": (11, 98, 196), "dark": (108, 176, 255)}[scheme]
        assert (np.abs(shot.astype(int) - np.array(color)).sum(-1) < 12).sum() > 100, scheme
    assert shots["light"].mean() > 200 and shots["dark"].mean() < 60
    for width in (1280, 800, 420):
        opened.resize(width, 900)
        assert opened.evaluate("document.documentElement.scrollWidth") <= width
    opened.resize(1280, 900)
    pdf = opened.print_to_pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    assert opened.problems == []


def test_a_missing_browser_says_what_installs_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tests.browser.PROGRAM", tmp_path / "chromium")
    assert (missing() or "").endswith("run `make browser`")


@pytest.mark.slow
def test_a_run_without_a_name_of_its_own(tmp_path: Path) -> None:
    done = tool(make(tmp_path / "a" / "run"), make(tmp_path / "b" / "run"), "--out", tmp_path / "x.html")
    assert done.returncode == 0
    assert "a/run and b/run" in (tmp_path / "x.html").read_text()
    with pytest.raises(RunError):
        read_run(tmp_path / "c")
