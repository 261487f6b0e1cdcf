"""The same rollouts, losses, gradients, draws and samples on every TP x PP x DP layout (gloo processes)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch import run_script
from tests.single_rank import random_qwen3

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("layout_worker.py")
WORLDS = {
    2: ["tp2", "pp2", "dp2", "tp2-sp", "tp2-distopt", "pp2-distopt", "dp2-distopt"],
    4: ["tp2-pp2", "tp2-pp2-sp-triton", "tp2-pp2-sp-distopt", "tp2-dp2", "pp2-dp2-distopt", "pp4"],
}
CASES = [(world, name) for world, names in WORLDS.items() for name in names]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("layouts")
    model = random_qwen3(folder / "model")
    cases = ["1:tp1", *(f"{world}:{name}" for world, name in CASES)]
    run_script(WORKER, "--model", model, "--layouts", *cases, "--out", folder, timeout=500)
    return {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}


def test_the_reference_replays_and_clips(results: dict[str, Any]) -> None:
    """What the layouts are compared on is not trivial: replay on, real advantages, gradients that are clipped."""
    rows = results["tp1"]["rows"]
    assert rows[0]["replay/draw_size"] == 0 and all(r["replay/draw_size"] >= 6 for r in rows[1:])
    assert all(abs(r["loss"]) > 1e-4 and r["grad_norm"] > 0.1 for r in rows)
    assert rows[2]["replay/age_max"] == 2 and rows[2]["train/kl_mean"] > 0
    assert rows[2]["replay/logprob_abs_diff_mean"] > 1e-3


@pytest.mark.parametrize(("world", "name"), CASES, ids=[name for _, name in CASES])
def test_layout_equals_one_rank(results: dict[str, Any], world: int, name: str) -> None:
    expected, got = results["tp1"]["rows"], results[name]["rows"]
    assert len(got) == len(expected) == 3
    for e, g in zip(expected, got, strict=True):
        assert g["replay/draw_hash"] == e["replay/draw_hash"]
        assert abs(g["loss"] - e["loss"]) < 1e-5
        assert abs(g["grad_norm"] - e["grad_norm"]) < 1e-4
        for key in ("reward_mean", "replay/draw_size", "replay/age_mean", "replay/size", "train/tokens"):
            assert g[key] == pytest.approx(e[key], abs=1e-9), key
        for key in ("fresh/ratio_mean", "replay/ess", "train/kl_mean", "train/entropy_mean", "age_01/ratio_mean"):
            assert g.get(key) == pytest.approx(e.get(key), abs=1e-4), key


@pytest.mark.parametrize("name", [name for _, name in CASES if "dp2" in name])
def test_drawn_rollouts_move_between_data_parallel_ranks(results: dict[str, Any], name: str) -> None:
    """So the equalities above hold for rollouts that another rank stores than the one that trains them."""
    assert sum(row["replay/moved"] for row in results[name]["rows"]) > 0


@pytest.mark.parametrize(("world", "name"), CASES, ids=[name for _, name in CASES])
def test_layout_samples_what_one_rank_samples(results: dict[str, Any], world: int, name: str) -> None:
    expected, got = results["tp1"]["sampled"], results[name]["sampled"]
    assert got.keys() == expected.keys() and len(got) == 16
    for uid, (tokens, logprobs) in expected.items():
        assert got[uid][0] == tokens, uid
        assert got[uid][1] == pytest.approx(logprobs, abs=1e-5)


@pytest.mark.parametrize("name", ["pp2", "pp4"])
def test_a_pipeline_samples_from_the_float32_logits_of_bf16_weights(results: dict[str, Any], name: str) -> None:
    """Stages compute what one rank computes, bit for bit; logits of bfloat16 give other log-probs by far."""
    one, got = results["tp1"], results[name]
    assert got["bf16_head"] == one["bf16_head"]
    assert got["fp32_head"] == one["fp32_head"]
    # of the first token of a rollout, before the two may draw other ones
    gaps = [abs(exact[1][0] - one["bf16_head"][uid][1][0]) for uid, exact in one["fp32_head"].items()]
    assert max(gaps) > 1e-3


@pytest.mark.parametrize("name", ["tp1", "tp2", "tp2-sp", "dp2", "tp2-dp2"])
def test_logprobs_equal_the_labels_path_of_megatron(results: dict[str, Any], name: str) -> None:
    assert results[name]["labels_gap"] < 1e-5
