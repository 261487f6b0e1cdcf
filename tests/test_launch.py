from __future__ import annotations

import pytest
import torch

from megatron_replay.ops import launch
from megatron_replay.ops.launch import KERNELS, OVERRIDE, LaunchConfig, launch_config, overridden, parse_overrides

CPU = torch.device("cpu")


def test_every_architecture_has_every_kernel() -> None:
    assert set(launch.TABLE) == {80, 90, 100}
    for row in launch.TABLE.values():
        assert tuple(row) == KERNELS


@pytest.mark.parametrize(("capability", "row"), [(80, 80), (86, 80), (89, 80), (90, 90), (100, 100), (120, 100)])
def test_the_newest_row_that_is_not_newer_than_the_device(capability: int, row: int) -> None:
    assert launch.table_row(capability) is launch.TABLE[row]


def test_an_old_device() -> None:
    with pytest.raises(RuntimeError, match=r"^backend triton needs compute capability 80 or later, got 75"):
        launch.table_row(75)


def test_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    default = launch_config("grpo_loss", CPU)
    monkeypatch.setenv(OVERRIDE, "grpo_loss=2x16, token_logprob_forward=8x4")
    assert launch_config("grpo_loss", CPU) == LaunchConfig(2, 16)
    assert launch_config("token_logprob_forward", CPU) == LaunchConfig(8, 4)
    assert launch_config("token_logprob_backward", CPU) == launch.TABLE[80]["token_logprob_backward"]
    with overridden("grpo_loss", LaunchConfig(1, 1)):
        assert launch_config("grpo_loss", CPU) == LaunchConfig(1, 1), "the block is nearer than the environment"
        with overridden("token_logprob_forward", LaunchConfig(1, 2)):
            assert launch_config("grpo_loss", CPU) == LaunchConfig(1, 1)
    assert launch_config("grpo_loss", CPU) == LaunchConfig(2, 16)
    monkeypatch.delenv(OVERRIDE)
    assert launch_config("grpo_loss", CPU) == default


def test_an_override_ends_with_its_block() -> None:
    default = launch_config("grpo_loss", CPU)
    with pytest.raises(KeyError), overridden("grpo_loss", LaunchConfig(1, 1)):
        raise KeyError
    assert launch_config("grpo_loss", CPU) == default


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("grpo_loss", rf"^{OVERRIDE} must be KERNEL=PER_THREADxNUM_WARPS, comma-separated, got 'grpo_loss'"),
        ("grpo_loss=4x8,", rf"^{OVERRIDE} must be"),
        ("grpo_los=4x8", rf"^{OVERRIDE} must name one of token_logprob_forward, .*got 'grpo_los=4x8'"),
        ("grpo_loss=3x8", r"^per_thread must be a power of two, at most 32, got 3"),
        ("grpo_loss=4x0", r"^num_warps must be a power of two, at most 32, got 0"),
        ("grpo_loss=4x64", r"^num_warps must be .*got 64"),
    ],
)
def test_override_errors(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_overrides(text)


def test_overriding_an_unknown_kernel() -> None:
    with pytest.raises(ValueError, match=r"^kernel must be one of .*got 'softmax'"), overridden("softmax", None):
        pass
