"""tools/benchmark_loss.py on a CPU: its contract, its command line, and that a wrong implementation gets no time.

What it measures on a GPU needs one; the losses that it would measure there are held to the truth here, the Triton
kernels in their interpreter.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.launch import ROOT
from tools.benchmarks import problem as problems
from tools.benchmarks.agreement import Agreement, Judge
from tools.benchmarks.foreign import FOREIGN
from tools.benchmarks.implementations import IMPLEMENTATIONS, Implementation, Settings
from tools.benchmarks.problem import Problem, Size, make_problem
from tools.benchmarks.report import Report
from tools.benchmarks.row import Row, counted_bytes

CPU = torch.device("cpu")
ROW_KEYS = {"implementation", "T", "V", "H", "dtype", "tp", "ms", "peak_bytes", "equal_to_reference"}
OURS, DENSE = "linear_grpo_loss reference", "dense torch"
DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The truth of a small problem is found in chunks as well, the last one shorter."""
    monkeypatch.setattr(problems, "CHUNK_ELEMENTS", 48 * 256)


def small_problem(level: str, dtype: torch.dtype = torch.float32) -> Problem:
    return make_problem(level, Size(T=128, V=256, H=16 if level == "head" else None, dtype=dtype), CPU)


def named(name: str) -> Implementation:
    (found,) = (i for i in IMPLEMENTATIONS if i.name == name)
    return found


def result_of(name: str, problem: Problem) -> tuple[Tensor, tuple[Tensor, ...]]:
    # a chunk of 48 tokens: more than one, and a shorter one at the end
    element = problem.operands[0].element_size()
    run = named(name).prepare(problem, Settings(logits_memory=48 * problem.size.columns * element))
    run.restore()
    return run.collect(run.call())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [i.name for i in IMPLEMENTATIONS if "compiled" not in i.name])
def test_every_implementation_agrees(name: str, dtype: torch.dtype) -> None:
    problem = small_problem(named(name).level, dtype)
    agreement = Judge(problem)(*result_of(name, problem))
    assert agreement.agrees, agreement.complaint


@pytest.mark.slow
@pytest.mark.parametrize("name", [i.name for i in IMPLEMENTATIONS if "compiled" in i.name])
def test_every_compiled_implementation_agrees(name: str) -> None:
    problem = small_problem(named(name).level)
    agreement = Judge(problem)(*result_of(name, problem))
    assert agreement.agrees, agreement.complaint


def test_a_call_can_be_repeated() -> None:
    """`restore` brings back the logits that dlogits have replaced."""
    problem = small_problem("logits")
    run = named("megatron_replay reference").prepare(problem, Settings(1))
    judge = Judge(problem)
    for _ in range(2):
        run.restore()
        assert judge(*run.collect(run.call())).agrees
    assert not judge(*run.collect(run.call())).agrees


def one_row(x: Tensor) -> Tensor:
    """x with its largest row doubled."""
    x = x.clone()
    x[x.abs().amax(1).argmax()] *= 2
    return x


def without_softmax(x: Tensor) -> Tensor:
    """dlogits with the entry of the target alone in each row."""
    at = x.abs().argmax(1, keepdim=True)
    return torch.zeros_like(x).scatter(1, at, x.gather(1, at))


def with_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[-1, -1] = torch.nan
    return x


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "zero": torch.zeros_like,
    "sign": torch.neg,
    "5 percent": lambda x: x * 1.05,
    "one row": one_row,
    "tokens shifted": lambda x: x.roll(1, 0),
    "NaN": with_nan,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize(("level", "which"), [("logits", 0), ("head", 0), ("head", 1)])
def test_a_wrong_gradient_is_seen(level: str, which: int, wrong: str, dtype: torch.dtype) -> None:
    problem = small_problem(level, dtype)
    loss, gradients = result_of("torch eager" if level == "logits" else DENSE, problem)
    judge = Judge(problem)
    assert judge(loss, gradients).agrees
    changed = [WRONG[wrong](g) if i == which else g for i, g in enumerate(gradients)]
    name = ("dlogits" if level == "logits" else ("dhidden", "dweight")[which]) + " "
    found = judge(loss, tuple(changed))
    assert not found.agrees and name in found.complaint
    if wrong == "NaN":
        assert f"{name}max" in found.complaint and f"{name}l2" in found.complaint
    assert all(e.agrees for key, e in found.errors.items() if not key.startswith(name))


def test_a_gradient_without_the_softmax_is_seen() -> None:
    problem = small_problem("logits", torch.bfloat16)
    loss, (dlogits,) = result_of("torch eager", problem)
    assert not Judge(problem)(loss, (without_softmax(dlogits),)).agrees


@pytest.mark.parametrize(("level", "name"), [("logits", "torch eager"), ("head", DENSE)])
@pytest.mark.parametrize("wrong", [lambda x: x * 1.001, lambda x: x - 1e-3, lambda x: x * torch.nan])
def test_a_wrong_loss_is_seen(level: str, name: str, wrong: Callable[[Tensor], Tensor]) -> None:
    problem = small_problem(level)
    loss, gradients = result_of(name, problem)
    found = Judge(problem)(wrong(loss), gradients)
    assert not found.agrees and found.complaint.startswith("loss error") and ";" not in found.complaint


def test_gradients_of_another_shape_or_dtype_are_refused() -> None:
    problem = small_problem("head")
    loss, (dhidden, dweight) = result_of(DENSE, problem)
    judge = Judge(problem)
    for gradients in ((dhidden,), (dweight, dhidden), (dhidden, dweight.double()), (dhidden, dweight[:1])):
        with pytest.raises(ValueError, match="gradients must be"):
            judge(loss, gradients)


@pytest.mark.parametrize("tokens", [128, 192, 1024, 1088])
def test_both_sides_of_the_clip_are_active(tokens: int) -> None:
    problem = make_problem("logits", Size(tokens, 64, None, torch.float32), CPU)
    low, high = problem.clip_fraction_low, problem.clip_fraction_high
    assert 0.05 < low < 0.95 and 0.05 < high < 0.95
    _, (dlogits,) = result_of("torch eager", problem)
    active = (dlogits != 0).any(1).double().mean()
    assert float(active) == pytest.approx(problem.active_fraction) == pytest.approx(1 - low - high)
    assert problem.inputs.cu_seqlens.diff().tolist() == [problem.size.rollout_tokens] * problem.inputs.advantage.numel()
    assert counted_bytes(problem) == pytest.approx(tokens * 64 * 4 * (2 + float(active)))


def test_a_problem_whose_clip_is_idle_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problems, "OUTER_PERIOD", 100)
    with pytest.raises(RuntimeError, match=r"clip fractions must lie in \(0.05, 0.95\), got 0.0"):
        small_problem("logits")


def test_a_problem_survives_its_file(tmp_path: Path) -> None:
    problem = small_problem("head")
    problem.save(tmp_path / "problem.pt")
    again = Problem.load(tmp_path / "problem.pt")
    loss, gradients = result_of(DENSE, problem)
    loss2, gradients2 = result_of(DENSE, again)
    for x, y in zip((loss, *gradients), (loss2, *gradients2), strict=True):
        assert torch.equal(x, y)


def test_a_row_without_agreement_has_no_time_and_fails_the_report(tmp_path: Path) -> None:
    problem = small_problem("head")
    loss, gradients = result_of(DENSE, problem)
    judge = Judge(problem)
    good, bad, full, broken = (Row.of(named(DENSE), problem.size) for _ in range(4))
    assert not good.passed, "nothing has judged it"
    good.judged(judge(loss, gradients))
    good.timed([3.0, 1.0, 2.0], 5)
    bad.judged(judge(loss * 2, gradients))
    full.failed("out of memory: tried to\nallocate")
    broken.failed("RuntimeError: no kernel")
    assert (good.ms, good.peak_bytes, good.passed) == (2.0, 5, True)
    assert (bad.ms, bad.equal_to_reference, bad.passed) == (None, False, False)
    assert bad.error.startswith("not equal: loss error")
    assert (full.equal_to_reference, full.error, full.passed) == (None, "out of memory: tried to allocate", True)
    assert (broken.equal_to_reference, broken.passed) == (False, False)
    for rows, passed in (([good, full], True), ([good, bad], False), ([good, broken], False)):
        report = Report("cpu", {}, tmp_path / "report.json", rows=rows)
        assert not report.passed
        report.finish()
        assert report.passed == passed
        assert all(r.error in report.table() for r in rows if r.error)
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_an_empty_agreement_is_impossible_to_reach() -> None:
    """`all` of nothing is true, so the judge must never return nothing."""
    assert Agreement({}).agrees
    for level, name in (("logits", "torch eager"), ("head", DENSE)):
        problem = small_problem(level)
        errors = Judge(problem)(*result_of(name, problem)).errors
        gradients = ("dlogits",) if level == "logits" else ("dhidden", "dweight")
        assert set(errors) == {"loss", *(f"{g} {norm}" for g in gradients for norm in ("max", "l2"))}


def test_names_are_unique() -> None:
    names = [i.name for i in (*IMPLEMENTATIONS, *FOREIGN)]
    assert len(set(names)) == len(names)


def benchmark(*arguments: object, tools: Path = ROOT / "tools") -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tools / "benchmark_loss.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_the_contract(tmp_path: Path) -> None:
    out, picture = tmp_path / "loss.json", tmp_path / "loss.png"
    done = benchmark("--device", "cpu", "--quick", "--json", out, "--picture", picture)
    assert done.returncode == 0, done.stderr + done.stdout
    data = json.loads(out.read_text())
    assert (data["device"], data["complete"], data["quick"]) == ("cpu", True, True)
    assert data["torch"] == torch.__version__ and data["threads"] == 1
    rows = {r["implementation"]: r for r in data["rows"]}
    assert set(rows) == {OURS, DENSE}
    for row in rows.values():
        assert set(row) >= ROW_KEYS
        assert (row["T"], row["V"], row["H"], row["dtype"], row["tp"]) == (256, 32000, 64, "float32", 1)
        assert row["equal_to_reference"] is True and row["error"] is None
        assert len(row["ms_each"]) == 3 and min(row["ms_each"]) <= row["ms"] <= max(row["ms_each"])
        assert row["gradient_bytes"] == 4 * 64 * (256 + 32000)
        assert row["peak_bytes"] >= row["gradient_bytes"]
    # three [T, V] tensors against one chunk of them and the gradients
    assert rows[DENSE]["peak_bytes"] > 2 * 4 * 256 * 32000
    assert rows[OURS]["peak_bytes"] < rows[DENSE]["peak_bytes"] / 2
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    from matplotlib import image

    pixels = image.imread(picture)
    assert pixels.shape[0] > 100 and pixels.shape[1] > 500 and pixels.std() > 0.01
    for name in rows:
        assert any(line.startswith(name) and line.endswith("yes") for line in done.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory on a CPU is read from Linux's /proc")
def test_the_peak_is_what_a_call_holds_at_most() -> None:
    """In a process of its own, which has held more before; what is freed during the call counts."""
    code = (
        "import torch; from tools.benchmarks.measure_cpu import peak_bytes\n"
        "before = torch.ones(100_000_000); del before\n"
        "def call():\n"
        "    freed = torch.ones(50_000_000); del freed\n"
        "    return torch.ones(25_000_000)\n"
        "result, peak = peak_bytes(call)\n"
        "print(result.numel(), peak)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    numel, peak = map(int, done.stdout.split())
    assert numel == 25_000_000
    # the kernel counts pages in batches
    assert peak == pytest.approx(200e6, rel=0.02)


@pytest.mark.slow
def test_a_wrong_implementation_gets_no_time_and_exit_code_1(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    shutil.copytree(ROOT / "tools" / "benchmarks", tools / "benchmarks")
    shutil.copy(ROOT / "tools" / "benchmark_loss.py", tools)
    source = tools / "benchmarks" / "implementations.py"
    right = "inputs, OPTIONS, chunk_tokens=chunk_tokens"
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, "inputs, replace(OPTIONS, clip_eps_low=0.3), chunk_tokens=chunk_tokens"))
    source.write_text(source.read_text().replace("import dataclass\n", "import dataclass, replace\n"))
    sizes = ("--tokens", 128, "--vocab-size", 512, "--hidden", 16, "--repeats", 1)
    done = benchmark("--device", "cpu", *sizes, "--json", tmp_path / "loss.json", tools=tools)
    assert done.returncode == 1, done.stderr + done.stdout
    rows = {r["implementation"]: r for r in json.loads((tmp_path / "loss.json").read_text())["rows"]}
    wrong, right_one = rows[OURS], rows[DENSE]
    assert (wrong["equal_to_reference"], wrong["ms"], wrong["peak_bytes"]) == (False, None, None)
    assert wrong["error"].startswith("not equal: ") and wrong["error"] in done.stdout
    assert right_one["equal_to_reference"] is True and right_one["ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "cpu", "--tokens", "100"], "--tokens must be a multiple of 64, at least 128, got 100"),
        (
            ["--device", "cpu", "--vocab-size", "1"],
            "--vocab-size must be a multiple of tp 1, at least twice it, got 1",
        ),
        (["--device", "cpu", "--hidden", "0"], "--hidden must be at least 1, got 0"),
        (["--device", "cpu", "--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--device", "cpu", "--logits-memory-mib", "0"], "--logits-memory-mib must be at least 1, got 0"),
        (["--device", "cpu", "--tp", "8"], "--tp needs --device cuda, got cpu"),
        (["--device", "cpu", "--tune"], "--tune needs --device cuda, got cpu"),
        (["--device", "cpu", "--json", "/no/x"], "--json must be in a folder that exists, got /no/x"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = benchmark(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"benchmark_loss.py: {message}") and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_without_a_device_is_refused(tmp_path: Path) -> None:
    done = benchmark("--device", "cuda", "--json", tmp_path / "loss.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "benchmark_loss.py: --device cuda needs a CUDA device, and torch finds none\n"
    assert list(tmp_path.iterdir()) == []
