"""What only the kernel can get wrong: shards, strides, memory, offsets, blocks. The rest: test_token_logprob.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_replay.ops import token_logprob_triton as kernels
from megatron_replay.ops.launch import LaunchConfig, overridden
from megatron_replay.ops.token_logprob import TokenLogprob, merge_partials, token_logprob
from tests.numerics import assert_no_worse_than_torch, assert_not_trivial, token_logprob64

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALLEST = LaunchConfig(1, 1)


@pytest.fixture
def small_blocks() -> Any:
    """Blocks of 512 bytes, so that short rows take several."""
    with overridden("token_logprob_forward", SMALLEST), overridden("token_logprob_backward", SMALLEST):
        yield


def poisoned(t: int, columns: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[t, columns] rows `stride` apart in memory full of NaN."""
    return torch.full((t, stride), math.nan, dtype=dtype, device=device)[:, :columns]


def over_shards(shards: list[Tensor], target: Tensor, vocab_size: int, g: Tensor, h: Tensor) -> tuple[Any, Tensor]:
    """Result and dlogits of the vocabulary over all shards, each shard's dlogits in place of its logits."""
    width, settings = shards[0].shape[1], {"vocab_size": vocab_size, "temperature": 0.7}
    starts = [i * width for i in range(len(shards))]
    partials = [
        kernels.token_logprob_forward(x, target, vocab_start=s, **settings) for x, s in zip(shards, starts, strict=True)
    ]
    result = merge_partials(torch.stack(partials), 0.7)
    for x, s in zip(shards, starts, strict=True):
        out = kernels.token_logprob_backward(x, target, result, g, h, vocab_start=s, **settings, out=x)
        assert out is x
    return result, torch.cat(shards, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(("columns", "vocab_size", "stride"), [(300, 299, 300), (141, 97, 192), (64, 30, 72)])
@pytest.mark.usefixtures("small_blocks", "poisoned_memory")
def test_shards_against_float64(
    dtype: torch.dtype, tp: int, columns: int, vocab_size: int, stride: int, device: torch.device
) -> None:
    """Odd and even shards, some all padding, their padding and the gaps between rows full of NaN."""
    t, width = 11, -(-columns // tp)
    logits, target = (torch.randn(t, vocab_size) * 3).to(dtype), torch.randint(0, vocab_size, (t,))
    g, h = torch.randn(2, t)
    truth_in, torch_in = logits.double().requires_grad_(), logits.clone().requires_grad_()
    truth = token_logprob64(truth_in, target, vocab_size, 0.7)
    theirs = token_logprob64(torch_in, target, vocab_size, 0.7)
    (truth[0] * g + truth[1] * h).sum().backward()
    (theirs[0] * g.to(dtype) + theirs[1] * h.to(dtype)).sum().backward()

    shards = []
    for start in range(0, tp * width, width):
        shard = poisoned(t, width, stride, dtype, device)
        words = logits[:, start : start + width].to(device)
        shard[:, : words.shape[1]] = words
        shards.append(shard)
    result, dlogits = over_shards(shards, target.to(device), vocab_size, g.to(device), h.to(device))
    for ours, true, their in zip(result[:2], truth, theirs, strict=True):
        assert_no_worse_than_torch(ours.cpu(), true, their)
    assert_no_worse_than_torch(dlogits[:, :vocab_size].cpu(), truth_in.grad, torch_in.grad)
    assert (dlogits[:, vocab_size:] == 0).all()
    assert_not_trivial(truth_in.grad, 0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_qwen3_vocabulary(dtype: torch.dtype, device: torch.device) -> None:
    """One row of 151,936 columns, 151,669 of them words, in the table's blocks."""
    v, words = 151936, 151669
    logits, target = torch.randn(1, v, device=device).mul_(4).to(dtype), torch.tensor([words - 1], device=device)
    result, truth = token_logprob(logits, target, vocab_size=words, backend="triton"), logits.double()
    want = token_logprob64(truth, target, words, 1.0)
    for x, y in zip(result[:2], want, strict=True):
        assert float((x - y).abs().max()) < 5e-6
    one = torch.ones(1, device=device)
    out = kernels.token_logprob_backward(
        logits, target, result, one, None, vocab_start=0, vocab_size=words, temperature=1.0
    )
    p = truth[:, :words].softmax(1)
    p[0, words - 1] -= 1
    torch.testing.assert_close(out[:, :words].double(), -p, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=1e-6)
    assert (out[:, words:] == 0).all()


@pytest.mark.parametrize("config", [LaunchConfig(1, 1), LaunchConfig(4, 1), LaunchConfig(1, 8), LaunchConfig(8, 2)])
@pytest.mark.usefixtures("poisoned_memory")
def test_blocks_do_not_matter(config: LaunchConfig, device: torch.device) -> None:
    logits, target = torch.randn(3, 2100, device=device) * 3, torch.tensor([0, 2099, 1000], device=device)
    settings = {"vocab_start": 0, "vocab_size": 2100, "temperature": 1.3}
    want = token_logprob(logits, target, temperature=1.3, backend="reference")
    g, h = torch.randn(2, 3, device=device)
    dwant = kernels.token_logprob_backward(logits, target, want, g, h, **settings)
    with overridden("token_logprob_forward", config), overridden("token_logprob_backward", config):
        got = token_logprob(logits, target, temperature=1.3, backend="triton")
        dgot = kernels.token_logprob_backward(logits, target, want, g, h, **settings)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=5e-6)
    assert torch.equal(dgot, dwant), "the gradient of a column depends on no other column"


def test_rows_beyond_two_to_the_31(device: torch.device) -> None:
    """The last of three rows begins 2^31 + 32 elements into the tensor. Pages between the rows are never touched."""
    columns, stride = 40, 2**30 + 16
    if device.type == "cuda" and torch.cuda.mem_get_info()[0] < 5 * 2**30:
        pytest.skip("needs 5 GiB of free GPU memory")
    storage = torch.empty(2 * stride + columns, dtype=torch.bfloat16, device=device)
    logits = storage.as_strided((3, columns), (stride, 1))
    logits.copy_(torch.randn(3, columns))
    kept, target = logits.clone(), torch.tensor([3, 0, 39], device=device)
    g = torch.tensor([1.0, -2.0, 0.5], device=device)
    settings = {"vocab_start": 0, "vocab_size": columns, "temperature": 1.0}
    far, near = (
        merge_partials(kernels.token_logprob_forward(x, target, **settings)[None], 1.0) for x in (logits, kept)
    )
    # strides that 16 divides, and others, lay the words out differently over the threads that add them up
    for x, y in zip(far, near, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    grads = [kernels.token_logprob_backward(x, target, near, g, None, **settings, out=x) for x in (logits, kept)]
    assert torch.equal(*grads)
    assert_not_trivial(grads[0], 0.1)


def test_rows_beyond_65536(device: torch.device) -> None:
    """The token axis is the grid's first, the only one that takes more than 65,535 programs."""
    t, last = 65_537, [0, 65_535, 65_536]
    logits, target = torch.randn(t, 9, device=device), torch.randint(0, 9, (t,), device=device)
    want = token_logprob(logits, target, backend="reference")
    partials, grad = (
        interpreted_rows(logits, target, want, last) if device.type == "cpu" else all_rows(logits, target, want)
    )
    got = merge_partials(partials[None], 1.0)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x[last], y[last], rtol=1e-6, atol=2e-6)
    p = logits[last].softmax(1)
    torch.testing.assert_close(grad[last], torch.nn.functional.one_hot(target[last], 9) - p, rtol=1e-5, atol=1e-6)


def all_rows(logits: Tensor, target: Tensor, want: TokenLogprob) -> tuple[Tensor, Tensor]:
    settings = {"vocab_start": 0, "vocab_size": logits.shape[1], "temperature": 1.0}
    partials = kernels.token_logprob_forward(logits, target, **settings)
    ones = torch.ones_like(want.log_sum)
    return partials, kernels.token_logprob_backward(logits, target, want, ones, None, **settings)


def interpreted_rows(logits: Tensor, target: Tensor, want: TokenLogprob, rows: list[int]) -> tuple[Tensor, Tensor]:
    """The interpreter would take minutes for all programs."""
    from tests.triton_interpreter import only_programs

    with only_programs(*rows):
        return all_rows(logits, target, want)


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
@pytest.mark.usefixtures("small_blocks", "poisoned_memory")
def test_a_broken_word_is_not_hidden(garbage: float, device: torch.device) -> None:
    """A NaN or +inf logit makes its own row NaN, and no other; -inf excludes a word."""
    logits, target = torch.randn(3, 400, device=device), torch.tensor([1, 2, 3], device=device)
    want = token_logprob(logits, target, backend="reference")
    logits[1, 300] = garbage
    got = token_logprob(logits, target, backend="triton")
    for x, y in zip(got[:3], want, strict=False):
        assert torch.isnan(x[1]) and torch.allclose(x[[0, 2]], y[[0, 2]], rtol=1e-6, atol=2e-6)
    one, settings = torch.ones(3, device=device), {"vocab_start": 0, "vocab_size": 400, "temperature": 1.0}
    grad = kernels.token_logprob_backward(logits, target, got, one, one, **settings)
    assert torch.isnan(grad[1]).all() and torch.isfinite(grad[[0, 2]]).all()


@pytest.mark.usefixtures("small_blocks", "poisoned_memory")
def test_extreme_logits(device: torch.device) -> None:
    """Blocks that are excluded whole, and words 200 above and below the others."""
    logits = torch.randn(4, 500)
    logits[0, :200] = -math.inf
    logits[1, 450] = 200.0
    logits[2, 10] = -200.0
    logits[3, :] = -math.inf
    logits[3, 499] = 1.0
    target = torch.tensor([300, 450, 10, 499])
    want = token_logprob(logits.double(), target)
    got = token_logprob(logits.to(device), target.to(device), backend="triton")
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x.cpu().double(), y, rtol=1e-6, atol=2e-6)
    assert got.logprob[3] == 0 and got.entropy[3] == 0


def test_bytes_moved(device: torch.device) -> None:
    """One read forward, one read and one write backward, and no read of a row without a coefficient."""
    if device.type != "cpu":
        pytest.skip("only the interpreter counts bytes")
    from tests.triton_interpreter import Traffic, traffic

    def moved() -> Traffic:
        seen = Traffic(traffic.loaded, traffic.stored)
        traffic.loaded = traffic.stored = 0
        return seen

    t, columns = 4, 9496
    logits, target = torch.randn(t, columns).bfloat16(), torch.zeros(t, dtype=torch.int64)
    settings = {"vocab_start": 0, "vocab_size": columns, "temperature": 1.0}
    row, scalars = 2 * columns, 32
    moved()
    result = merge_partials(kernels.token_logprob_forward(logits, target, **settings)[None], 1.0)
    forward = moved()
    g = torch.tensor([1.0, 0.0, 2.0, 0.0])
    kernels.token_logprob_backward(logits, target, result, g, None, **settings, out=logits)
    backward = moved()
    assert t * row <= forward.loaded <= t * (row + scalars) and forward.stored == t * 4 * 4
    assert 2 * row <= backward.loaded <= 2 * row + t * scalars and backward.stored == t * row


def test_refuses_what_it_cannot_run(device: torch.device) -> None:
    logits, target = torch.zeros(2, 8, device=device), torch.tensor([0, 1], device=device)
    with pytest.raises(ValueError, match=r"^logits must be bfloat16, float16 or float32 .*got torch.float64"):
        token_logprob(logits.double(), target, backend="triton")
    with pytest.raises(ValueError, match=r"^logits must have stride 1 along the vocabulary .*got 2"):
        token_logprob(torch.zeros(8, 2, device=device).T, target, backend="triton")
