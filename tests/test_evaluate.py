"""tools/evaluate.py: real evaluations on several layouts, killed and gone on with, of both kinds of checkpoints."""

from __future__ import annotations

import importlib.util
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_replay.evaluation.benchmark_result import BenchmarkResult
from megatron_replay.evaluation.sample_record import SampleRecord
from megatron_replay.tasks.sort_digits import SortDigits
from tests.evaluate_tool import HELDOUT, TOOL, flags, load_tool, message
from tests.launch import ROOT, environment, run_script
from tests.single_rank import groups, random_qwen3

MODEL = ROOT / "examples" / "quickstart" / "model"
# made for these tests, in the fields that docs/evaluation.md has for each: digits to sort, which the small model can
MADE = {
    "MATH-500": "math500",
    "AIME25": "aime25",
    "AIME26": "aime26",
    "HMMT-F25": "hmmt_feb_25",
    "HMMT-F26": "hmmt_feb_26",
}
SMALL = [*HELDOUT, "--problems", "61", "--samples", "4"]
JUDGE = """
def no_opinion_on_zeros(*, prompt, response, answer, extra):
    return None if response.startswith("0") else float(response == answer) / 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cases leave behind, each in a folder of its name."""
    at = tmp_path_factory.mktemp("evaluate")
    task = SortDigits(split="heldout", seed=1234)
    problems = [task.problem(i) for i in range(61)]
    lines = [json.dumps({"problem": p.prompt, "answer": p.answer, "level": 1}) + "\n" for p in problems]
    # the third problem comes twice
    (at / "sorted.jsonl").write_text("".join([*lines[:3], lines[2], *lines[3:]]))
    (at / "judge.py").write_text(JUDGE)
    trained = at / "trained"
    jsonl = ["--benchmark", f"heldout={at / 'sorted.jsonl'}", f"again={at / 'sorted.jsonl'}", "--samples", "4"]
    made = [f"{name}={made_file(name)}" for name in MADE]
    cases = [
        {"name": "whole", "args": flags(*HELDOUT, "--problems", 1024, "--samples", 4)},
        {"name": "alone", "args": flags(*SMALL, "--chunk", 3)},
        {"name": "killed", "args": flags(*SMALL, "--chunk", 3), "kill_at": 60},
        {"name": "killed", "args": flags(*SMALL, "--chunk", 3)},
        {"name": "tp2", "world": 2, "args": flags(*SMALL, tp=2)},
        {"name": "dp2", "world": 2, "args": flags(*SMALL, "--chunk", 5)},
        {"name": "pp2", "world": 2, "args": flags(*SMALL, "--chunk", 50, pp=2)},
        {
            "name": "hf",
            "args": flags(*SMALL, "--load-hf", trained / "hf", "--baseline", at / "alone" / "evaluation.json",
                          "--aes-gamma", 7, "--json", at / "copy.json"),
        },
        {"name": "megatron", "world": 2,
         "args": flags(*SMALL, "--load", trained / "checkpoints", "--step", 1, tp=2)},
        {"name": "latest", "args": flags(*SMALL, "--load", trained / "checkpoints")},
        {"name": "jsonl", "args": flags(*jsonl, "--keep-text")},
        {"name": "judged", "args": flags(*jsonl, "--rl-reward", f"{at / 'judge.py'}:no_opinion_on_zeros",
                                         "--rl-grader-workers", 1, "--correct-at", 0.5)},
        {"name": "made", "args": flags("--benchmark", *made, "--samples", 8, "--rl-reward", "math-verify",
                                       "--rl-grader-workers", 1, "--keep-text")},
    ]  # fmt: skip
    (at / "cases.json").write_text(json.dumps([{"world": 1, **case} for case in cases]))
    command = [sys.executable, "-m", "tests.evaluation_worker", at, at / "cases.json"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (at / "said").write_text(done.stdout)
    return at


def made_file(benchmark: str) -> Path:
    return ROOT / "tests" / "benchmarks" / f"{MADE[benchmark]}.jsonl"


def lines(folder: Path) -> list[str]:
    return (folder / "samples.jsonl").read_text().splitlines()[1:]


def evaluation(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    return found


@pytest.mark.slow
def test_the_quickstart_model_is_as_good_as_its_provenance_says(folder: Path) -> None:
    heldout = evaluation(folder / "whole")["benchmarks"]["heldout"]
    told = json.loads((MODEL / "provenance.json").read_text())["sampled_heldout_accuracy"]
    # four standard errors: of 4,096 samples, four of each problem, and of the 10,000 that were measured then
    low, high = heldout["ci95"]["avg_at_k"]
    noise = 4 * math.hypot((high - low) / 3.92, math.sqrt(told * (1 - told) / 10_000))
    assert 0.015 < noise < 0.035 and abs(heldout["avg_at_k"] - told) < noise
    assert low < heldout["avg_at_k"] < high
    passes = heldout["pass_at_k"]
    assert list(passes) == ["1", "2", "4"] and passes["1"] < passes["2"] < passes["4"]
    # an answer has six tokens, so a right one has six
    assert heldout["length_correct"] == 6 >= heldout["length_incorrect"]
    assert 0 < heldout["truncated_fraction"] < 0.5 and heldout["unjudged"] == 0


@pytest.mark.slow
def test_the_folder_holds_what_the_page_says(folder: Path) -> None:
    found = evaluation(folder / "alone")
    assert found.keys() == {
        "settings", "run", "benchmarks", "aes", "versions", "commit", "changed_files",
    }  # fmt: skip
    assert found["aes"] is None and found["versions"]["megatron-core"] == "0.19.2"
    assert found["run"]["sources"] == {"heldout": "task:sort-digits"} and found["run"]["load"] is None
    names = {p.name for p in (folder / "alone").iterdir()}
    assert names == {"samples.jsonl", "evaluation.json", "pass_at_k.png"}
    assert (folder / "alone" / "pass_at_k.png").read_bytes().startswith(b"\x89PNG")
    rows = [SampleRecord.from_line(x) for x in lines(folder / "alone")]
    assert [(n, r.problem, r.sample) for n, r in rows] == [("heldout", i, j) for i in range(61) for j in range(4)]
    again = BenchmarkResult([r for _, r in rows], 4).to_json(seed=1234)
    assert again == {k: v for k, v in found["benchmarks"]["heldout"].items() if k != "identity"}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2", "dp2", "pp2"])
def test_every_layout_and_chunk_gives_the_same(folder: Path, layout: str) -> None:
    assert lines(folder / layout) == lines(folder / "alone")
    a, b = evaluation(folder / layout), evaluation(folder / "alone")
    assert a["benchmarks"] == b["benchmarks"] and a["settings"] == b["settings"]
    sizes = [a["run"][f"{x}_parallel"] for x in ("tensor", "pipeline", "data")]
    assert sizes == [1 + (layout == x) for x in ("tp2", "pp2", "dp2")]


@pytest.mark.slow
def test_killed_and_gone_on_with_it_is_the_same_file(folder: Path) -> None:
    at = int((folder / "killed.lines").read_text())
    whole = (folder / "alone" / "samples.jsonl").read_bytes()
    assert 60 <= at < whole.count(b"\n") == 1 + 61 * 4
    assert (folder / "killed" / "samples.jsonl").read_bytes() == whole
    assert evaluation(folder / "killed")["benchmarks"] == evaluation(folder / "alone")["benchmarks"]


@pytest.mark.slow
def test_a_training_checkpoint_is_as_good_as_the_folder_saved_from_it(folder: Path) -> None:
    hf, megatron = folder / "hf", folder / "megatron"
    assert lines(megatron) == lines(hf)
    assert evaluation(megatron)["benchmarks"] == evaluation(hf)["benchmarks"]
    assert evaluation(megatron)["run"]["step"] == 1 and evaluation(folder / "latest")["run"]["step"] == 2
    # training has changed something, and again
    assert lines(hf) != lines(folder / "alone") and lines(folder / "latest") != lines(hf)


@pytest.mark.slow
def test_against_a_baseline(folder: Path) -> None:
    found = evaluation(folder / "hf")
    ours, base = found["benchmarks"]["heldout"], evaluation(folder / "alone")["benchmarks"]["heldout"]
    row = found["aes"]["benchmarks"]["heldout"]
    gain = (ours["avg_at_k"] - base["avg_at_k"]) / base["avg_at_k"]
    saved = (base["length_mean"] - ours["length_mean"]) / base["length_mean"]
    assert row["score"] == pytest.approx(saved + (3 if gain >= 0 else -7) * abs(gain)) == found["aes"]["score_mean"]
    assert found["aes"]["constants"] == {"alpha": 1.0, "beta": 3.0, "gamma": 7.0}
    for key, of in (("accuracy", "avg_at_k"), ("length", "length_mean")):
        low, high = row[f"{key}_difference_ci95"]
        assert row[f"{key}_difference"] == pytest.approx(ours[of] - base[of])
        assert low < row[f"{key}_difference"] < high
    assert json.loads((folder / "copy.json").read_text()) == found
    assert f"| {row['score']:.3f} |" in (folder / "said").read_text()


@pytest.mark.slow
def test_a_file_is_sampled_as_the_task_is_that_it_was_made_of(folder: Path) -> None:
    rows = [SampleRecord.from_line(x) for x in lines(folder / "jsonl")]
    plain = [SampleRecord.from_line(x)[1] for x in lines(folder / "alone")]
    named = [r for name, r in rows if name == "heldout"]
    assert [(r.problem, r.tokens, r.reward) for r in named] == [(r.problem, r.tokens, r.reward) for r in plain]
    task = SortDigits(split="heldout", seed=1234)
    assert all((r.text == task.problem(r.problem).answer) == (r.reward == 1) for r in named)
    # a benchmark of another name has the same problems and other random numbers
    assert [r.text for name, r in rows if name == "again"] != [r.text for r in named]
    assert evaluation(folder / "jsonl")["benchmarks"]["again"]["problems"] == 61


@pytest.mark.slow
def test_files_in_the_form_of_each_benchmark_are_judged_as_mathematics(folder: Path) -> None:
    found = evaluation(folder / "made")["benchmarks"]
    assert {name: row["problems"] for name, row in found.items()} == {
        "MATH-500": 5, "AIME25": 3, "AIME26": 3, "HMMT-F25": 4, "HMMT-F26": 4
    }  # fmt: skip
    answers = {name: [json.loads(x)["answer"] for x in made_file(name).read_text().splitlines()] for name in MADE}
    rows = [SampleRecord.from_line(x) for x in lines(folder / "made")]
    assert len(rows) == 19 * 8
    for name, r in rows:
        # a number: to math-verify 01379 and 1379 are the same
        assert r.reward == float(r.text.isdigit() and int(r.text) == int(answers[name][r.problem])), (name, r)
    assert 0 < sum(r.reward for _, r in rows) < len(rows)
    for name, row in found.items():
        own = [r.reward for n, r in rows if n == name]
        assert row["avg_at_k"] == pytest.approx(sum(own) / len(own)) and row["unjudged"] == 0


@pytest.mark.slow
def test_what_a_reward_does_not_judge_is_counted(folder: Path) -> None:
    texts = {(n, r.problem, r.sample): r.text for n, r in map(SampleRecord.from_line, lines(folder / "jsonl"))}
    for name, r in map(SampleRecord.from_line, lines(folder / "judged")):
        zeros = (texts[name, r.problem, r.sample] or "").startswith("0")
        assert (r.reward is None) == zeros
    judged = evaluation(folder / "judged")["benchmarks"]["heldout"]
    right = [r for n, r in map(SampleRecord.from_line, lines(folder / "judged")) if n == "heldout" and r.reward == 0.5]
    assert 0 < judged["unjudged"] < 244 and sum(judged["per_problem"]["correct"]) == len(right) > 0
    said = (folder / "said").read_text()
    assert f"heldout: {judged['unjudged']} samples have no reward; they are neither right nor wrong" in said


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_says_what_the_embedded_engine_says(tmp_path: Path) -> None:
    """Greedy, since the engines draw other random numbers; its weights come by a push alone."""
    for engine in ("embedded", "vllm-colocated"):
        more = ("--engine", engine, "--rl-default-top-k", 1, "--problems", 24, "--samples", 2, "--keep-text")
        vllm = ("--rl-vllm-memory-gib", 0.25, "--rl-vllm-startup-timeout", 400)
        run_script(TOOL, *flags(*HELDOUT, *more, *vllm, "--out", tmp_path / engine), timeout=500)
    greedy = [lines(tmp_path / engine) for engine in ("embedded", "vllm-colocated")]
    assert greedy[0] == greedy[1] and len(greedy[0]) == 48
    rows = [SampleRecord.from_line(x)[1] for x in greedy[0]]
    assert len({r.text for r in rows}) > 12 and all(
        a.text == b.text for a, b in zip(rows[::2], rows[1::2], strict=True)
    )


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool()


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_is_one_line(
    folder: Path, tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "initialize", lambda *args, **more: groups())
    run = folder / "trained" / "checkpoints"
    other = random_qwen3(tmp_path / "other", vocab_size=15)
    # of the same sizes, with a head of its own that the checkpoint does not have
    sizes = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 160, "vocab_size": 15}
    untied = random_qwen3(tmp_path / "untied", tied=False, **sizes)
    for more, words in (
        (("--step", 7), f"--step must be one of [1, 2] of --load {run}, got 7"),
        (("--bf16",), "iter_0000002 holds torch.float32 weights: --bf16 must say the same, got torch.bfloat16"),
        (("--load-hf", other), "iter_0000002 is of another model: hidden_size 64, --load-hf has 48"),
        (
            ("--load-hf", untied),
            f"--load {run}/iter_0000002/weights cannot be read: CheckpointException: KeyError: 'output_layer",
        ),
    ):
        said = message(tool, capsys, tmp_path / "out", *HELDOUT, "--problems", 1, "--load", run, *more)
        assert words in said and said.count("\n") == 1, said
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_folder_of_another_model_or_reward_is_not_gone_on_with(
    folder: Path, tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool, "initialize", lambda *args, **more: groups())
    # the same weights, which mean something else
    other = shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    said = message(tool, capsys, folder / "alone", *SMALL, "--load-hf", other)
    assert "samples.jsonl was written with --load-hf (config.json) {" in said and said.count("\n") == 1
    judge = Path(shutil.copy(folder / "judge.py", tmp_path / "judge.py"))
    out = shutil.copytree(folder / "judged", tmp_path / "judged")
    text = (out / "samples.jsonl").read_text().replace(str(folder / "judge.py"), str(judge), 1)
    (out / "samples.jsonl").write_text(text)
    judge.write_text(JUDGE.replace("/ 2", "/ 3"))
    jsonl = ["--benchmark", f"heldout={folder / 'sorted.jsonl'}", f"again={folder / 'sorted.jsonl'}", "--samples", 4]
    said = message(tool, capsys, out, *jsonl, "--rl-reward", f"{judge}:no_opinion_on_zeros", "--rl-grader-workers", 1)
    assert "samples.jsonl was written with --rl-reward (sha256 of its file) " in said
