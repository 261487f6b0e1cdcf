"""What only the kernels under linear_grpo_loss can get wrong. The rest: test_linear_grpo_loss.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_replay.ops import linear_grpo_loss as linear_module
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.linear_grpo_loss import _shard
from tests.heads import OPTIONS, TEMPERATURE, V, head_case, linear, with_grad
from tests.numerics import random_case


@pytest.mark.parametrize("name", ["default", "sequence"])
@pytest.mark.usefixtures("poisoned_memory")
def test_triton_in_chunks_of_rows_that_need_padding(name: str, device: torch.device) -> None:
    """Rows of 40 columns lie 64 apart: kernels and products must leave the gap alone, whatever it holds."""
    hidden, weight, target, case = head_case(OPTIONS[name], torch.bfloat16)
    hidden, weight, target, case = hidden.to(device), weight.to(device), target.to(device), case.to(device)
    grads = []
    for chunk_tokens in (3, 64):
        h, w = with_grad(hidden, weight)
        linear(h, w, target, case, chunk_tokens=chunk_tokens, backend="triton").loss.backward()
        grads.append((h.grad, w.grad))
    for x, y in zip(*grads, strict=True):
        assert torch.isfinite(x).all()
        torch.testing.assert_close(x.float(), y.float(), rtol=2e-2, atol=2e-2)


class NoScalar(TorchDispatchMode):
    """An operator that hands a value to Python, for which a GPU would have to be waited for, is an error."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_waits_for_the_device(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """But for the checks of values, which are made on CPU tensors alone."""
    hidden, weight, target, case = head_case(OPTIONS[name], torch.float32)
    hidden, weight, target, case = hidden.to(device), weight.to(device), target.to(device), case.to(device)
    h, w = with_grad(hidden, weight)
    shard = _shard(h, w, target, 0, V, TEMPERATURE, None, 10, None, "triton")
    monkeypatch.setattr(linear_module, "_shard", lambda *_: shard)
    monkeypatch.setattr(GrpoLossInputs, "check", lambda *_: None)
    with NoScalar():
        linear(h, w, target, case, backend="triton").loss.backward()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoScalar():
        float(h.detach().sum())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["default", "sequence"])
def test_memory_and_synchronisation_on_a_gpu(name: str) -> None:
    """Chunks of 64 tokens: memory beyond the gradients is that of a chunk, and the host never waits."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    lengths, columns, h_size = (1000, 0, 1048), 32064, 64
    case = random_case(OPTIONS[name], lengths).to(torch.device("cuda"))
    t = sum(lengths)
    h = torch.randn(t, h_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    w = torch.randn(columns, h_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    target = torch.randint(0, columns, (t,), device="cuda")

    def step() -> None:
        linear(h, w, target, case, vocab_size=columns, chunk_tokens=64).loss.backward()

    step()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    gradients = 2 * columns * h_size * 4 + 4 * t * h_size * 2
    assert torch.cuda.max_memory_allocated() - before - gradients < t * columns * 2 / 8
