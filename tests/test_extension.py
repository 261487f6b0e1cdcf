"""The compiled extension against the torch definition."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_replay.ops import priority_draw_reference as reference
from megatron_replay.ops.priority_draw import draw_keys, largest
from megatron_replay.ops.priority_draw_cuda import draw_keys as compiled_keys
from megatron_replay.ops.priority_draw_cuda import extension
from tests.test_philox import KNOWN

NO_GPU = "no CUDA device"


def inputs(n: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    weight = torch.rand(n, generator=g, dtype=torch.float64)
    weight[::7] = torch.tensor([0.0, float("nan"), float("inf"), -1.0]).repeat(n)[: len(weight[::7])].double()
    uid = torch.randint(-(2**62), 2**62, (n,), generator=g)
    return weight.to(device), uid.to(device)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert tuple(extension().philox4x32(counter, key)) == expected


@pytest.mark.parametrize("n", [0, 1, 7, 4097])
@pytest.mark.parametrize("seed", [0, 2**40 + 3, -5])
def test_host_keys_are_the_reference_s(n: int, seed: int) -> None:
    weight, uid = inputs(n)
    for step, repeat in ((0, 0), (2**32 - 1, 3)):
        ours = compiled_keys(weight, uid, seed=seed, step=step, repeat=repeat)
        expected = reference.draw_keys(weight, uid, seed=seed, step=step, repeat=repeat)
        finite = torch.isfinite(expected)
        assert torch.equal(torch.isfinite(ours), finite)
        # two logarithms, each within one unit in the last place
        assert torch.allclose(ours[finite], expected[finite], rtol=1e-14, atol=1e-14)
        assert torch.equal(largest(ours, uid, n), largest(expected, uid, n))


def test_wrong_inputs_are_named() -> None:
    weight, uid = inputs(8)
    for bad in (uid.int(), uid[:7]):
        with pytest.raises(ValueError, match=r"uid must be int64 \[8\] on cpu"):
            compiled_keys(weight, bad, seed=0, step=0, repeat=0)
    with pytest.raises(ValueError, match="count must be at least 0, got -1"):
        extension().priority_keys_cpu(0, 0, 0, -1, 0, 0, 0, 0)


def test_strided_and_narrow_inputs_give_the_reference_s_keys() -> None:
    weight, uid = inputs(64)
    for w, u in ((weight[::2], uid[1::2]), (weight.float(), uid), (weight[::3].to(torch.bfloat16), uid[:22])):
        ours = compiled_keys(w, u, seed=7, step=2, repeat=1)
        expected = reference.draw_keys(w, u, seed=7, step=2, repeat=1)
        finite = torch.isfinite(expected)
        assert bool(finite.any()) and torch.equal(torch.isfinite(ours), finite)
        assert torch.allclose(ours[finite], expected[finite], rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(4, dtype=torch.int64), r"^weight must be a floating point \[C\], got torch.int64 \[4\]"),
        (torch.ones(2, 2), r"^weight must be a floating point \[C\], got torch.float32 \[2, 2\]"),
        (torch.ones(4, device="meta"), r"^weight must be on a CPU or CUDA device, got meta"),
    ],
)
def test_wrong_weights_are_named(weight: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compiled_keys(weight, torch.arange(4).reshape(weight.shape), seed=0, step=0, repeat=0)


def test_a_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron_replay

    monkeypatch.delattr(megatron_replay, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_replay._C", None)
    with pytest.raises(RuntimeError, match=r"^megatron_replay._C is not built \(.+\); run `pip install .+ -e \.`"):
        extension()


def test_an_explicit_cuda_request_on_the_cpu_is_refused() -> None:
    weight, uid = inputs(8)
    with pytest.raises(RuntimeError, match="backend cuda cannot run priority_draw on cpu: it needs a CUDA device"):
        draw_keys(weight, uid, seed=0, step=0, backend="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a CUDA device")
def test_without_a_driver_or_nvcc_a_cuda_call_says_so() -> None:
    c = extension()
    words = r"cuda.*in cudaGetDeviceCount.*\(.*driver" if c.cuda_architectures() else "built without CUDA"
    with pytest.raises(c.CudaError, match=words):
        c.device_count()
    weight, uid = inputs(8)
    with pytest.raises(c.CudaError):
        c.priority_keys_cuda(weight.data_ptr(), uid.data_ptr(), weight.data_ptr(), 8, 0, 0, 0, 0, 0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)
@pytest.mark.parametrize("n", [1, 7, 4097, 2_000_003])
def test_device_keys_draw_what_the_host_draws(n: int) -> None:
    weight, uid = inputs(n)
    ours = draw_keys(weight.cuda(), uid.cuda(), seed=3, step=5, backend="cuda").cpu()
    expected = reference.draw_keys(weight, uid, seed=3, step=5, repeat=0)
    finite = torch.isfinite(expected)
    assert torch.allclose(ours[finite], expected[finite], rtol=1e-14, atol=1e-14)
    assert torch.equal(largest(ours, uid, 1024), largest(expected, uid, 1024))
