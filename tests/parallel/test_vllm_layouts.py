"""Whatever the trainer's layout, a running engine then answers as a fresh one on the exported checkpoint does."""

from __future__ import annotations

import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_replay.config import VllmConfig
from megatron_replay.engines.vllm_child import VllmChild
from megatron_replay.engines.vllm_command import launch_server
from megatron_replay.engines.vllm_options import ServedModel
from tests.hf_models import CASES, random_model
from tests.launch import run_script
from tests.vllm_greedy import (
    ENGINE_SIZES,
    MAX_MODEL_LEN,
    PARAMS,
    Answers,
    answers,
    check_same,
    llm_options,
    prompts,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two CPU workers of vLLM need two cores"),
]
WORKER = Path(__file__).with_name("vllm_worker.py")
LAYOUTS = ["tp2-pp2", "tp1", "tp2", "pp2"]
SIZES = (1, 2)  # tensor parallelism of the two servers
VOCAB = 317  # odd: padded in the trainer, and otherwise in the engine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pushes")
    for seed in (1, 2):
        random_model(out / "models" / f"m{seed}", CASES["qwen3-untied"], seed=seed, vocab_size=VOCAB, **ENGINE_SIZES)
    return out


@pytest.fixture(scope="module")
def pushes(folder: Path) -> list[dict[str, Any]]:
    """Both servers start with random weights of their own, so no answer is right by chance."""
    models = [folder / "models" / name for name in ("m1", "m2")]
    out = folder / "out"
    out.mkdir()

    def start(size: int) -> Any:
        config = VllmConfig(tensor_parallel_size=size, max_num_seqs=16, memory_gib=0.1, startup_timeout=400)
        served = ServedModel(models[0], "float32", MAX_MODEL_LEN, seed=size, device="cpu")
        return launch_server(config, served, None, folder / f"server{size}.log")

    with ThreadPoolExecutor(len(SIZES)) as pool:
        servers = list(pool.map(start, SIZES))
    try:
        urls = [client.url for _, client in servers]
        run_script(WORKER, "--models", *models, "--servers", *urls, "--layouts", *LAYOUTS, "--out", out)
    finally:
        for process, _ in servers:
            process.stop()
    return json.loads((out / "pushes.json").read_text())


@pytest.fixture(scope="module")
def fresh(folder: Path, pushes: list[dict[str, Any]]) -> dict[str, Answers]:
    """What engines that were started from the exported checkpoints answer."""

    def ask(name: str) -> Answers:
        child = VllmChild(llm_options(folder / "out" / name), folder / f"{name}.log", timeout=120, startup_timeout=400)
        found = child.call("generate", prompts(VOCAB), [PARAMS] * 8)
        child.close()
        return answers(found)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(("m1", "m2"), pool.map(ask, ("m1", "m2")), strict=True))


def test_the_two_models_answer_differently(fresh: dict[str, Answers]) -> None:
    assert all(a["tokens"] != b["tokens"] for a, b in zip(fresh["m1"], fresh["m2"], strict=True))


@pytest.mark.parametrize("name", LAYOUTS)
def test_answers_are_those_of_a_fresh_engine(
    pushes: list[dict[str, Any]], fresh: dict[str, Answers], name: str
) -> None:
    rows = [row for row in pushes if row["layout"] == name]
    assert [row["model"] for row in rows] == ["m2", "m1", "m2"]
    assert rows[0]["buckets"] > rows[1]["buckets"] > rows[2]["buckets"] == 1
    for row in rows:
        for got in row["answers"]:
            # requests arrive in other batches, and two workers add up in another order
            check_same(got, fresh[row["model"]], 1e-5)
