from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_replay.ops import token_logprob_reference as reference
from megatron_replay.ops.launch import LaunchConfig, overridden
from megatron_replay.ops.token_logprob import TokenLogprob, merge_partials, token_logprob
from tests.numerics import assert_no_worse_than_torch, assert_not_trivial, token_logprob64

Run = Callable[..., TokenLogprob]


@pytest.fixture(params=["reference", "triton"])
def run(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Run]:
    """token_logprob on the device of a backend, results on the CPU; Triton in blocks of 128 bits a thread, one warp."""

    def on_device(logits: Tensor, target: Tensor, **settings: Any) -> TokenLogprob:
        result = token_logprob(logits.to(device), target.to(device), **settings, backend=request.param)
        return TokenLogprob(*(x.cpu() for x in result))

    smallest = LaunchConfig(1, 1)
    with overridden("token_logprob_forward", smallest), overridden("token_logprob_backward", smallest):
        yield on_device


def case(t: int, columns: int, vocab_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (torch.randn(t, columns) * 3).to(dtype), torch.randint(0, vocab_size, (t,))


def objective(logprob: Tensor, entropy: Tensor, g: Tensor, h: Tensor) -> Tensor:
    return (logprob * g.to(logprob.dtype) + entropy * h.to(entropy.dtype)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("t", "columns", "vocab_size"), [(1, 1, 1), (13, 100, 97), (31, 257, 257), (8, 64, 3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_no_worse_than_torch(
    run: Run, dtype: torch.dtype, t: int, columns: int, vocab_size: int, temperature: float
) -> None:
    logits, target = case(t, columns, vocab_size, dtype)
    g, h = torch.randn(t), torch.randn(t)
    truth_in, torch_in, ours_in = (x.clone().requires_grad_() for x in (logits.double(), logits, logits))
    truth = token_logprob64(truth_in, target, vocab_size, temperature)
    theirs = token_logprob64(torch_in, target, vocab_size, temperature)
    ours = run(ours_in, target, vocab_size=vocab_size, temperature=temperature)
    for x, y, z in zip(ours[:2], truth, theirs, strict=True):
        assert x.dtype == torch.float32
        assert_no_worse_than_torch(x, y, z)
        assert float((x.detach().double() - y.detach()).abs().max()) < 1e-5, "float32 arithmetic whatever the dtype"
    objective(*truth, g, h).backward()
    objective(*theirs, g, h).backward()
    objective(*ours[:2], g, h).backward()
    assert ours_in.grad.dtype == dtype
    assert_no_worse_than_torch(ours_in.grad, truth_in.grad, torch_in.grad)
    if vocab_size > 1:
        assert_not_trivial(truth[0], 0.1)
        assert_not_trivial(truth_in.grad, 0.1)


def test_gradcheck_in_float64() -> None:
    logits, target = case(5, 11, 9, torch.float64)

    def f(x: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprob(x, target, vocab_size=9, temperature=0.8)[:2]

    assert token_logprob(logits, target).logprob.dtype == torch.float64
    assert torch.autograd.gradcheck(f, logits.requires_grad_())


def test_lse_and_values_by_hand(run: Run) -> None:
    result = run(torch.tensor([[0.0, 0.0, 0.0, 0.0], [2.0, 0.0, -torch.inf, -torch.inf]]), torch.tensor([2, 0]))
    p = torch.tensor(2.0).sigmoid()
    torch.testing.assert_close(result.lse, torch.tensor([4.0, 1 + float(torch.tensor(2.0).exp())]).log())
    torch.testing.assert_close(result.logprob, torch.stack([torch.tensor(0.25).log(), p.log()]))
    torch.testing.assert_close(result.entropy[1], -(p * p.log() + (1 - p) * (1 - p).log()))


def test_excluded_words_have_no_gradient_and_poison_nothing(run: Run) -> None:
    logits = torch.randn(3, 6)
    logits[:, 4] = -torch.inf
    logits.requires_grad_()
    result = run(logits, torch.tensor([0, 1, 5]))
    (result.logprob + result.entropy).sum().backward()
    assert torch.isfinite(result.entropy).all() and torch.isfinite(logits.grad).all()
    assert (logits.grad[:, 4] == 0).all() and logits.grad[:, 3].abs().min() > 0


def test_a_large_offset_costs_no_entropy() -> None:
    logits, target = case(9, 50, 50, torch.float32)
    near = token_logprob(logits.double(), target)
    far = token_logprob((logits + 1024).double().float(), target)
    torch.testing.assert_close(far.entropy.double(), near.entropy, atol=2e-3, rtol=0)
    exact = token_logprob((logits + 1024).double(), target)
    assert float((far.entropy.double() - exact.entropy).abs().max()) < 1e-5


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 200.0, 6e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_padded_columns_do_not_exist(run: Run, garbage: float, dtype: torch.dtype) -> None:
    logits, target = case(7, 40, 33, dtype)
    clean = logits[:, :33].clone().requires_grad_()
    logits[:, 33:] = garbage
    logits.requires_grad_()
    ours, want = run(logits, target, vocab_size=33), run(clean, target)
    for x, y in zip(ours, want, strict=True):
        assert torch.equal(x, y)
    for result in (ours, want):
        (result.logprob * 2 - result.entropy).sum().backward()
    assert torch.equal(logits.grad[:, :33], clean.grad)
    assert (logits.grad[:, 33:] == 0).all()


def test_tokens_without_coefficient_get_exact_zeros(run: Run) -> None:
    logits, target = case(4, 9, 9, torch.float32)
    logits[2] = torch.nan
    logits.requires_grad_()
    run(logits, target).logprob[torch.tensor([0, 1, 3])].sum().backward()
    assert (logits.grad[2] == 0).all()
    assert (logits.grad[torch.tensor([0, 1, 3])].abs().sum(1) > 0.01).all()


@pytest.mark.parametrize("only", ["logprob", "entropy"])
def test_one_output_alone(only: str) -> None:
    logits, target = case(6, 20, 20, torch.float64)
    truth_in, ours_in = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    token_logprob64(truth_in, target, 20, 1.0)[0 if only == "logprob" else 1].sum().backward()
    getattr(token_logprob(ours_in, target), only).sum().backward()
    torch.testing.assert_close(ours_in.grad, truth_in.grad)
    assert_not_trivial(ours_in.grad, 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_in_place_equals_backward(dtype: torch.dtype) -> None:
    logits, target = case(6, 24, 21, dtype)
    shard = {"vocab_start": 0, "vocab_size": 21, "temperature": 0.9}
    result = token_logprob(logits, target, vocab_size=21, temperature=0.9)
    g, h = torch.randn(6), torch.randn(6)
    kept = logits.clone()
    fresh = reference.token_logprob_backward(logits, target, result, g, h, **shard)
    assert torch.equal(logits, kept)
    same = reference.token_logprob_backward(logits, target, result, g, h, **shard, out=logits)
    assert same is logits and torch.equal(logits, fresh)
    assert_not_trivial(fresh, 0.1)


def test_coefficients_that_are_zero_one_by_one() -> None:
    logits, target = case(4, 9, 9, torch.float64)
    g, h = torch.tensor([1.0, 0.0, 1.0, 0.0]).double(), torch.tensor([0.0, 1.0, 1.0, 0.0]).double()
    truth_in, ours_in = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    objective(*token_logprob64(truth_in, target, 9, 1.0), g, h).backward()
    objective(*token_logprob(ours_in, target)[:2], g, h).backward()
    torch.testing.assert_close(ours_in.grad, truth_in.grad)
    assert (ours_in.grad[:3].abs().sum(1) > 0.01).all() and (ours_in.grad[3] == 0).all()


def test_shards_add_up() -> None:
    logits, target = case(10, 30, 22, torch.float64)
    # one token whose words in the middle shard are all excluded
    target[0], logits[0, 10:20] = 0, -torch.inf
    shards = {"vocab_size": 22, "temperature": 1.3}
    pieces = torch.stack(
        [
            reference.token_logprob_forward(logits[:, start : start + 10], target, vocab_start=start, **shards)
            for start in (0, 10, 20)
        ]
    )
    assert torch.isfinite(pieces[:, 1:]).all() and pieces[1, 0, 0] == -torch.inf
    want = token_logprob(logits, target, **shards)
    for x, y in zip(merge_partials(pieces, 1.3), want, strict=True):
        torch.testing.assert_close(x, y)


def test_a_shard_of_padding_alone() -> None:
    logits, target = torch.full((3, 4), torch.nan), torch.tensor([0, 1, 2])
    shard = {"vocab_start": 8, "vocab_size": 8, "temperature": 1.0}
    partials = reference.token_logprob_forward(logits, target, **shard)
    assert (partials[0] == -torch.inf).all() and (partials[1:] == 0).all()
    ones = torch.ones(3)
    assert (reference.token_logprob_backward(logits, target, TokenLogprob(*[ones] * 5), ones, ones, **shard) == 0).all()


def test_no_tokens(run: Run) -> None:
    logits = torch.zeros(0, 7, requires_grad=True)
    result = run(logits, torch.zeros(0, dtype=torch.int64))
    assert all(x.shape == (0,) for x in result)
    result.logprob.sum().backward()
    assert logits.grad.shape == (0, 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": torch.tensor([0, 8])}, r"^target must be in \[0, 8\), got 8"),
        ({"target": torch.tensor([-100, 1])}, r"^target must be in \[0, 8\), got -100"),
        ({"target": torch.tensor([0, 6]), "vocab_size": 5}, r"^target must be in \[0, 5\), got 6"),
        ({"target": torch.tensor([0, 1], dtype=torch.int32)}, r"^target must be int64 \[T\], got torch.int32"),
        ({"target": torch.tensor([0])}, r"^target must be \[2\] on cpu, got \[1\]"),
        ({"logits": torch.zeros(2, 8, dtype=torch.int64)}, r"^logits must be floating point .*int64"),
        ({"logits": torch.zeros(2, 3, 8)}, r"^logits must be .*\[2, 3, 8\]"),
        ({"temperature": 0.0}, r"^temperature must be positive and finite, got 0.0"),
        ({"temperature": float("nan")}, r"^temperature must be .*nan"),
        ({"vocab_size": 9}, r"^vocab_size must be in \[1, 8\] on one rank, got 9"),
        ({"vocab_size": 0}, r"^vocab_size must be .*got 0"),
        ({"vocab_start": 8}, r"^vocab_start must be 0 without other shards, got 8"),
    ],
)
def test_errors(changes: dict, message: str) -> None:
    arguments = {"logits": torch.zeros(2, 8), "target": torch.tensor([0, 1]), **changes}
    with pytest.raises(ValueError, match=message):
        token_logprob(**arguments)


def test_a_backend_that_cannot_run() -> None:
    with pytest.raises(RuntimeError, match=r"^backend cuda cannot run token_logprob on cpu"):
        token_logprob(torch.zeros(2, 8), torch.tensor([0, 1]), backend="cuda")
