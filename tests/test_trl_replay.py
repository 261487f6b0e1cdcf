"""ReplayGRPOTrainer inside the real TRL, in its own environment (`make trl`): what it leaves alone, and what it adds.

One process of that environment runs all cases: importing TRL takes it longer than most of them.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT, environment

PYTHON = ROOT / ".venv" / "trl" / "bin" / "python"
PROGRAM = runpy.run_path(str(ROOT / "examples" / "integrations" / "trl_replay.py"))
CASES = (
    "same_as_trl", "more_updates_of_a_batch", "one_factor", "composition", "birth_and_gradient", "nothing_to_train",
    "resumed", "engine_logprobs", "refusals", "learns",
)  # fmt: skip
needs_trl = pytest.mark.skipif(not PYTHON.exists(), reason="there is no .venv/trl: `make trl` makes it")


@cache
def _run(folder: Path) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [str(PYTHON), "-m", "tests.trl_worker", str(folder), *CASES],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    found = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"'))
    by_name = {line["case"]: line for line in found}
    assert set(by_name) == set(CASES), done.stderr[-4000:]
    return by_name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trl")


@pytest.fixture
def case(folder: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the worker found in the case that the test is named for."""
    name = request.node.originalname.removeprefix("test_")
    found = _run(folder)[name]
    assert "error" not in found, found["error"]
    return found


@needs_trl
@pytest.mark.slow
def test_same_as_trl(case: dict[str, Any]) -> None:
    """Without replay, where every group has variance, both compute one formula: dapo, grpo and dr_grpo."""
    for loss_type in ("dapo", "grpo", "dr_grpo"):
        found = case[loss_type]
        assert found["ours"] == pytest.approx(found["trl"], abs=2e-6), loss_type
        assert found["weights_apart"] < 1e-3, loss_type
        assert found["stored"] == 0
        logged = found["logged"]
        for name in ("reward", "completions/mean_length", "clip_ratio/region_mean"):
            assert logged[name][0] == pytest.approx(logged[name][1], rel=1e-6), name
            assert len(logged[name][0]) == 4
        assert logged["grad_norm"][1] == pytest.approx(logged["grad_norm"][0], rel=1e-3)
        # theirs is a mean of microbatch means, ours one over all tokens
        assert logged["entropy"][1] == pytest.approx(logged["entropy"][0], rel=1e-2)
    assert max(map(abs, case["dapo"]["ours"])) > 1e-2


@needs_trl
@pytest.mark.slow
def test_more_updates_of_a_batch(case: dict[str, Any]) -> None:
    assert case["ours"] == pytest.approx(case["trl"], abs=2e-6)
    assert case["weights_apart"] < 1e-3
    assert case["births"] == [[0], [1]]
    assert case["clipped"][0] == case["clipped"][2] == 0 and min(case["clipped"][1], case["clipped"][3]) > 0.1


@needs_trl
@pytest.mark.slow
def test_one_factor(case: dict[str, Any]) -> None:
    """Groups of zero variance do not count: TRL divides by their tokens as well."""
    assert case["factor"] > 1.5 and case["groups"][0] < case["groups"][1]
    theirs, ours = case["loss"]
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert case["weights_apart"] < 1e-4


@needs_trl
@pytest.mark.slow
def test_composition(case: dict[str, Any]) -> None:
    """All informative fresh rollouts, and behind them drawn ones: as many, stored before, of bounded age."""
    kept: set[int] = set()
    for found, logged in zip(case["steps"], case["logged"], strict=True):
        assert found["fresh"] == found["expected"]
        assert set(found["stored_before"]) <= kept
        wanted = 0 if found["step"] < 1 else min(round(0.9 * len(found["fresh"])), len(found["stored_before"]))
        assert len(set(found["drawn"])) == len(found["drawn"]) == wanted == found["marked_as_drawn"]
        assert set(found["drawn"]) <= set(found["stored_before"])
        assert all(1 <= age <= 2 for age in found["ages"])
        assert found["rows_are_those_of_the_batch"]
        assert found["weights"] == pytest.approx([found["one_over_tokens"]], rel=1e-5)
        assert logged["replay/draw_size"] == wanted and logged["replay/size"] == len(found["stored_before"])
        if wanted:
            assert logged["replay/age_mean"] == pytest.approx(sum(found["ages"]) / wanted)
            assert logged["replay/age_max"] == max(found["ages"])
            assert 0 < logged["replay/ess"] <= 1 and 0 <= logged["replay/clip_fraction"] <= 1
        kept |= set(found["fresh"])
    assert [f["step"] for f in case["steps"]] == list(range(7))
    assert sum(len(f["drawn"]) for f in case["steps"]) > 20
    assert any((len(f["fresh"]) + len(f["drawn"])) % 2 for f in case["steps"])
    assert max(age for f in case["steps"] for age in f["ages"]) == 2
    # some groups had no variance, and what is old has gone
    assert any(len(f["expected"]) < 16 for f in case["steps"])
    assert not set(case["steps"][0]["fresh"]) & set(case["steps"][3]["stored_before"])


@needs_trl
@pytest.mark.slow
def test_birth_and_gradient(case: dict[str, Any]) -> None:
    """Log-probs are those of birth, and not of now; a gradient with drawn rollouts is that of float64."""
    assert max(case["birth"]) < 1e-5
    assert min(case["drawn_now"]) > 1e-3
    assert max(case["gradient"]) < 1e-5
    assert case["drawn"] == [0, 16, 16, 16, 16]


@needs_trl
@pytest.mark.slow
def test_nothing_to_train(case: dict[str, Any]) -> None:
    """Where no group has variance the weights stay, whatever the optimizer's momentum and decay."""
    assert case["rollouts"] == [16, 16, 0, 0]
    assert min(case["moved"][:2]) > 1e-2 and case["moved"][2:] == [0, 0]
    assert case["loss"][2:] == [0, 0]


@needs_trl
@pytest.mark.slow
def test_resumed(case: dict[str, Any]) -> None:
    assert case["later"] == case["whole"] and len(case["whole"]) == 2
    assert max(map(len, case["whole"])) > 16
    assert case["weights_apart"] < 1e-9
    assert "replay_buffer.pt" in case["without"]


@needs_trl
@pytest.mark.slow
def test_engine_logprobs(case: dict[str, Any]) -> None:
    assert case["uid"] == [i for i in range(16) if i != 1]
    assert case["logprob"] == pytest.approx([-0.5 - i / 100 for i in case["uid"]], abs=1e-6)


@needs_trl
@pytest.mark.slow
def test_refusals(case: dict[str, Any]) -> None:
    for name, said in case.items():
        if name != "case":
            assert said.startswith(f"{name} must be "), (name, said)
            assert ", got " in said


@needs_trl
@pytest.mark.slow
def test_learns(case: dict[str, Any]) -> None:
    """The program itself: 40 updates on the quickstart's task."""
    assert case["code"] == 0
    words = case["said"].split()
    before, after = float(words[2]), float(words[4])
    assert before < 0.2 and after > before + 0.15, case["said"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--steps 0", "--steps must be at least 1, got 0"),
        ("--group-size 1", "--group-size must be at least 2, got 1"),
        ("--microbatches 3", "--microbatches must divide the 128 rollouts of a step, got 3"),
        ("--eval-prompts 10001", "--eval-prompts must be in [1, 10000], the held-out problems, got 10001"),
        ("--lr 0", "--lr must be positive, got 0.0"),
        ("--replay-ratio -1", "replay_ratio must be at least 0 and finite, got -1.0"),
        ("--tau-max 0", "tau_max must be at least 1 step, got 0"),
    ],
)
def test_a_flag_that_does_not_fit_is_named(flags: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        PROGRAM["main"](flags.split())
    assert stopped.value.code == 2 and words in capsys.readouterr().err


def test_without_trl_it_says_what_makes_it(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "trl", None)
    assert PROGRAM["main"](["--steps", "1"]) == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1 and "`make trl`" in said
