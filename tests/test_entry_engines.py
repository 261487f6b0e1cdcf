"""The entry script with vLLM as its engine: the quickstart with a TP2 trainer, on the real engine."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_replay.arguments import parse_args
from megatron_replay.telemetry import read_metrics
from tests.launch import EXAMPLE, ROOT, torchrun
from tests.preloaded import preloaded

real_engine = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
]
FLAGS = ROOT / "examples" / "quickstart" / "flags.txt"
GAP = "train_rollout_logprob_abs_diff"


def run(folder: Path, engine: str, steps: int, *more: object) -> list[dict[str, Any]]:
    """The rows of a run that leaves no engine behind. The engine beside the ranks runs under the real launcher."""
    flags = ["--run-dir", folder, "--rl-engine", engine, "--train-iters", steps, "--rl-vllm-memory-gib", 0.25]
    words = (f"@{FLAGS}", *flags, "--rl-vllm-startup-timeout", 400, *more)
    if engine == "vllm-colocated":
        torchrun(2, EXAMPLE, *words, timeout=580)
    else:
        preloaded(2, *words, timeout=580)
    assert not [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())]
    rows = read_metrics(folder)
    assert [r["step"] for r in rows] == list(range(steps))
    assert all(r["engine/restarts"] == r["engine/discarded_samples"] == 0 for r in rows)
    return rows


@pytest.mark.slow
@real_engine[1]
def test_colocated_learns_and_the_model_is_saved_for_others(tmp_path: Path) -> None:
    rows = run(tmp_path / "run", "vllm-colocated", 30, "--eval-prompts", 64, "--save-hf", tmp_path / "hf")
    first, last = (sum(r["reward_mean"] for r in part) / 5 for part in (rows[:5], rows[-5:]))
    assert last > first + 0.08, (first, last)
    assert max(r[GAP + "_max"] for r in rows) < 1e-4, "the engine samples with the trainer's weights"
    assert sorted(os.listdir(tmp_path / "run")) == [
        "checkpoints", "curves.png", "draws.jsonl", "engine", "metrics.jsonl", "rollouts.jsonl", "run.json",
        "summary.json", "tensorboard",
    ]  # fmt: skip
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["accuracy_after"] > 0.1

    from transformers import AutoModelForCausalLM

    base, trained = (
        AutoModelForCausalLM.from_pretrained(f) for f in (ROOT / "examples/quickstart/model", tmp_path / "hf")
    )
    before, after = base.state_dict(), trained.state_dict()
    assert before.keys() == after.keys() and all(before[n].shape == after[n].shape for n in before)
    assert any((before[n] != after[n]).any() for n in before)


@pytest.mark.slow
@real_engine[1]
def test_with_a_server_and_no_learning_the_gap_stays_flat(tmp_path: Path) -> None:
    """lr = 0, replay on: trainer and engine agree on every token of 20 steps, fresh or replayed."""
    rows = run(
        tmp_path / "run", "vllm-server", 20, "--lr", 0, "--rl-replay-warmup-steps", 4, "--eval-prompts", 0,
        "--rl-replay-ratio", 1,
    )  # fmt: skip
    assert max(r[GAP + "_max"] for r in rows) < 1e-4 and all(r[GAP] < 1e-5 for r in rows)
    assert all(r["replay/draw_size"] > 0 and r["replay/logprob_abs_diff_max"] < 1e-4 for r in rows[4:])
    assert [r["engine/weight_version"] for r in rows] == list(range(20))
    assert all(r["sync/seconds"] > 0 and r["sync/bytes"] == rows[0]["sync/bytes"] > 0 for r in rows)


@pytest.mark.slow
@real_engine[1]
def test_one_step_ahead_every_rollout_is_born_with_the_weights_that_sampled_it(tmp_path: Path) -> None:
    """Two data-parallel ranks: one feeds the server, both send requests."""
    rows = run(
        tmp_path / "run", "vllm-server", 8, "--rl-generation-lag", 1, "--rl-replay-warmup-steps", 3,
        "--tensor-model-parallel-size", 1,
        "--rl-replay-tau-max", 2, "--eval-prompts", 0, "--rl-replay-age-metrics",
    )  # fmt: skip
    assert [r["engine/weight_version"] for r in rows] == [0, 0, 1, 2, 3, 4, 5, 6]
    # the first batch has nothing to overlap with: no gap at all; then one update lies between engine and trainer
    assert rows[0][GAP + "_max"] < 1e-4 < min(r[GAP + "_max"] for r in rows[1:])
    assert all(r["fresh/rollouts"] > 0 and r["age_01/ratio_mean"] > 0 for r in rows)
    assert not any("age_00/ratio_mean" in r for r in rows)
    # fresh rollouts are of age 1 already: what is drawn beside them is of age 2, the bound
    assert all(r["replay/age_max"] == r["replay/age_mean"] == 2 for r in rows[3:])


def test_what_cannot_work_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for engine in ("embedded", "vllm-colocated"):
        with pytest.raises(SystemExit):
            parse_args([f"@{FLAGS}", "--rl-engine", engine, "--rl-generation-lag", "1"])
        said = capsys.readouterr().err
        assert f"--rl-generation-lag must be 0 with --rl-engine {engine}, which samples on what trains, got 1" in said
    with pytest.raises(SystemExit):
        parse_args([f"@{FLAGS}", "--rl-engine", "vllm-server", "--rl-vllm-max-num-seqs", "4"])
    assert "--rl-vllm-max-num-seqs must hold a group of --grpo-group-size 8" in capsys.readouterr().err
