"""The start of the process groups, as far as one process can see it."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from tests.single_rank import groups

from megatron_replay.trainer import parallel  # isort: skip


@pytest.mark.parametrize(
    ("rank", "processes", "needed"), [("1", "2", 2), ("1", "4", 4), ("3", None, 4)]
)  # fmt: skip
def test_more_processes_than_gpus_are_told_both(
    monkeypatch: pytest.MonkeyPatch, rank: str, processes: str | None, needed: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", rank)
    if processes is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    words = rf"^--nproc-per-node {needed} needs {needed} GPUs, got 1; CUDA_VISIBLE_DEVICES= runs on CPUs$"
    with pytest.raises(ValueError, match=words):
        parallel._start_distributed(None, timedelta(seconds=1))


def test_float32_products_are_float32_whatever_the_image_says() -> None:
    """TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 is the precision `high`."""
    groups()
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(ValueError, match="must divide the number of processes, got 1"):
            parallel.initialize(2, 1, seed=1)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
