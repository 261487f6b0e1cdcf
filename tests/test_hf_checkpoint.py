"""Hugging Face folders written from the model: their files, who can read them, and what a failed save leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megatron_replay.config import ModelOptions
from megatron_replay.trainer import hf_checkpoint
from megatron_replay.trainer.hf_checkpoint import export_hf, load_hf_weights, save_hf
from megatron_replay.trainer.model import build_model
from megatron_replay.weight_sync.hf_mapping import hf_shapes
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.hf_models import CASES, SEQ_LENGTH, load, random_model
from tests.single_rank import groups

Save = Callable[..., None]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model beside the files of a tokenizer and others that are no business of a save."""
    folder = random_model(tmp_path_factory.mktemp("hf") / "base", CASES["qwen2-untied"])
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"):
        (folder / name).write_text(name)
    for name in ("README.md", "pytorch_model.bin", "training_args.bin"):
        (folder / name).write_text(name)
    return folder


@pytest.fixture
def save(base: Path, tmp_path: Path) -> Save:
    def call(target: Path = tmp_path / "out", dtype: torch.dtype = torch.float32, **changes: Any) -> None:
        shape, model = built(base, dtype)
        save_hf(target, model, shape, groups(), **({"base": base} | changes))

    return call


def built(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelShape, Any]:
    shape = ModelShape.from_folder(folder)
    options = ModelOptions(dtype=dtype, make_vocab_size_divisible_by=8)
    model = build_model(shape, options, groups(), SEQ_LENGTH)
    load_hf_weights(model, folder, shape, groups())
    return shape, model


@pytest.mark.parametrize("case", CASES)
def test_an_export_is_every_tensor_in_order(tmp_path: Path, case: str) -> None:
    shape, model = built(random_model(tmp_path, CASES[case]))
    pairs = list(export_hf(model, shape, groups()))
    assert [name for name, _ in pairs] == list(hf_shapes(shape))
    before = load_file(tmp_path / "model.safetensors")
    for name, tensor in pairs:
        assert tensor.shape == hf_shapes(shape)[name] and torch.equal(tensor, before[name]), name


def test_transformers_reads_what_was_saved(base: Path, tmp_path: Path, save: Save) -> None:
    save(max_file_bytes=60_000)
    ids = torch.arange(2, 20)[None]
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "out")(ids).logits, load(base)(ids).logits)


def test_one_file_where_it_fits(base: Path, tmp_path: Path, save: Save) -> None:
    save()
    copied = {"tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"}
    assert {x.name for x in (tmp_path / "out").iterdir()} == copied | {
        "model.safetensors",
        "config.json",
        "generation_config.json",
    }
    assert all((tmp_path / "out" / name).read_text() == name for name in copied)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    config, before = (json.loads((x / "config.json").read_text()) for x in (tmp_path / "out", base))
    assert config == before


def test_files_are_of_bounded_size_and_the_index_names_them(base: Path, tmp_path: Path, save: Save) -> None:
    limit = 35_000
    save(max_file_bytes=limit)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    contents = [load_file(x) for x in files]
    sizes = [sum(t.nbytes for t in x.values()) for x in contents]
    assert max(sizes) <= limit and all(a + b > limit for a, b in pairwise(sizes))
    assert [x.name for x in files] == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(sizes)
    assert index["weight_map"] == {k: f.name for f, x in zip(files, contents, strict=True) for k in x}


def test_a_tensor_larger_than_a_file_goes_alone(base: Path, tmp_path: Path, save: Save) -> None:
    save(max_file_bytes=1)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    names = [name for x in files for name in load_file(x)]
    assert len(files) == len(names) and names == list(hf_shapes(ModelShape.from_folder(base)))


@pytest.mark.parametrize("field", ["dtype", "torch_dtype", None])
def test_the_config_says_what_was_saved(base: Path, tmp_path: Path, save: Save, field: str | None) -> None:
    config = {k: v for k, v in json.loads((base / "config.json").read_text()).items() if k != "dtype"}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | ({field: "float32"} if field else {})))
    save(dtype=torch.bfloat16, base=other)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved == config | {field or "torch_dtype": "bfloat16"}
    weights, before = (load_file(x / "model.safetensors") for x in (tmp_path / "out", base))
    assert all(torch.equal(weights[k], before[k].bfloat16()) for k in before)


def test_nothing_is_overwritten(tmp_path: Path, save: Save) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    with pytest.raises(ValueError, match=f"--save-hf must name a folder that does not exist, got '{target}'"):
        save(target)
    assert not list(target.iterdir()) and list(tmp_path.iterdir()) == [target]


def test_bad_input_is_named(tmp_path: Path, save: Save) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--save-hf must name a folder that can be made, got '.*file/out'"):
        save(tmp_path / "file" / "out")
    with pytest.raises(ValueError, match="max_file_bytes must be at least 1, got 0"):
        save(max_file_bytes=0)
    other = random_model(tmp_path / "other", CASES["qwen2-untied"], intermediate_size=96)
    with pytest.raises(ValueError, match=f"--load-hf '{other}' is of another model: .*ffn_size=96.* got .*ffn_size=80"):
        save(base=other)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("moment", ["first file", "last file", "config", "rename"])
def test_a_save_that_ends_early_leaves_nothing_that_looks_whole(
    tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Ended as kill -9 would: nothing is cleaned up. The next save is not troubled by what is left."""

    class Killed(BaseException):
        pass

    def end(*_: Any, **__: Any) -> None:
        raise Killed

    saved: list[Path] = []
    real = hf_checkpoint.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path, **kwargs: Any) -> None:
        if moment == "first file" or (moment == "last file" and "00002-of-00002" in path.name):
            raise Killed
        saved.append(path)
        real(tensors, path, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(hf_checkpoint, "save_file", save_file)
        if moment in ("config", "rename"):
            patch.setattr(*((hf_checkpoint, "_finish") if moment == "config" else (Path, "rename")), end)
        patch.setattr(hf_checkpoint.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save(max_file_bytes=300_000)
    assert bool(saved) == (moment != "first file")
    assert [x.name for x in tmp_path.iterdir()] == ["out.partial"]
    save(max_file_bytes=300_000)
    assert [x.name for x in tmp_path.iterdir()] == ["out"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2


def test_a_full_disk_leaves_nothing(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(hf_checkpoint, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            save()
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_shape_is_refused(base: Path) -> None:
    shape, model = built(base)
    model.decoder.layers[1].mlp.linear_fc2.weight = torch.nn.Parameter(torch.zeros(48, 79))
    with pytest.raises(ValueError, match=r"layers.1.mlp.linear_fc2.weight must be \[48, 80\] .*, got \[48, 79\]"):
        next(export_hf(model, shape, groups()))
    del model.decoder.layers[1].mlp.linear_fc2.weight
    with pytest.raises(ValueError, match="no pipeline stage has decoder.layers.1.mlp.linear_fc2.weight, and 0 more"):
        next(export_hf(model, shape, groups()))
