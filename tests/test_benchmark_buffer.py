"""tools/benchmark_buffer.py on a CPU: its contract, its command line, and that a sampler that lies gets no time.

What it measures on a GPU needs one.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.launch import ROOT
from tools.benchmarks.buffer import device_time, roster
from tools.benchmarks.buffer import measure as measure_module
from tools.benchmarks.buffer import ours as ours_module
from tools.benchmarks.buffer.implementation import Call, Implementation, Operation, Queued, Sampled, Subject
from tools.benchmarks.buffer.measure import CALLS, CHECKED, WARM_UPS, check, measure
from tools.benchmarks.buffer.ours import Ours
from tools.benchmarks.buffer.ratio import ratios
from tools.benchmarks.buffer.report import Report
from tools.benchmarks.buffer.roster import IMPLEMENTATIONS, INSTALLED, add_installed, available
from tools.benchmarks.buffer.row import Finding, Row
from tools.benchmarks.buffer.stock import BufferSize, Stock

# draws thousands of times, for tools that few changes touch
pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROW_KEYS = {"implementation", "operation", "rollouts", "drawn", "tokens_per_rollout", "ms"}
SMALL = BufferSize(rollouts=60, drawn=10, tokens_per_rollout=3)


@pytest.fixture(autouse=True)
def _fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "check", functools.partial(check, repeats=1000))


def named(name: str) -> Implementation:
    (found,) = (i for i in IMPLEMENTATIONS if i.name == name)
    return found


def test_a_turn_of_a_stock() -> None:
    size = BufferSize(3000, 256, 64)
    assert (size.births, size.pushed) == (5, 600)
    # of 60 rollouts 10 are drawn: 3 births of 20
    stock = Stock(SMALL, CPU)
    assert (SMALL.births, SMALL.pushed) == (3, 20)
    births = stock.birth_steps(torch.arange(100)) // (stock.first_step(1) - stock.first_step(0))
    assert births.bincount().tolist() == [20] * 5
    assert int(stock.birth_steps(stock.fresh(1)).unique()) == stock.first_step(1)
    assert stock.fresh(1).tolist() == list(range(80, 100))
    assert torch.cat(list(stock.fill())).tolist() == list(range(60))
    advantage = Stock(BufferSize(100_000, 10, 1), CPU).advantage(torch.arange(100_000)).double()
    assert float(advantage.mean()) == pytest.approx(0, abs=0.01)
    assert float(advantage.std()) == pytest.approx(1, abs=0.01) and bool(advantage.isfinite().all())


def test_a_remainder_of_a_stock_belongs_to_the_newest_birth() -> None:
    stock = Stock(BufferSize(67, 10, 3), CPU)
    births = stock.birth_steps(torch.arange(67 + 22)) // (stock.first_step(1) - stock.first_step(0))
    assert births.bincount().tolist() == [22, 22, 23, 22]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((60, 0, 3), "drawn must be at least 1, got 0"),
        ((60, 10, 0), "tokens_per_rollout must be at least 1, got 0"),
        ((19, 10, 3), "rollouts must be at least twice drawn 10, got 19"),
    ],
)
def test_a_size_that_is_none_is_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BufferSize(*arguments)


def test_our_buffer_stays_full_over_more_turns_than_births() -> None:
    subject = Ours(Stock(SMALL, CPU), "reference")
    for turn in range(2 * SMALL.births):
        assert subject.ready("evict", turn)() == SMALL.pushed
        assert len(subject._buffer) == SMALL.rollouts - SMALL.pushed
        subject.ready("push", turn)()
        assert len(subject._buffer) == SMALL.rollouts
        drawn = [subject.ready("sample", turn)().uids.tolist() for _ in range(3)]
        assert len({tuple(d) for d in drawn}) == 3, "each call draws other rollouts"
        assert all(min(d) >= (turn + 1) * SMALL.pushed for d in drawn)


QUICK = [i for i in IMPLEMENTATIONS if i.package is None and "cpu" in i.devices]


@pytest.mark.parametrize("implementation", QUICK, ids=lambda i: i.name)
def test_what_needs_no_other_project_is_what_it_claims(implementation: Implementation) -> None:
    if implementation not in available(CPU)[0]:
        pytest.skip(f"{implementation.name} is not built here")
    finding = check(implementation, CPU, repeats=1000)
    assert finding.passed, finding.error
    assert [v.repeats for v in finding.verdicts] == [1000, 1000]
    assert finding.rows_equal == (None if implementation.operations == ("draw",) else True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [i.name for i in IMPLEMENTATIONS if i.package is not None])
def test_another_project_is_what_it_claims(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    add_installed()
    usable, skipped = available(CPU)
    if why := [s["why"] for s in skipped if s["implementation"] == name]:
        pytest.skip(f"`make benchmark-deps` has not installed it, or: {why[0][:200]}")
    finding = check(named(name), CPU, repeats=1000)
    assert named(name) in usable and finding.passed, finding.error
    assert finding.rows_equal is True and finding.version


def test_names_are_unique_and_what_is_skipped_says_why() -> None:
    assert len({i.name for i in IMPLEMENTATIONS}) == len(IMPLEMENTATIONS)
    usable, skipped = available(CPU)
    names = [i.name for i in usable]
    assert {"megatron_replay reference", "torch.multinomial float64", "torch.multinomial float32"} <= set(names)
    assert "megatron_replay cuda" not in {*names, *(s["implementation"] for s in skipped)}
    if not INSTALLED.is_dir() and importlib.util.find_spec("cpprb") is None:
        assert {"implementation": "cpprb", "why": "ModuleNotFoundError: No module named 'cpprb'"} in skipped
    assert not any(str(ROOT) in s["why"] for s in skipped)


def test_what_does_not_load_is_skipped_without_the_path_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_symbol.py").write_text("raise ImportError(f'{__file__}: undefined\\nsymbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(roster, "ROOT", tmp_path)
    broken = replace(named("cpprb"), needs="no_such_symbol")
    elsewhere = replace(named("megatron_replay reference"), devices=("cuda",))
    monkeypatch.setattr(roster, "IMPLEMENTATIONS", (broken, elsewhere))
    why = "ImportError: no_such_symbol.py: undefined symbol"
    assert roster.available(CPU) == ([], [{"implementation": "cpprb", "why": why}])


class Fake(Subject):
    """Draws by some weights, and writes down what it is asked for."""

    def __init__(self, stock: Stock, weights: Callable[[Tensor], Tensor] = lambda w: w) -> None:
        self.stock, self.weights = stock, weights(stock.weights(stock.all_uids()))
        self.log: list[tuple[Operation, int]] = []

    def push(self, turn: int) -> Call:
        return lambda: self.log.append(("push", turn))

    def draw(self, turn: int) -> Call:
        return lambda: self.log.append(("draw", turn))

    def drawn(self, n: int) -> Tensor:
        return torch.multinomial(self.weights, n)

    def sampled(self, n: int) -> Sampled:
        uids = self.drawn(n)
        return Sampled(uids, self.stock.rows(uids))


class OtherRows(Fake):
    def sampled(self, n: int) -> Sampled:
        uids, rows = super().sampled(n)
        return Sampled(uids, rows._replace(loss_mask=~rows.loss_mask))


class OtherRowsWhenLarge(Fake):
    def sampled(self, n: int) -> Sampled:
        uids, rows = super().sampled(n)
        return Sampled(uids if n <= CHECKED.drawn else uids.roll(1), rows)


class TooFew(Fake):
    def sampled(self, n: int) -> Sampled:
        return super().sampled(n if n <= CHECKED.drawn else n - 1)


class Disagrees(Fake):
    def cross_check(self) -> None:
        raise ValueError("one operation disagrees")


class Breaks(Fake):
    def draw(self, turn: int) -> Call:
        if turn == 1:
            raise RuntimeError("no kernel\nfor this")
        return super().draw(turn)


def fake(name: str, prepare: Callable[[Stock], Subject]) -> Implementation:
    return Implementation(name, "without replacement", "rows", ("cpu",), prepare, ("push", "draw"))


def measured(tmp_path: Path, *implementations: Implementation, repeats: int = 2) -> tuple[Report, dict]:
    report = Report("cpu", {}, tmp_path / "report.json")
    measure([SMALL], implementations, repeats, CPU, report)
    assert not report.passed, "nothing is passed before it is complete"
    report.finish()
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    return report, json.loads((tmp_path / "report.json").read_text())


def test_repeats_are_interleaved_and_counted(tmp_path: Path) -> None:
    made: list[Fake] = []
    log: list[tuple[str, Operation, int]] = []

    def prepare(name: str) -> Callable[[Stock], Subject]:
        def of(stock: Stock) -> Subject:
            subject = Fake(stock)
            subject.log = type("Log", (list,), {"append": lambda self, entry: log.append((name, *entry))})()
            made.append(subject)
            return subject

        return of

    report, data = measured(tmp_path, fake("a", prepare("a")), fake("b", prepare("b")))
    assert report.passed and data["passed"] and data["complete"]
    # one of the check and one of the size, of each
    assert [s.stock.size for s in made] == [CHECKED, CHECKED, SMALL, SMALL]
    even = [("a", "push"), ("b", "push"), *[("a", "draw")] * CALLS, *[("b", "draw")] * CALLS]
    odd = [("b", "push"), ("a", "push"), *[("b", "draw")] * CALLS, *[("a", "draw")] * CALLS]
    assert log == [(*call, t) for t in range(WARM_UPS + 2) for call in (odd if t % 2 else even)]
    for row in data["rows"]:
        assert len(row["ms_each"]) == 2 and min(row["ms_each"]) <= row["ms"] <= max(row["ms_each"])


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda stock: Fake(stock, torch.square), "draws from another distribution: 1000 draws of 1: chi-square"),
        (lambda stock: Fake(stock, torch.ones_like), "draws from another distribution: 1000 draws of 1: chi-square"),
        (OtherRows, "ValueError: loss_mask of a sample are not those that were stored"),
        (OtherRowsWhenLarge, "ValueError: tokens of a sample are not those that were stored"),
        (TooFew, "ValueError: a sample of 10 has 9 rollouts"),
        (Disagrees, "ValueError: one operation disagrees"),
        (Breaks, "RuntimeError: no kernel for this"),
    ],
)
def test_a_sampler_that_lies_or_breaks_gets_no_time(
    wrong: Callable[[Stock], Subject], error: str, tmp_path: Path
) -> None:
    report, data = measured(tmp_path, fake("wrong", wrong), fake("right", Fake))
    assert not report.passed and not data["passed"]
    assert [(r["implementation"], r["operation"]) for r in data["rows"]] == [
        (name, operation) for name in ("wrong", "right") for operation in ("push", "draw")
    ]
    for row in data["rows"]:
        if row["implementation"] == "right":
            assert row["ms"] > 0 and row["error"] is None
        else:
            assert row["ms"] is None and row["ms_each"] == [] and row["error"].startswith(error)
            assert row["error"] in report.table()
    by_name = {f["implementation"]: f for f in data["implementations"]}
    assert by_name["right"]["passed"]
    assert by_name["wrong"]["passed"] == (wrong in (OtherRowsWhenLarge, TooFew, Breaks))


def test_what_a_device_adds_may_fail(tmp_path: Path) -> None:
    def after_turns(subject: Subject, row: Row) -> None:
        raise RuntimeError("capture failed")

    report = Report("cpu", {}, None)
    measure([SMALL], [fake("a", Fake)], 1, CPU, report, after_turns)
    report.finish()
    assert [r.error for r in report.rows] == ["RuntimeError: capture failed"] * 2 and not report.passed


class FakeClock:
    """A copy takes 3 ms, all else 4."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats

    def each(self, call: Call, restore: Call) -> list[float]:
        return [3.0 if isinstance(call(), Tensor) else 4.0] * self.repeats


class OnDevice(Fake):
    def gather(self, turn: int) -> Call:
        return lambda: self.log.append(("gather", turn))

    def queued(self, operation: Operation) -> Queued | None:
        return Queued(self.gather(0), moved_bytes=8_000_000) if operation == "gather" else None


def test_device_time_of_a_draw_and_a_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its arithmetic; the events and the graph need a device."""
    monkeypatch.setattr(device_time, "Clock", FakeClock)
    monkeypatch.setattr(device_time, "copy_bandwidth", lambda clock: 8.0)
    monkeypatch.setattr(device_time, "_replay", lambda call: call)
    after_turns, subject = device_time.DeviceTime(2, CPU), OnDevice(Stock(SMALL, CPU))
    draw, gather, push = (Row.of(named("cpprb"), operation, SMALL) for operation in ("draw", "gather", "push"))
    for row in (draw, gather, push):
        after_turns(subject, row)
    assert (draw.device_ms, draw.device_ms_each, draw.moved_bytes) == (4.0, [4.0, 4.0], None)
    assert "host time included" in draw.device_clock and "graph" in gather.device_clock
    assert (gather.device_ms, gather.moved_bytes, gather.gb_per_s) == (4.0, 8_000_000, pytest.approx(2))
    assert (gather.fraction_of_copy, gather.fraction_of_large_copy) == (pytest.approx(0.75), pytest.approx(0.25))
    assert push.device_ms is None and push.device_clock is None


@pytest.mark.parametrize("which", ["draw", "gather"])
def test_an_op_that_differs_from_the_buffer_is_seen(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops are timed alone; they must be those that the buffer uses."""
    subject = Ours(Stock(CHECKED, CPU), "reference")
    subject.cross_check()
    if which == "draw":
        right = ours_module.priority_draw
        monkeypatch.setattr(ours_module, "priority_draw", lambda *a, **k: right(*a, **k | {"step": k["step"] + 1}))
    else:
        monkeypatch.setattr(ours_module, "ragged_gather", lambda *a, **k: None)
    with pytest.raises(ValueError, match=f"{'priority_draw' if which == 'draw' else 'ragged_gather'} alone"):
        subject.cross_check()


def timed(name: str, operation: Operation, ms: float, size: BufferSize, **known: float) -> Row:
    row = Row.of(replace(named("cpprb"), name=name), operation, size)
    row.timed([ms])
    for key, value in known.items():
        setattr(row, key, value)
    return row


def test_ratios_and_their_targets() -> None:
    method, other = BufferSize(30_000, 1024, 64), BufferSize(3000, 256, 64)
    rows = []
    for size in (method, other):
        for name, factor in (("megatron_replay reference", 100.0), ("megatron_replay cpp", 1.0)):
            rows += [timed(name, o, factor, size) for o in ("draw", "gather", "sample")]
        rows += [timed("cpprb", "sample", 0.8, size), timed("torch.multinomial float64", "draw", 2.5, size)]
    found = ratios(rows)
    assert [(r.rollouts, round(r.value, 9), r.target, r.met) for r in found] == [
        (30_000, 1.25, "at most 1", False),
        (30_000, 2.5, "at least 2", True),
        (3000, 1.25, None, None),
        (3000, 2.5, "at least 2", True),
    ]
    assert "megatron_replay cpp / cpprb" in found[0].name and "NOT MET" in str(found[0])
    assert "target" not in str(found[2])
    # rows come one by one; before this project's are complete there is nothing to relate
    assert all(ratios(rows[:n]) == [] for n in range(3)) and ratios(rows[-2:]) == []


def test_ratios_of_a_device() -> None:
    name, size = "megatron_replay cuda", BufferSize(30_000, 1024, 2048)
    rows = [
        timed(name, "draw", 1.0, size, device_ms=0.05),
        timed(name, "gather", 1.0, size, device_ms=0.01, fraction_of_copy=0.7),
        timed(name, "sample", 1.0, size),
    ]
    draw, gather = ratios(rows)
    assert (draw.value, draw.target, draw.met) == (pytest.approx(50), "at most 40", False)
    assert (gather.value, gather.target, gather.met) == (0.7, "at least 0.6", True)


def test_a_report_without_verdicts_is_not_passed() -> None:
    finding = Finding.of(named("cpprb"), "1.0")
    report = Report("cpu", {}, findings=[finding], skipped=[{"implementation": "x", "why": "absent"}])
    report.finish()
    assert not finding.passed and not report.passed
    assert "not measured: x, absent" in report.table()


def benchmark(*arguments: object, tools: Path = ROOT / "tools") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tools / "benchmark_buffer.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    """A copy with fewer draws, away from other projects' buffers, which take seconds to import."""
    copy = tmp_path / "tools"
    shutil.copytree(ROOT / "tools" / "benchmarks", copy / "benchmarks")
    shutil.copy(ROOT / "tools" / "benchmark_buffer.py", copy)
    source = copy / "benchmarks" / "buffer" / "distribution.py"
    assert source.read_text().count("REPEATS = 5000") == 1
    source.write_text(source.read_text().replace("REPEATS = 5000", "REPEATS = 1000"))
    return copy


SIZES = ("--rollouts", 300, 600, "--tokens-per-rollout", 5, 3, "--drawn", 32, "--repeats", 2)


@pytest.mark.slow
def test_the_contract(tmp_path: Path, tools: Path) -> None:
    out = tmp_path / "buffer.json"
    done = benchmark(*SIZES, "--json", out, tools=tools)
    assert done.returncode == 0, done.stderr + done.stdout
    data = json.loads(out.read_text())
    assert (data["device"], data["complete"], data["passed"], data["quick"]) == ("cpu", True, True, False)
    assert data["torch"] == torch.__version__ and data["threads"] == 1 and data["peak_host_bytes"] > 2**20
    ours, plain = "megatron_replay reference", "torch.multinomial float64"
    rows = {(r["implementation"], r["operation"], r["rollouts"], r["tokens_per_rollout"]): r for r in data["rows"]}
    for rollouts, tokens in ((300, 5), (600, 3)):
        for operation in ("push", "evict", "draw", "gather", "sample"):
            row = rows[ours, operation, rollouts, tokens]
            assert set(row) >= ROW_KEYS and row["drawn"] == 32 and row["ms"] > 0 and len(row["ms_each"]) == 2
        assert rows[plain, "draw", rollouts, tokens]["ms"] > 0
    findings = {f["implementation"]: f for f in data["implementations"]}
    assert findings[ours]["draws"] == findings[plain]["draws"] == "without replacement"
    assert "packed ragged rows" in findings[ours]["returns"] and findings[plain]["returns"] == "nothing"
    assert "2^24" in findings[plain]["note"]
    assert all(f["passed"] and len(f["verdicts"]) == 2 for f in findings.values())
    assert {r["rollouts"] for r in data["ratios"]} == {300, 600}
    for line in (*map(str, rows), *(s["implementation"] for s in data["skipped"])):
        assert line.split("'")[1 if "'" in line else 0] in done.stdout
    assert any(s["implementation"] == "cpprb" and "No module named" in s["why"] for s in data["skipped"])
    assert sum(line.startswith("draw: torch.multinomial") for line in done.stdout.splitlines()) == 4


@pytest.mark.slow
def test_a_lying_sampler_gets_no_time_and_exit_code_1(tmp_path: Path, tools: Path) -> None:
    source = tools / "benchmarks" / "buffer" / "plain.py"
    right = "stock.weights(stock.all_uids())"
    assert source.read_text().count(right) == 1
    source.write_text(source.read_text().replace(right, f"{right}.square()"))
    done = benchmark(*SIZES, "--json", tmp_path / "buffer.json", tools=tools)
    assert done.returncode == 1, done.stderr + done.stdout
    data = json.loads((tmp_path / "buffer.json").read_text())
    assert data["complete"] and not data["passed"]
    for row in data["rows"]:
        lies = row["implementation"].startswith("torch.multinomial")
        assert (row["ms"] is None) == lies and (row["error"] is None) == (not lies)
        assert row["error"] is None or row["error"] in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rollouts", "10", "--drawn", "6"], "--rollouts must be at least twice drawn 6, got 10"),
        (["--drawn", "0"], "--drawn must be at least 1, got 0"),
        (["--tokens-per-rollout", "0"], "--tokens-per-rollout must be at least 1, got 0"),
        (
            ["--rollouts", "30000", "--tokens-per-rollout", "1", "2"],
            "--tokens-per-rollout must be one, or one for each of 1 --rollouts, got [1, 2]",
        ),
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
        (["--json", "/no/x"], "--json must be in a folder that exists, got /no/x"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = benchmark(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"benchmark_buffer.py: {message}") and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused(tmp_path: Path) -> None:
    done = benchmark("--device", "cuda", "--json", tmp_path / "buffer.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "benchmark_buffer.py: --device cuda needs a CUDA device, and torch finds none\n"
    assert list(tmp_path.iterdir()) == []
