"""tools/evaluate.py: flags and files that do not fit are one line, before anything is sampled."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_replay.run.lock import RunLock
from megatron_replay.tasks.sort_digits import SortDigits
from tests.evaluate_tool import HELDOUT, load_tool, message
from tests.launch import ROOT
from tests.single_rank import groups


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool()


def test_flags_that_do_not_fit_are_one_line(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for more, words in (
        ((), "the following arguments are required: --benchmark"),
        ((*HELDOUT, "--samples", 0), "--samples must be at least 1, got 0"),
        ((*HELDOUT, "--samples", 8193), "--samples must be at most 8192, got 8193"),
        ((*HELDOUT, "--problems", 0), "--problems must be at least 1, got 0"),
        ((*HELDOUT, "--chunk", 0), "--chunk must be at least 1, got 0"),
        ((*HELDOUT, "--resamples", 0), "--resamples must be at least 1, got 0"),
        ((*HELDOUT, "--correct-at", "nan"), "--correct-at must be finite, got nan"),
        ((*HELDOUT, "--step", 3), "--step must be given with --load, got 3 alone"),
        ((*HELDOUT, "--engine", "sglang"), "argument --engine: invalid choice: 'sglang'"),
        (
            (*HELDOUT, "--engine", "vllm-server", "--samples", 64, "--rl-vllm-max-num-seqs", 16),
            "--rl-vllm-max-num-seqs must hold --samples 64, got 16",
        ),
        ((*HELDOUT, "--json", tmp_path / "none" / "x"), f"--json must be in a folder that exists, got '{tmp_path}"),
        # the trainer's own words for the trainer's own flags
        ((*HELDOUT, "--rl-default-temperature", 0), "--rl-default-temperature: temperature must be positive"),
        ((*HELDOUT, "--seq-length", 6), "--seq-length must hold a prompt and --rl-max-response-length 6, got 6"),
        ((*HELDOUT, "--sample", 4), "unrecognized arguments: --sample 4"),
    ):
        said = message(tool, capsys, tmp_path / "out", *more)
        assert words in said and said.replace("(--help lists all flags)\n", "").count("\n") == 1, more
    assert not (tmp_path / "out").exists()


def test_input_that_does_not_fit_is_one_line(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # this process has its groups already
    monkeypatch.setattr(tool, "initialize", lambda *args, **more: groups())
    bad, held, empty = tmp_path / "bad.jsonl", tmp_path / "held", tmp_path / "none.jsonl"
    bad.write_text('{"problem": "1=", "answer": "1"}\n{"problem": "2=", "answer": 2}\n')
    lock = RunLock()
    lock.take(held, "--out")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "samples.jsonl").write_text('{"settings": {"--samples": 8}}\n')
    (tmp_path / "torn.json").write_text('{"settings": {}, "benchmarks": {"heldout": {"per_problem": {}}}}')
    (tmp_path / "base.json").write_text(json.dumps({"settings": {}, "benchmarks": {"x": whole_row("0")}}))
    # of the first held-out problem, as an evaluation writes it
    problem = SortDigits(split="heldout", seed=1234).problem(0)
    identity = hashlib.sha256(json.dumps([0, problem.prompt, problem.answer]).encode() + b"\n").hexdigest()
    for name, row in (("same", whole_row(identity)), ("zero", whole_row(identity, correct=0))):
        found = {"settings": {"--rl-max-response-length": 6}, "benchmarks": {"heldout": row, "x": row}}
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    one = (*HELDOUT, "--problems", 1)
    for more, words in (
        (("--benchmark", "x"), "--benchmark must be NAME=FILE.jsonl or NAME=task:TASK, got 'x'"),
        (("--benchmark", "a/b=c"), "--benchmark must be NAME=FILE.jsonl or NAME=task:TASK, got 'a/b=c'"),
        ((*HELDOUT, *HELDOUT), "--benchmark must give each name once, got 'heldout' twice"),
        (("--benchmark", f"x={empty}"), f"--benchmark x={empty}: data_path must name a readable JSONL file"),
        (("--benchmark", f"x={bad}"), f"--benchmark x={bad}: {bad}:2: answer must be a string"),
        (("--benchmark", "x=task:chess"), "--benchmark x=task:chess: --rl-task must be one of sort-digits"),
        ((*one, "--seq-length", 11), "--benchmark heldout=task:sort-digits: prompt 0 must have 1 to 5 tokens"),
        ((*one, "--load-hf", tmp_path), "--load-hf must name a folder with a config.json"),
        ((*one, "--load", tmp_path), f"--load must name a folder with a checkpoint, got '{tmp_path}' without"),
        ((*one, "--aes-beta", -1), "--aes-beta must be at least 0 and finite, got -1.0"),
        ((*one, "--baseline", empty), f"--baseline {empty} is no evaluation.json (FileNotFoundError"),
        ((*one, "--baseline", tmp_path / "torn.json"), "torn.json is no evaluation.json (KeyError: 'problem')"),
        ((*one, "--baseline", tmp_path / "base.json"), "base.json must have the benchmark heldout, got x"),
        ((*HELDOUT, "--problems", 2, "--baseline", tmp_path / "same.json"), "same.json must be of the same problems"),
        ((*one, "--baseline", tmp_path / "zero.json"), "zero.json must have avg_at_k above 0 for an accuracy-"),
        (
            (*one, "--correct-at", 0.5, "--baseline", tmp_path / "same.json"),
            "same.json must have --correct-at 0.5 as here, got 1.0 for heldout",
        ),
        (
            (*one, "--baseline", tmp_path / "same.json"),
            "same.json must have --rl-default-temperature 1.0 as here, got None",
        ),
        ((*one, "--rl-reward", "no_such_module:f"), "--rl-reward no_such_module:f cannot be used: ModuleNotFoundError"),
        ((*one, "--out", held), f"--out {held} is in use by another run, process"),
        (
            (*one, "--out", tmp_path / "other"),
            f"--out {tmp_path}/other/samples.jsonl was written with --load-hf (sha256 of its weights) None, got ",
        ),
    ):
        said = message(tool, capsys, tmp_path / "out", *more)
        assert words in said and said.count("\n") == 1, (more, said)
    lock.release()
    assert not (tmp_path / "out").exists() and [p.name for p in (tmp_path / "other").iterdir()] == ["samples.jsonl"]


def test_the_page_has_every_flag(tool: ModuleType) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text()
    assert [x for a in tool.parser()._actions for x in a.option_strings[-1:] if f"`{x}" not in page] == ["--help"]


def whole_row(identity: str, correct: int = 1) -> dict[str, Any]:
    per = {"problem": [0], "judged": [1], "correct": [correct], "tokens": [6]}
    more = {"samples": 1, "correct_at": 1.0}
    return {"identity": identity, **more, "avg_at_k": float(correct), "length_mean": 6.0, "per_problem": per}
