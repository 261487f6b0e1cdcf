"""tools/chaos.py: its plan, its comparisons, what it finds wrong, that it cleans up, and a real run of two kills."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch import ROOT, environment
from tests.test_entry_script import comparable
from tools.soak import comparison
from tools.soak import life as life_module
from tools.soak.comparison import first_difference, summary_difference
from tools.soak.life import Life, steps_done
from tools.soak.memory import FEWEST, slope
from tools.soak.plan import Kill, plan
from tools.soak.processes import SharedMemory, alive, without_folders

TOOL = ROOT / "tools" / "chaos.py"
FAKE = Path(__file__).with_name("fake_training.py")
ROW = {"step": 0, "iteration": 0, "loss": 0.5, "time/train": 1.0, "tokens_per_second": 9.0}
# the tool with torchrun and the entry script replaced
WITH_FAKE = f"""
import sys
sys.path.insert(0, {str(TOOL.parent)!r})
import soak.life
soak.life.LAUNCHER = ({sys.executable!r}, {str(FAKE)!r})
import chaos
sys.exit(chaos.main())
"""
STEPS = 24
SMALL = ("--quick", "--steps", str(STEPS), "--settle", "1", "--max-bytes-per-step", "500000", "--memory-skip", "5")


@pytest.mark.parametrize("seed", range(20))
def test_kills_are_within_their_gaps_and_no_kind_comes_twice_before_all_have_come(seed: int) -> None:
    kinds = ("trainer", "launcher", "engine")
    kills = plan(300, 20, 40, kinds, seed)
    assert kills == plan(300, 20, 40, kinds, seed) != plan(300, 20, 40, kinds, seed + 1)
    steps = [0, *(k.step for k in kills)]
    assert all(20 <= b - a <= 40 for a, b in itertools.pairwise(steps))
    assert 300 - 1 - 40 <= steps[-1] < 300 - 1
    for first in range(0, len(kills) - 2, 3):
        assert {k.kind for k in kills[first : first + 3]} == set(kinds)
    assert all(0 <= x < 1 for k in kills for x in (k.pick, k.delay))


def test_kills_differ_in_kind_and_gap() -> None:
    found = [plan(300, 20, 40, ("trainer", "launcher"), seed) for seed in range(20)]
    assert {p[0].kind for p in found} == {"trainer", "launcher"}
    assert len({p[0].step for p in found}) > 5
    assert plan(9, 4, 4, ("trainer",), 0)[0].step == 4 and len(plan(9, 4, 4, ("trainer",), 0)) == 1
    assert all(isinstance(k, Kill) for k in found[0])


def test_a_command_is_said_without_the_folders_of_this_machine() -> None:
    said = without_folders(
        "/usr/bin/python -u /a/b/run.py @/a/b/flags.txt --load x/y --json=/a/c --run-dir /tmp/d/soak"
    )
    assert said == "python -u run.py @flags.txt --load x/y --json=/a/c --run-dir soak"


def test_the_slope_is_that_of_most_pairs() -> None:
    line = [(step, 1000 + 7 * step) for step in range(FEWEST + 40)]
    assert slope(line, 0) == 7
    jump = [(step, size + (10**9 if step > 45 else 0)) for step, size in line]
    assert slope(jump, 0) == pytest.approx(7, abs=0.1)
    # what a process takes at its start is left out
    start = [(step + 100, 10**6 * min(step, 20)) for step in range(FEWEST + 21)]
    assert slope(start, 20) == 0 < slope(start, 0)
    assert slope(line[: FEWEST + 4], 5) is None and slope(line[: FEWEST + 5], 5) == 7
    assert slope([], 0) is None


def test_the_first_number_that_differs_is_named() -> None:
    rows = [ROW | {"step": i} for i in range(3)]
    later = [r | {"time/train": 2.0, "tokens_per_second": 1.0} for r in rows]
    assert first_difference(rows, later) is None and comparison.comparable(rows) == comparable(rows)
    other = [*later[:2], later[2] | {"loss": math.nextafter(0.5, 1)}]
    assert first_difference(rows, other) == {
        "step": 2, "key": "loss", "uninterrupted": 0.5, "soak": math.nextafter(0.5, 1)
    }  # fmt: skip
    assert first_difference(rows, [later[0], *other])["step"] == 1
    assert first_difference(rows, later[:2])["key"] == "rows"
    assert first_difference(rows, [*later, ROW])["soak"] == 4
    assert first_difference(rows, [r | {"new": None} for r in later])["key"] == "new"
    assert first_difference([r | {"new": None} for r in rows], later)["key"] == "new"
    nan = [r | {"loss": math.nan} for r in rows]
    assert first_difference(nan, nan) is None and first_difference(nan, rows)["key"] == "loss"
    engine = [r | {"engine/restarts": 1} for r in rows]
    assert first_difference(rows, engine, left_out=("engine/",)) is None
    assert first_difference(rows, engine)["key"] == "engine/restarts"


def test_summaries_and_files(tmp_path: Path) -> None:
    for name, values in (
        ("a", {"updates": 3, "seconds": 1}),
        ("b", {"updates": 3, "seconds": 2}),
        ("c", {"seconds": 1}),
    ):
        (tmp_path / name / "tensorboard").mkdir(parents=True)
        (tmp_path / name / "summary.json").write_text(json.dumps(values))
        (tmp_path / name / "tensorboard" / f"events.out.tfevents.17.{name}.1.0").touch()
    a, b, c = (tmp_path / name for name in "abc")
    assert summary_difference(a, b) is None and summary_difference(a, c)["key"] == "summary.json updates"
    assert comparison.files(a) == comparison.files(b) == {"summary.json", "tensorboard/events"}
    (b / "checkpoints" / "iter_0000003.partial").mkdir(parents=True)
    assert comparison.files(b) - comparison.files(a) == {"checkpoints/iter_0000003.partial"}


def test_steps_are_those_with_a_whole_row(tmp_path: Path) -> None:
    assert steps_done(tmp_path) == 0
    file = tmp_path / "metrics.jsonl"
    rows = "".join(json.dumps({"step": step, "pad": "x" * 5000}) + "\n" for step in range(40))
    for text, steps in (("", 0), ('{"step": 0', 0), (rows, 40), (rows + '{"step": 40', 40)):
        file.write_text(text)
        assert steps_done(tmp_path) == steps


def test_rows_that_a_resumed_run_writes_again_are_not_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "LAUNCHER", (sys.executable, "-c", "import time; time.sleep(100)"))
    run_dir = tmp_path / "run"
    (run_dir / "checkpoints").mkdir(parents=True)
    (run_dir / "checkpoints" / life_module.LATEST).write_text("30")

    def write(rows: int) -> None:
        text = "".join(json.dumps(ROW | {"step": step}) + "\n" for step in range(rows))
        (run_dir / "metrics.jsonl").write_text(text)

    write(33)
    life = Life([], run_dir, 1, tmp_path / "log", tmp_path, SharedMemory())
    try:
        for rows in (33, 8, 20, 30):
            write(rows)
            assert life.look() == rows and life.first_row is None
        write(31)
        assert life.look() == 31 and life.first_row > 0
    finally:
        life.launcher.kill()
        life.launcher.wait()


def chaos(*args: object, code: str = WITH_FAKE, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env=environment() | variables, cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["", "row", "file", "orphan", "shared memory", "memory", "exit"])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, str]]:
    """The fault, the JSON and what was said, of a soak of the fake training."""
    folder = tmp_path_factory.mktemp("soak")
    done = chaos(*SMALL, "--json", folder / "out.json", FAKE_FAULT=request.param, TMPDIR=str(folder))
    alive = [p for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
    data = json.loads((folder / "out.json").read_text())
    yield request.param, data | {"code": done.returncode, "alive": alive}, done.stdout
    for segment in Path("/dev/shm").glob("fake-training-*"):
        segment.unlink()


@pytest.mark.slow
def test_what_is_wrong_is_found_and_nothing_else(found: tuple[str, Any, str]) -> None:
    fault, data, said = found
    wrong = {
        "row": "loss: 0",
        "file": "files that the uninterrupted run does not have: checkpoints/iter_0000001.partial",
        "orphan": "processes lived 1 s after kill",
        "shared memory": "segments of shared memory left: /dev/shm/fake-training-",
        "memory": "memory of rank 1 grew by",
        "exit": "the uninterrupted run ended with exit code",
    }
    assert data["code"] == (1 if fault else 0) and data["passed"] is not bool(fault), said
    last = said.splitlines()[-1]
    assert last.startswith("FAILED: " if fault else "passed: ")
    for name, words in wrong.items():
        assert (words in last) is (name == fault), last
    assert data["equal_to_uninterrupted"] is (fault not in ("row", "exit"))
    assert (data["orphans"] > 0) is (fault == "orphan")
    assert bool(data["files_left"]) is (fault == "file")
    assert bool(data["shared_memory_left"]) is (fault == "shared memory")
    assert (data["first_difference"] is not None) is (fault == "row")
    if fault != "exit":
        assert data["kills"] == data["resumes"] == sum(data["victims"].values()) >= 2
        assert min(data["victims"].values()) >= 1 and data["rows_compared"] == STEPS
        assert said.count("\nkill ") == data["kills"]
        assert all(e["checkpoint"] <= e["steps"] for e in data["events"])
        # the last life may be over before it is looked at
        assert all(e["seconds_to_row"] > 0 for e in data["events"][:-1])
    assert not data["alive"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_that_it_started(tmp_path: Path, number: signal.Signals) -> None:
    steps = ("--quick", "--steps", "4000", "--min-gap", "20", "--max-gap", "30")
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_FAKE, *steps],
        env=environment() | {"TMPDIR": str(tmp_path)}, cwd=ROOT, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("chaos-*/uninterrupted/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) == 3
    os.kill(process.pid, number)
    assert process.wait(30) == 128 + number
    assert process.stderr.read() == f"chaos.py: ended by {number.name}\n"
    assert not any(map(alive, started)) and list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--min-gap", 5, "--save-interval", 5), "--min-gap must be above --save-interval 5: a kill needs"),
        (("--min-gap", 50), "--max-gap must be at least --min-gap 50, got 40"),
        (("--steps", 41), "--steps must be above --max-gap 40 + 1, got 41"),
        (("--processes", 3), "--processes must be a multiple of --tp 2, got 3"),
        (("--settle", 0), "--settle must be above 0, got 0"),
        (("--json", "no/such/out.json"), "--json must be in a folder that exists, got no/such/out.json"),
        (("--work-dir", ROOT), f"--work-dir must not exist, got {ROOT}"),
        (("--", "--run-dir=x"), "--run-dir is set by this program, got it behind --"),
    ],
)
def test_bad_input_is_one_line(args: tuple[object, ...], said: str) -> None:
    done = chaos(*args)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_real_run_survives_two_kills(tmp_path: Path) -> None:
    """A trainer rank and the launcher of the quickstart, on a small batch."""
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, TOOL, "--quick", "--steps", "11", "--max-gap", "4", "--json", out],
        env=environment() | {"TMPDIR": str(tmp_path)}, cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    data = json.loads(out.read_text())
    assert data["kills"] == data["resumes"] == 2 and data["victims"] == {"trainer": 1, "launcher": 1}
    assert data["equal_to_uninterrupted"] and data["orphans"] == 0 and data["rows_compared"] == 11
    assert list(tmp_path.iterdir()) == [out]
