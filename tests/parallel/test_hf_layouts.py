"""Every family on every layout computes what transformers computes, and gives back the weights it was given."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_replay.weight_sync.hf_mapping import hf_names, hf_shapes, megatron_names, megatron_shape
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.hf_models import CASES, load, logits_and_gradients, logprobs, random_model, sequences
from tests.launch import ROOT, environment

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("hf_worker.py")
LAYOUTS = {
    "dp2": list(CASES),
    "tp2": list(CASES),
    "pp2": list(CASES),
    # two key-value heads, so two ranks attend to one
    "tp4": ["qwen3-tied", "qwen2-untied", "llama-untied-scaled"],
    "tp2-pp2": ["qwen2-untied", "qwen3-tied"],
}
ALL = [(layout, name) for layout, names in LAYOUTS.items() for name in names]
ONE_STAGE = [(layout, name) for layout, name in ALL if "pp" not in layout]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/NAME, and LAYOUT/NAME as the worker left it."""
    at = tmp_path_factory.mktemp("hf")
    for seed, (name, case) in enumerate(CASES.items()):
        random_model(at / "models" / name, case, seed=seed)
    cases = [f"{layout}:{','.join(names)}" for layout, names in LAYOUTS.items()]
    command = [sys.executable, WORKER, "--models", at / "models", "--cases", *cases, "--out", at]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return at


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, Any]:
    """name -> (model, logits, gradients) of transformers."""
    models = {name: load(folder / "models" / name) for name in CASES}
    return {name: (model, *logits_and_gradients(model)) for name, model in models.items()}


@pytest.mark.parametrize(("layout", "name"), ALL)
def test_logits_are_those_of_transformers(folder: Path, expected: dict[str, Any], layout: str, name: str) -> None:
    _, logits, _ = expected[name]
    assert logits.std() > 0.5
    found = load_file(folder / layout / f"{name}.safetensors")["logits"]
    assert largest_difference(found, logits) < 1e-4


def test_the_sequences_feel_rope_scaling(folder: Path, expected: dict[str, Any]) -> None:
    model, logits, _ = expected["llama-untied-scaled"]
    plain = load(folder / "models" / "llama-untied-scaled", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    plain.load_state_dict(model.state_dict())
    assert largest_difference(logits_and_gradients(plain)[0], logits) > 0.01


@pytest.mark.parametrize(("layout", "name"), ONE_STAGE)
def test_gradients_are_those_of_transformers(folder: Path, expected: dict[str, Any], layout: str, name: str) -> None:
    _, _, gradients = expected[name]
    found = load_file(folder / layout / f"{name}.safetensors")
    for tensor, gradient in gradients.items():
        assert largest_difference(found[f"gradient.{tensor}"], gradient) < 1e-4 * gradient.abs().max(), tensor


@pytest.mark.parametrize(("layout", "name"), ALL)
def test_sampled_logprobs_are_those_of_transformers(
    folder: Path, expected: dict[str, Any], layout: str, name: str
) -> None:
    """The key-value cache, also where several ranks hold the same head."""
    found = load_file(folder / layout / f"{name}.safetensors")
    for row, prompt in enumerate((sequences()[0], sequences()[3])):
        tokens = found[f"sampled.{row}.tokens"].tolist()
        assert len(tokens) == 8 and len(set(tokens)) > 1
        truth = logprobs(expected[name][0], prompt, tokens)
        assert largest_difference(found[f"sampled.{row}.logprobs"], truth) < 1e-4


@pytest.mark.parametrize(("layout", "name"), ALL)
def test_a_save_gives_back_the_weights_bit_for_bit(folder: Path, layout: str, name: str) -> None:
    base, saved = folder / "models" / name, folder / layout / name
    before = load_file(base / "model.safetensors")
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) > 2
    tensors = [(k, v) for file in files for k, v in load_file(file).items()]
    after = dict(tensors)
    assert len(after) == len(tensors)
    assert after.keys() == before.keys() == hf_names(ModelShape.from_folder(base))
    assert ("lm_head.weight" in after) != CASES[name].tied
    assert all(same_bits(after[k], before[k]) for k in before)
    index = json.loads((saved / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {k: file.name for file in files for k in load_file(file)}
    assert not list(saved.parent.glob("*.partial"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_holds_few_copies_of_one_parameter_beside_its_shard(folder: Path, layout: str) -> None:
    shape = ModelShape.from_folder(folder / "models" / LAYOUTS[layout][-1])
    sizes = [4 * math.prod(megatron_shape(n, shape, shape.padded_vocab_size(8, 1))) for n in megatron_names(shape)]
    ranks = json.loads((folder / layout / "memory.json").read_text())
    assert sum(sizes) > 8 * max(sizes)
    # shards and the tensor made of them, and what gloo has not let go of
    assert all(r["most"] <= 3 * max(sizes) for r in ranks), ranks
    assert [r["tensors"] for r in ranks] == [len(hf_shapes(shape))] + [0] * (len(ranks) - 1)
    if layout != "dp2":
        # the measurement sees what is there
        assert max(r["most"] for r in ranks) >= max(sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_failure_of_one_rank_is_raised_on_all(folder: Path, layout: str) -> None:
    ranks = json.loads((folder / layout / "faults.json").read_text())
    full = "[Errno 28] No space left on device"
    assert ranks[0]["disk full after a file"] == f"OSError: {full}"
    assert {r["disk full after a file"] for r in ranks[1:]} == {f"RuntimeError: rank 0: {full}"}
    name = LAYOUTS[layout][-1]
    assert {r["one rank's model is another"] for r in ranks} == {
        f"ValueError: no {CASES[name].family} rule covers the parameter decoder.adapter"
    }
    target = str(folder / layout / name)
    assert {r["the folder exists"] for r in ranks} == {
        f"ValueError: --save-hf must name a folder that does not exist, got {target!r}"
    }
    assert {r["left behind"] for r in ranks} == {""}


def largest_difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape and bool(torch.isfinite(a).all())
    return float((a - b).abs().max())


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))
