"""tools/ablation.py: its arms are runs, its statistics are right, a second start goes on, and it runs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_replay.arguments import grpo_config, parse_args
from tests.launch import ROOT, environment
from tests.processes import alive, gone, wait_for

sys.path.insert(0, str(ROOT / "tools"))

from studying.arms import (
    ARMS,
    COMPARISONS,
    COSTS,
    GRPO,
    MAIN,
    OURS,
    PAIRS,
    RATES,
    SWEEPS,
    TEST_SEEDS,
    TUNING_SEEDS,
    tuned,
)  # isort: skip

from studying.comparison import arm_row, at_an_end, chosen_rates, cost_ratio, holm, interval, paired  # isort: skip
from studying.pictures import _apart  # isort: skip
from studying.table import ages_table, arms_table, markdown, pairs_table, replay_table, tuning_table  # isort: skip
from studying.fork import forked  # isort: skip
from studying.trial import RECORD, Trial, quickstart, read_record  # isort: skip
from studying.trials import perform_all  # isort: skip

TOOL = ROOT / "tools" / "ablation.py"


def record(arm: str, rate: float, seed: int, accuracy: float, **more: Any) -> dict[str, Any]:
    length = {"length_mean": 6.0, "length_correct": 6.0, "length_incorrect": None}
    return {
        "settings": {"arm": arm, "rate": rate, "seed": seed}, "accuracy": accuracy, "pass_at": {"8": 0.9}, **length,
        "fresh_rollouts": 10, "trained_tokens": 60, "cpu_seconds": 2.0, "curve": {"reward_mean": [0.1, accuracy]},
        "ages": {}, "replay": {}, **more,
    }  # fmt: skip


@pytest.mark.parametrize("arm", ARMS.values(), ids=lambda arm: arm.name)
def test_every_arm_is_a_run(arm: Any, tmp_path: Path) -> None:
    config = grpo_config(parse_args(Trial(arm.name, 4e-4, 3).flags(tmp_path)))
    replay = config.replay
    assert (replay.enabled, config.seed) == ("--rl-replay-ratio 0 " not in " ".join(arm.flags) + " ", 3)
    assert not arm.rate_of or ARMS[arm.rate_of] in tuned()
    if arm.name == OURS:
        assert (replay.priority, replay.composition, replay.replay_ratio) == ("abs-advantage", "fresh-anchored", 0.5)
        assert (replay.tau_max, replay.priority_alpha, replay.warmup_steps) == (10, 0.5, 10)


def test_the_plan_is_what_the_page_says() -> None:
    page = (ROOT / "docs" / "study.md").read_text()
    assert len(TUNING_SEEDS) >= 6 and len(TEST_SEEDS) == 16 and not set(TUNING_SEEDS) & set(TEST_SEEDS)
    assert "best of 2e-4, 3e-4, 4.5e-4, 7e-4, 1e-3 by" in page and RATES == (2e-4, 3e-4, 4.5e-4, 7e-4, 1e-3)
    assert {a for pair in PAIRS for a in pair} <= ARMS.keys() and len(set(PAIRS)) == len(PAIRS)
    assert all(f"- at equal {basis}:" in page for basis in COMPARISONS) and COSTS.keys() < COMPARISONS.keys()
    assert len(MAIN) == 10 and all(arm.rate_of for arm in SWEEPS)
    assert all(any(arm.name in pair for pair in PAIRS) for arm in MAIN + SWEEPS)


def test_the_rate_with_the_best_mean_is_taken() -> None:
    rows = [record("a", rate, seed, x) for rate, xs in ((1, (0.5, 0.25)), (2, (0.25, 0.5)), (4, (0.0, 0.25)))
            for seed, x in enumerate(xs)]  # fmt: skip
    assert chosen_rates(rows) == {"a": 1}, "of two equal means the lower rate"
    rows[2]["accuracy"] = 0.375
    assert chosen_rates(rows) == {"a": 2}
    assert at_an_end({"a": 2, "b": 4, "c": 1}, (1, 2, 4)) == ["b", "c"]
    with pytest.raises(ValueError, match="arm a must have the same seeds at each rate"):
        chosen_rates(rows[1:])


def test_differences_are_of_the_same_seed() -> None:
    a = [record("a", 1, seed, x) for seed, x in ((1, 0.5), (2, 0.7), (3, 0.3), (9, 0.0))]
    b = [record("b", 1, seed, x) for seed, x in ((3, 0.2), (2, 0.5), (1, 0.4))]
    found = paired(a + b, "a", "b", "accuracy")
    # differences 0.1, 0.2, 0.1: mean 0.4/3, standard error 0.1/3, t(0.975; 2) = 4.302653
    assert (found["seeds"], found["mean"]) == (3, pytest.approx(0.4 / 3))
    assert found["ci95"] == pytest.approx([0.4 / 3 - 4.302653 * 0.1 / 3, 0.4 / 3 + 4.302653 * 0.1 / 3], abs=1e-6)
    assert found["p"] == pytest.approx(0.0572, abs=1e-4)
    assert all(map(math.isnan, interval([0.5])))
    with pytest.raises(ValueError, match="arms a and c must have a seed in common"):
        paired(a, "a", "c", "accuracy")


def test_holm() -> None:
    assert holm([{"p": p} for p in (0.01, 0.04, 0.03, 0.005)]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([{"p": 0.9}, {"p": 0.8}]) == [1.0, 1.0]


def test_rows_and_tables() -> None:
    rows = [record(GRPO, 1e-4, s, x) for s, x in ((2, 0.5), (1, 0.3))]
    rows += [record(OURS, 2e-4, s, 0.5 + s / 10, cpu_seconds=2 + s / 3) for s in (1, 2)]
    grpo, ours = arm_row(rows, GRPO, GRPO), arm_row(rows, OURS, GRPO)
    assert (grpo["seeds"], grpo["accuracy"], grpo["aes"]) == ([1, 2], [0.3, 0.5], 0)
    assert grpo["curve"] == {"reward_mean": [pytest.approx(0.1), pytest.approx(0.4)]}
    assert ours["aes"] == pytest.approx(3 * 0.25 / 0.4) and ours["length_incorrect"] is None
    table = arms_table([grpo, ours]).splitlines()
    assert table[2].startswith("| grpo | 0.0001 | 0.400 +- 1.271 | 0.900 | 6.00 / - |") and len(table) == 4
    # differences 0.3 and 0.2: standard error 0.05, t(0.975; 1) = 12.706
    more = {"p_holm": 0.5, "cost_ratio": cost_ratio(rows, OURS, GRPO, "cpu_seconds")}
    found = [paired(rows, OURS, GRPO, metric) | more for metric in ("pass_at_8", "accuracy")]
    assert pairs_table(found, "seconds").splitlines()[2:] == [
        "| ours - grpo | +0.250 | -0.385 to +0.885 | 0.5 | +0.000 | +0.000 to +0.000 | 0.5 | 1.25 |"
    ]
    uncounted = pairs_table([row | {"cost_ratio": cost_ratio(rows, OURS, GRPO, None)} for row in found], "seconds")
    assert uncounted.splitlines()[1:] == [
        "|---|---|---|---|---|---|---|",
        "| ours - grpo | +0.250 | -0.385 to +0.885 | 0.5 | +0.000 | +0.000 to +0.000 | 0.5 |",
    ]


def test_what_was_replayed_is_a_table() -> None:
    arm = {"name": OURS, "accuracy": [0.25, 0.75], "replay": {"age_mean": 5.4, "clip_fraction": 0.08, "ess": 0.7564}}
    assert replay_table([arm]).splitlines()[2:] == ["| ours | 0.500 | 5.4 | 0.080 | 0.756 |"]


def test_ages_are_in_order_of_age() -> None:
    ages = {f"age_{n:02}": {"ratio_mean": 1 - n / 100, "clip_fraction": n / 50, "ess": 0.5} for n in (10, 2)}
    assert ages_table(ages).splitlines()[2:] == ["| 2 | 0.980 | 0.040 | 0.500 |", "| 10 | 0.900 | 0.200 | 0.500 |"]


def test_rates_are_shown_by_their_means() -> None:
    rows = [{"arm": arm, "rate": rate, "seed": seed, "accuracy": x} for arm, rate, seed, x in
            (("b", 4e-4, 1, 0.25), ("b", 2e-4, 1, 0.5), ("b", 4e-4, 2, 0.75), ("b", 2e-4, 2, 0.5))]  # fmt: skip
    assert tuning_table(rows).splitlines() == [
        "| arm | 0.0002 | 0.0004 |", "|---|---|---|", "| b | 0.500 | 0.500 |"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "stand"),
    [
        ([], []),
        ([0.0, 1.0, 5.0], [0.0, 1.0, 5.0]),
        ([1.0, 1.5, 5.0], [0.75, 1.75, 5.0]),
        ([1.0, 1.0, 1.75], [0.25, 1.25, 2.25]),  # two that are moved meet a third
    ],
)
def test_labels_stand_apart(values: list[float], stand: list[float]) -> None:
    assert _apart(values, 1.0) == stand


def test_the_page_shows_what_the_study_came_to() -> None:
    found = json.loads((ROOT / "docs" / "study.json").read_text())
    assert not found["quick"] and [arm["name"] for arm in found["arms"]] == list(ARMS)
    assert all(arm["seeds"] == list(TEST_SEEDS) for arm in found["arms"])
    assert [(row["a"], row["b"]) for row in found["paired"] if row["metric"] == "accuracy"] == list(PAIRS)
    assert len(found["tuning"]) == len(tuned()) * len(RATES) * len(TUNING_SEEDS)
    page = (ROOT / "docs" / "study.md").read_text()
    missing = [table for table in markdown(found).split("\n\n") if table not in page]
    assert not missing, missing[0]


def test_a_record_of_another_trial_is_refused(tmp_path: Path) -> None:
    trial = Trial(OURS, 2e-4, 1)
    assert read_record(trial, tmp_path) is None
    home = tmp_path / trial.name
    home.mkdir()
    settings = json.loads(json.dumps(trial.settings()))
    (home / RECORD).write_text(json.dumps({"settings": settings, "accuracy": 0.5}))
    assert read_record(trial, tmp_path)["accuracy"] == 0.5
    assert settings["quickstart"] == quickstart() and len(quickstart()) == 64
    assert perform_all([trial, trial], tmp_path, 1) == [read_record(trial, tmp_path)] * 2
    settings["flags"][3] = "99"
    (home / RECORD).write_text(json.dumps({"settings": settings}))
    with pytest.raises(ValueError, match=r"ours_0.0002_1/record.json: flags must be \["):
        read_record(trial, tmp_path)


def test_a_fork_that_fails_is_an_error() -> None:
    assert forked(lambda: None) >= 0
    for body, code in ((lambda: sys.exit(3), 3), (lambda: 1 / 0, 1), (lambda: sys.exit("words"), 1)):
        with pytest.raises(RuntimeError, match=f"exit code {code}"):
            forked(body)


def test_trials_end_with_the_program_that_started_them(tmp_path: Path) -> None:
    """However it ends: a trial that went on would write into the folder of the next start."""
    words = (
        "import os, sys, time; from pathlib import Path; from studying.fork import fork, forked\n"
        "def body():\n"
        "    os.setsid()\n"
        "    forked(lambda: (Path(sys.argv[1]).write_text(f'{os.getppid()} {os.getpid()}'), time.sleep(60)))\n"
        "fork(body); os.wait()"
    )
    path = f"{ROOT}:{ROOT / 'tools'}"
    parent = subprocess.Popen(
        [sys.executable, "-c", words, tmp_path / "pids"], env=environment() | {"PYTHONPATH": path}
    )
    said = wait_for(lambda: (tmp_path / "pids").exists() and (tmp_path / "pids").read_text(), 60)
    pids = [int(pid) for pid in said.split()]
    assert len(pids) == 2 and all(map(alive, pids))
    parent.terminate()
    parent.wait()
    wait_for(lambda: gone(pids), 60)


def ablation(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(TOOL), *map(str, args)], env=environment(), cwd=ROOT, capture_output=True, text=True,
        timeout=400,
    )  # fmt: skip


@pytest.mark.slow
def test_a_quick_study_has_what_the_contract_says_and_goes_on(tmp_path: Path) -> None:
    words = (
        "--quick",
        "--out",
        tmp_path / "out",
        "--json",
        tmp_path / "study.json",
        "--pictures",
        tmp_path / "pictures",
    )
    first = ablation(*words)
    assert first.returncode == 0, first.stderr[-3000:]
    found = json.loads((tmp_path / "study.json").read_text())
    assert [arm["name"] for arm in found["arms"]] == [GRPO, OURS] and found["quick"]
    for arm in found["arms"]:
        assert arm["seeds"] == [1, 2] and len(arm["accuracy"]) == len(arm["pass_at_8"]) == 2
        assert all(0.02 < x < 0.3 for x in arm["accuracy"]) and all(0.4 < x < 0.8 for x in arm["pass_at_8"])
        assert arm["fresh_rollouts"] == 4 * 32 and arm["cpu_seconds"] > 0
    assert found["arms"][1]["trained_tokens"] > found["arms"][0]["trained_tokens"] > 0
    row = found["paired"][0]
    assert {"a", "b", "metric", "mean", "ci95"} <= row.keys() and (row["a"], row["b"]) == (OURS, GRPO)
    difference = [a - b for a, b in zip(*(arm["accuracy"] for arm in reversed(found["arms"])), strict=True)]
    assert row["mean"] == pytest.approx(sum(difference) / 2)
    assert {p.name for p in (tmp_path / "pictures").iterdir()} == {
        "ages.png", "cost.png", "curves.png", "differences.png"
    }  # fmt: skip
    assert sum(found["commits"].values()) == 8 and not (tmp_path / "out" / ".lock").exists()
    # a trial that was stopped is performed again, and comes to the same
    victim = next((tmp_path / "out").glob("ours_*_2"))
    before = json.loads((victim / RECORD).read_text())
    (victim / RECORD).unlink()
    again = ablation(*words)
    assert again.returncode == 0 and again.stdout == first.stdout.replace(*seconds(first.stdout, again.stdout))
    after = json.loads((victim / RECORD).read_text())
    assert {k: v for k, v in after.items() if "seconds" not in k} == {
        k: v for k, v in before.items() if "seconds" not in k
    }


def seconds(first: str, again: str) -> tuple[str, str]:
    """The row of our arm, whose last number is a time."""
    ours = [next(line for line in text.splitlines() if line.startswith(f"| {OURS} |")) for text in (first, again)]
    assert ours[0].rpartition("| ")[0].rpartition("| ")[0] == ours[1].rpartition("| ")[0].rpartition("| ")[0]
    return ours[0], ours[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--workers", 0), "--workers must be at least 1, got 0"),
        (("--json", "no/such/x.json"), "--json must be in a folder that exists, got no/such/x.json"),
        (("--quick", "--arms", GRPO), "--arms must not be given with --quick, got grpo"),
    ],
)
@pytest.mark.slow
def test_bad_input_is_one_line(words: tuple[object, ...], said: str) -> None:
    done = ablation("--out", "x", *words)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr and done.stderr.count("\n") == 1
