"""The compiled extension itself: known answers, its logarithm, and what it says where it cannot run."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from megatron_replay.ops import priority_draw_compiled as compiled
from megatron_replay.ops.extension import extension, queue
from megatron_replay.ops.priority_draw import DrawWindow, log_weights, priority_draw
from megatron_replay.ops.ragged_gather import ragged_gather, ragged_scatter
from tests.test_philox import KNOWN

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert tuple(extension().philox4x32(counter, key)) == expected


def test_the_logarithm_is_within_two_units_in_the_last_place() -> None:
    g = torch.Generator().manual_seed(0)
    spread = (torch.rand(4000, generator=g, dtype=torch.float64) * 1400 - 700).exp()
    near_one = 1 + torch.randn(4000, generator=g, dtype=torch.float64) * 10.0 ** -torch.randint(
        1, 16, (4000,), generator=g
    )
    edges = [
        5e-324,
        2.2250738585072014e-308,
        2.2250738585072009e-308,
        0.5,
        math.sqrt(0.5),
        1 - 2**-53,
        1.0,
        1 + 2**-52,
        1.7e308,
    ]
    for x in [*spread.tolist(), *near_one.tolist(), *edges]:
        true = math.log(x)
        assert abs(extension().portable_log(x) - true) <= 2 * math.ulp(true), x
    assert extension().portable_log(1.0) == 0


def test_wrong_numbers_are_named_before_any_address_is_used() -> None:
    c = extension()
    window, key, out = (0, 0, 4, 0, 4), (0, 0, 0), (0, 0, 0)
    for bad, words in (
        ((0, 0, 4, 0, -1), r"size must be in \[0, slots\], got -1 of 4"),
        ((0, 0, 4, 0, 5), r"size must be in \[0, slots\], got 5 of 4"),
        ((0, 0, 4, 4, 1), r"head must be in \[0, slots\), got 4 of 4"),
        ((0, 0, 4, -1, 1), r"head must be in \[0, slots\), got -1 of 4"),
        ((0, 0, 2**32, 0, 2**31), r"size must be below 2\^31, got 2147483648"),
    ):
        with pytest.raises(ValueError, match=words):
            c.priority_draw_cpu(bad, key, 1, out, 1)
    for n in (-1, 5):
        with pytest.raises(ValueError, match=rf"n must be in \[0, size\], got {n} of 4"):
            c.priority_draw_cpu(window, key, n, out, 1)
    for n in (-2, 2**31):
        with pytest.raises(ValueError, match=rf"n must be in \[0, 2\^31\), got {n}"):
            c.repeated_draw_cpu(window, key, n, out, 1)
    for count, tokens in ((-1, 1), (0, 0)):
        with pytest.raises(ValueError, match=f"rows must be .*, and ring_tokens at least 1, got {count} and {tokens}"):
            c.ragged_gather_cpu([], (0, 0, count, tokens), 0, 1)
    with pytest.raises(ValueError, match="fields must be at most 4, got 5"):
        c.ragged_gather_cpu([(0, 0, 0)] * 5, (0, 0, 0, 1), 0, 1)


def test_a_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import megatron_replay

    monkeypatch.delattr(megatron_replay, "_C", raising=False)
    monkeypatch.setitem(sys.modules, "megatron_replay._C", None)
    with pytest.raises(RuntimeError, match=r"^megatron_replay._C is not built \(.+\); run `pip install .+ -e \.`"):
        extension()


def test_an_explicit_cuda_request_on_the_cpu_is_refused() -> None:
    window = DrawWindow(torch.zeros(3, dtype=torch.float64), torch.arange(3), 0, 3)
    with pytest.raises(RuntimeError, match="backend cuda cannot run priority_draw on cpu: it needs a CUDA device"):
        priority_draw(window, 1, seed=0, step=0, backend="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="what happens without a CUDA device")
def test_without_a_driver_or_nvcc_every_cuda_call_says_so() -> None:
    c = extension()
    missing = "built without CUDA"
    words = rf"cuda.*in cudaGetDeviceCount.*\(.*driver|{missing}"
    with pytest.raises(c.CudaError, match=words):
        c.device_count()
    window, key, out, on = (0, 0, 4, 0, 4), (0, 0, 0), (0, 0, 0), (0, 0)
    for call in (
        lambda: c.priority_draw_cuda(window, key, 1, out, 0, on),
        lambda: c.repeated_draw_cuda(window, key, 1, out, on),
        lambda: c.log_weights_cuda(0, 0, 0, 1, 0.5, 1e-6, 0, on),
        lambda: c.ragged_gather_cuda([], (0, 0, 1, 1), on),
        lambda: c.ragged_scatter_cuda([], (0, 0, 1, 1), on),
    ):
        with pytest.raises(c.CudaError, match=rf"cuda.*driver|{missing}"):
            call()


def on_both(n: int) -> tuple[DrawWindow, DrawWindow]:
    """One window on the host and on the device: a ring that wraps, every seventh rollout unusable."""
    g = torch.Generator().manual_seed(n)
    log_weight = torch.randn(n, generator=g, dtype=torch.float64)
    log_weight[::7] = torch.tensor([-math.inf, math.nan, math.inf]).repeat(n)[: log_weight[::7].numel()].double()
    uid = torch.randperm(n, generator=g) - n // 2
    host = DrawWindow(log_weight, uid, n // 3, n - n // 8)
    return host, DrawWindow(log_weight.cuda(), uid.cuda(), host.head, host.size)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("n", [1, 33, 1024, 30_000, 1_048_576])
def test_a_device_draws_what_the_host_draws_bit_for_bit(n: int) -> None:
    host, device = on_both(n)
    for m in (1, 1000, 5000, n):
        for expected, found in zip(
            priority_draw(host, m, seed=3, step=5, backend="cpp"),
            priority_draw(device, m, seed=3, step=5, backend="cuda"),
            strict=True,
        ):
            assert torch.equal(found.cpu(), expected)
    if n <= 30_000:
        for expected, found in zip(
            priority_draw(host, 200, seed=3, step=5, with_replacement=True, backend="cpp"),
            priority_draw(device, 200, seed=3, step=5, with_replacement=True, backend="cuda"),
            strict=True,
        ):
            assert torch.equal(found.cpu(), expected)


@pytest.mark.gpu
@needs_gpu
def test_device_log_weights_are_the_host_s_bit_for_bit() -> None:
    advantage, std = torch.randn(10_000), torch.rand(10_000)
    advantage[::9] = torch.nan
    for priority in ("abs-advantage", "group-std", "uniform"):
        host = log_weights(advantage, std, priority, 0.37, 1e-6, backend="cpp")
        device = log_weights(advantage.cuda(), std.cuda(), priority, 0.37, 1e-6, backend="cuda")
        assert torch.equal(device.cpu(), host)


@pytest.mark.gpu
@needs_gpu
def test_the_draw_can_be_captured_in_a_graph() -> None:
    host, device = on_both(30_000)
    n = 1024
    outputs = (
        torch.empty(n, dtype=torch.int64),
        torch.empty(n, dtype=torch.float64),
        torch.zeros(1, dtype=torch.int64),
    )
    outputs = tuple(x.cuda() for x in outputs)
    workspace = torch.empty(extension().draw_workspace_bytes(device.size, n), dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compiled.launch_priority_draw(device, n, outputs, workspace, seed=3, step=5)
    workspace.fill_(255)
    graph.replay()
    slots, keys = priority_draw(host, n, seed=3, step=5, backend="cpp")
    assert int(outputs[2]) == n and torch.equal(outputs[0].cpu(), slots) and torch.equal(outputs[1].cpu(), keys)


@pytest.mark.gpu
@needs_gpu
def test_device_rows_are_the_host_s() -> None:
    g = torch.Generator().manual_seed(1)
    rings = [
        torch.randint(0, 2**31 - 1, (5003,), dtype=torch.int32, generator=g),
        torch.rand(5003, generator=g) < 0.5,
        torch.randn(5003, generator=g),
    ]
    lengths = torch.randint(0, 300, (700,), generator=g)
    start = torch.randint(0, 5003, (700,), generator=g)
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    for offset in range(5):  # alignments of the target
        packed = [torch.zeros(int(cu[-1]) + 8, dtype=t) for t in (torch.int64, torch.bool, torch.float32)]
        on_device = [x.cuda() for x in packed]
        part = slice(offset, offset + int(cu[-1]))
        ragged_gather(rings, start, cu, [x[part] for x in packed])
        ragged_gather([x.cuda() for x in rings], start.cuda(), cu.cuda(), [x[part] for x in on_device], backend="cuda")
        assert all(torch.equal(a, b.cpu()) for a, b in zip(packed, on_device, strict=True))
    rows = torch.tensor([0, 90, 100, 4000]).int()
    places = torch.tensor([4990, 77, 90])  # the first wraps; none overlap
    targets = [torch.zeros_like(x) for x in rings]
    device_targets = [x.cuda() for x in targets]
    source = [x[:4000].contiguous() for x in packed]
    ragged_scatter(targets, places, rows, source)
    ragged_scatter(device_targets, places.cuda(), rows.cuda(), [x.cuda() for x in source], backend="cuda")
    assert all(torch.equal(a, b.cpu()) for a, b in zip(targets, device_targets, strict=True))
    assert queue(torch.device("cuda"))[0] == torch.cuda.current_device()
