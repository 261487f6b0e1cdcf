"""Building the GPTModel and loading a Hugging Face folder: what is refused, and what is covered."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_replay.config import ModelOptions
from megatron_replay.trainer.hf_checkpoint import checkpoint_identity, load_hf_weights
from megatron_replay.trainer.model import _check_layout, build_model, global_parameters, resolve_impl
from megatron_replay.weight_sync.hf_mapping import find_rule, hf_names, megatron_names, megatron_shape
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.hf_models import CASES, random_model
from tests.single_rank import SEQ_LENGTH, groups, random_qwen3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return random_qwen3(tmp_path / "model")


def load(folder: Path) -> torch.nn.Module:
    shape = ModelShape.from_folder(folder)
    model = build_model(shape, ModelOptions(make_vocab_size_divisible_by=8), groups(), SEQ_LENGTH)
    load_hf_weights(model, folder, shape, groups())
    return model


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_has_a_rule_and_every_tensor_is_used(tmp_path: Path, case: str) -> None:
    model = load(random_model(tmp_path, CASES[case]))
    shape = ModelShape.from_folder(tmp_path)
    parameters = dict(global_parameters(model))
    used = {hf for name in parameters for hf in find_rule(name, shape)[1]}
    assert used == hf_names(shape)
    assert {n: tuple(p.shape) for n, p in parameters.items()} == {
        n: megatron_shape(n, shape, model.vocab_size) for n in megatron_names(shape)
    }
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())


def change(folder: Path, edit: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in edit.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_missing_tensor_is_named(folder: Path) -> None:
    change(folder, {"model.layers.2.mlp.up_proj.weight": None, "model.norm.weight": None})
    with pytest.raises(
        ValueError, match=r"--load-hf .* lacks 2 tensors, the first is model.layers.2.mlp.up_proj.weight"
    ):
        load(folder)


def test_an_unknown_tensor_is_named(folder: Path) -> None:
    change(folder, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"--load-hf .* has 1 unknown tensors, .*self_attn.q_proj.bias"):
        load(folder)


def test_a_wrong_shape_is_named(folder: Path) -> None:
    change(folder, {"model.layers.1.self_attn.q_norm.weight": torch.ones(17)})
    words = r"does not fit its config.json: model.layers.1.self_attn.q_norm.weight must be \[16\], got \[17\]"
    with pytest.raises(ValueError, match=words):
        load(folder)


def test_a_folder_without_weights_or_config_is_named(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="--load-hf must name a folder with safetensors weights"):
        load(folder)
    with pytest.raises(ValueError, match="--load-hf must name a folder with a config.json"):
        ModelShape.from_folder(tmp_path / "nowhere")


def test_an_index_names_the_files(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {n: f"part-{i % 2}.safetensors" for i, n in enumerate(names)}
    for part in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == part}, folder / part)
    save_file({"stray": torch.zeros(1)}, folder / "stray.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    load(folder)


def test_identity_follows_the_weights(folder: Path, tmp_path: Path) -> None:
    same = random_qwen3(tmp_path / "same")
    other = random_qwen3(tmp_path / "other", seed=1)
    assert checkpoint_identity(folder) == checkpoint_identity(same) != checkpoint_identity(other)


def test_transformer_engine_is_refused_where_it_cannot_run() -> None:
    if torch.cuda.is_available():
        pytest.skip("what happens without a CUDA device")
    with pytest.raises(ValueError, match="--transformer-impl must be local or auto here, got 'transformer_engine'"):
        resolve_impl("transformer_engine", torch.bfloat16)
    assert resolve_impl("auto", torch.bfloat16) == resolve_impl("local", torch.bfloat16) == "local"


def test_transformer_engine_is_chosen_where_its_attention_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.models.gpt.gpt_layer_specs.HAVE_TE", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_impl("auto", torch.bfloat16) == "transformer_engine"
    assert resolve_impl("auto", torch.float32) == resolve_impl("local", torch.bfloat16) == "local"
    assert resolve_impl("transformer_engine", torch.float32) == "transformer_engine"


@dataclasses.dataclass
class Sizes:
    tensor_size: int = 1
    pipeline_size: int = 1


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        (Sizes(8), {}, "--tensor-model-parallel-size must divide the 4 attention heads, got 8"),
        (Sizes(1, 3), {}, "--pipeline-model-parallel-size must divide the 4 layers, got 3"),
        (Sizes(), {"sequence_parallel": True}, "--sequence-parallel needs --tensor-model-parallel-size above 1, got 1"),
    ],
)
def test_a_layout_that_does_not_fit_names_the_flag(
    folder: Path, sizes: Sizes, options: dict[str, bool], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _check_layout(ModelShape.from_folder(folder), ModelOptions(**options), sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "tp", "words"),
    [
        (
            {"num_attention_heads": 12, "num_key_value_heads": 2},
            3,
            "must divide the 2 key-value heads or be a multiple of it, got 3",
        ),
        ({"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}, 6, "the 4 key-value heads or"),
        ({"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 2}, 8, "must divide the 20 fused q, k and v"),
    ],
)
def test_tensor_ranks_and_key_value_heads_that_do_not_fit(
    folder: Path, changes: dict[str, int], tp: int, words: str
) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 48} | changes
    shape = ModelShape.from_config(config, "here")
    with pytest.raises(ValueError, match=f"--tensor-model-parallel-size .*{words}"):
        _check_layout(shape, ModelOptions(), Sizes(tp))  # type: ignore[arg-type]


def test_more_tensor_ranks_than_key_value_heads_are_accepted(folder: Path) -> None:
    _check_layout(ModelShape.from_folder(folder), ModelOptions(), Sizes(4))  # type: ignore[arg-type]


def test_only_tested_precisions() -> None:
    with pytest.raises(ValueError, match="dtype must be one of torch.float32, torch.bfloat16, got torch.float16"):
        ModelOptions(dtype=torch.float16)
