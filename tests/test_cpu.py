"""The CPU portability layer: what it refuses, what it leaves alone, and that each mend is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_replay.trainer import cpu
from tests.launch import ROOT


def test_an_untested_megatron_core_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.18\.0 is untested.*install megatron-core==0\.19\.2"):
        cpu.check_version("0.18.0")
    for version in cpu.TESTED_MEGATRON_CORE:
        cpu.check_version(version)


@pytest.mark.parametrize("cuda", [False, True])
def test_the_version_that_is_installed_is_checked_each_time(cuda: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr("importlib.metadata.version", lambda package: asked.append(package) or "0.18.0")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.18\.0 is untested"):
        cpu.install()
    assert asked == ["megatron-core"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the mends are for machines without CUDA")
def test_cuda_stays_unavailable() -> None:
    cpu.install()
    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert torch.zeros(1).device.type == "cpu"
    # torch itself keeps its meaning: only the listed megatron modules see CPU factories
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_every_mend_names_what_it_mends() -> None:
    for mend in cpu.MENDS:
        assert mend.__doc__ and "/" in mend.__doc__, mend.__name__


def test_nothing_is_mended_where_there_is_cuda() -> None:
    code = (
        "import torch; before = torch.cuda.current_device; torch.cuda.is_available = lambda: True\n"
        "from megatron_replay.trainer import cpu; cpu.install()\n"
        "assert torch.cuda.current_device is before and not cpu._installed"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="the mends are for machines without CUDA")
def test_no_compiler_is_loaded_and_torch_compile_stays_what_it_is() -> None:
    code = (
        "import sys, torch; before = torch.compile\n"
        "from megatron_replay.trainer import cpu; cpu.install()\n"
        "from megatron.core.models.gpt import GPTModel\n"
        "from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train as fused\n"
        "assert torch.compile is before and 'torch._inductor.compile_fx' not in sys.modules\n"
        "x = torch.ones(2, 3)\n"
        "assert fused((x, None), x, 0.0).eq(2).all() and 'torch._inductor.compile_fx' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
