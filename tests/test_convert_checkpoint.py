"""tools/convert_checkpoint.py: training checkpoints to Hugging Face and back, alone and under torchrun."""

from __future__ import annotations

import importlib.util
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megatron.core import dist_checkpointing
from safetensors.torch import load_file

from megatron_replay.config import ModelOptions, ReplayConfig
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.trainer import checkpoint
from megatron_replay.trainer.checkpoint import RunState
from megatron_replay.trainer.hf_checkpoint import export_hf
from megatron_replay.trainer.manifest import write_manifest
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.hf_models import CASES, SEQ_LENGTH, random_model
from tests.launch import ROOT, environment, torchrun
from tests.rollouts import batch
from tests.single_rank import groups, policy
from tests.test_safe_load import Harm

TOOL = ROOT / "tools" / "convert_checkpoint.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    sys.path.insert(0, str(TOOL.parent))
    spec = importlib.util.spec_from_file_location("convert_checkpoint", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(TOOL.parent))
    return module


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("convert") / "base", CASES["qwen3-untied"])


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """A run's checkpoints after steps 1 and 2, and the weights it had then."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    trained, weights = policy(base), {}
    buffer = RolloutReplayBuffer(ReplayConfig(warmup_steps=0), seed=9, arena_tokens=512)
    shape = ModelShape.from_folder(base)
    for step in (0, 1):
        fresh = batch([(3, 4), (1, 1), (5, 2), (2, 6)], birth_step=step, first_counter=10 * step, seed=step)
        trained.train(fresh, step)
        buffer.push(fresh)
        checkpoint.save(folder, trained, buffer, RunState(step + 1, 0, {}))
        weights[step + 1] = {k: v.clone() for k, v in export_hf(unwrap(trained.model), shape, groups())}
    return folder, weights


def equal(folder: Path, expected: dict[str, torch.Tensor]) -> bool:
    found = load_file(folder / "model.safetensors")
    return found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in found)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, None])
def test_a_training_checkpoint_becomes_a_hugging_face_folder(
    tool: ModuleType,
    base: Path,
    run: tuple[Path, dict[int, dict[str, torch.Tensor]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int | None,
) -> None:
    folder, weights = run
    assert not equal(base, weights[1]) and not torch.equal(
        weights[1]["model.norm.weight"], weights[2]["model.norm.weight"]
    )
    # this process has its groups already
    monkeypatch.setattr(tool, "start", lambda args: groups())
    monkeypatch.setattr(tool, "shutdown", lambda: None)
    more = [] if step is None else ["--step", str(step)]
    flags = ["--load-hf", base, "--load", folder, "--save-hf", tmp_path / "out", "--make-vocab-size-divisible-by", 8]
    assert tool.main(["to-hf", *map(str, flags), *more]) == 0
    assert equal(tmp_path / "out", weights[step or 2])


@pytest.mark.slow
def test_there_and_back_on_other_layouts(base: Path, tmp_path: Path) -> None:
    """Two processes write it, tensor parallel; megatron-core loads it; one process alone reads it back."""
    out = torchrun(
        2, TOOL, "from-hf", "--load-hf", base, "--save", tmp_path / "dist", "--tensor-model-parallel-size", 2
    )
    assert f"{tmp_path / 'dist'}: {base} in torch.float32" in out
    shape = ModelShape.from_folder(base)
    model = build_model(shape, ModelOptions(), groups(), SEQ_LENGTH)
    state = dist_checkpointing.load(model.sharded_state_dict(), str(tmp_path / "dist" / "iter_0000000" / "weights"))
    model.load_state_dict(state)
    before = load_file(base / "model.safetensors")
    assert all(torch.equal(v, before[k]) for k, v in export_hf(model, shape, groups()))
    done = subprocess.run(
        [sys.executable, TOOL, "to-hf", "--load-hf", base, "--load", tmp_path / "dist", "--save-hf", tmp_path / "hf"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{tmp_path / 'hf'}: the weights after step 0 of {tmp_path / 'dist'}\n"
    assert equal(tmp_path / "hf", before)


def message(tool: ModuleType, capsys: pytest.CaptureFixture[str], *flags: object) -> str:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        tool.main([str(x) for x in flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_bad_input_is_one_line(
    tool: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to_hf = ("to-hf", "--load-hf", base, "--load", tmp_path / "run", "--save-hf", tmp_path / "out")
    from_hf = ("from-hf", "--load-hf", base, "--save", tmp_path / "out")
    for flags, words in (
        (to_hf, f"--load must name a folder with a checkpoint, got '{tmp_path / 'run'}' without latest"),
        ((*to_hf, "--step", 3), f"--step must be one of [] of --load {tmp_path / 'run'}, got 3"),
        ((*to_hf[:-1], base), f"--save-hf must name a folder that does not exist, got '{base}'"),
        ((*from_hf[:-1], base), f"--save must name a folder that does not exist, got '{base}'"),
        ((*from_hf, "--tensor-model-parallel-size", 0), "--tensor-model-parallel-size must be at least 1, got 0"),
        ((*from_hf, "--dtype", "float16"), "argument --dtype: invalid choice: 'float16'"),
        ((*from_hf[:2], tmp_path, *from_hf[3:]), f"--load-hf must name a folder with a config.json, got '{tmp_path}'"),
        (from_hf[:3], "the following arguments are required: --save"),
        ((), "the following arguments are required: {to-hf,from-hf}"),
    ):
        assert words in message(tool, capsys, *flags), flags
    assert not (tmp_path / "out").exists()


def test_a_base_of_another_precision_asks_for_one(
    tool: ModuleType, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((base / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    said = message(tool, capsys, "from-hf", "--load-hf", tmp_path, "--save", tmp_path / "out")
    assert "--dtype must be given (one of float32, bfloat16), got dtype 'float16'" in said


@pytest.mark.slow
def test_a_damaged_or_foreign_checkpoint_is_named(
    tool: ModuleType,
    base: Path,
    run: tuple[Path, dict[int, dict[str, torch.Tensor]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, _ = run
    flags = ("--load", folder, "--save-hf", tmp_path / "out")
    other = random_model(tmp_path / "other", CASES["qwen3-untied"], hidden_size=64)
    said = message(tool, capsys, "to-hf", "--load-hf", other, *flags)
    assert "iter_0000002 is of another model: hidden_size 48, --load-hf has 64" in said
    said = message(tool, capsys, "to-hf", "--load-hf", base, *flags, "--step", 7)
    assert f"--step must be one of [1, 2] of --load {folder}, got 7" in said
    weights = sorted((folder / "iter_0000002" / "weights").glob("*.distcp"))[0]
    weights.write_bytes(weights.read_bytes()[:-1])
    said = message(tool, capsys, "to-hf", "--load-hf", base, *flags)
    assert f"iter_0000002 is damaged: weights/{weights.name} has" in said


def test_nothing_of_a_checkpoint_is_run(
    tool: ModuleType,
    base: Path,
    run: tuple[Path, dict[int, dict[str, torch.Tensor]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool, "start", lambda args: groups())
    folder = shutil.copytree(run[0], tmp_path / "planted")
    iteration, touched = folder / "iter_0000001", tmp_path / "touched"
    (iteration / "weights" / ".metadata").write_bytes(pickle.dumps(Harm(open, str(touched), "w")))
    write_manifest(iteration)
    flags = ("--load", folder, "--step", 1, "--save-hf", tmp_path / "out", "--make-vocab-size-divisible-by", 8)
    said = message(tool, capsys, "to-hf", "--load-hf", base, *flags)
    assert f": --load {iteration / 'weights' / '.metadata'} is no index of tensors: " in said
    assert "it names io.open" in said and not touched.exists() and not (tmp_path / "out").exists()
