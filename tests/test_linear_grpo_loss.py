from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_replay.ops.grpo_loss import GrpoLossOptions, grpo_loss
from megatron_replay.ops.grpo_stats import summarize_stats
from megatron_replay.ops.linear_grpo_loss import (
    _add_product,
    chunk_tokens_within,
    linear_token_logprob,
)
from megatron_replay.ops.token_logprob import token_logprob
from tests.heads import (
    COLUMNS,
    OPTIONS,
    TEMPERATURE,
    H,
    Recorder,
    V,
    dense_truth,
    head_case,
    linear,
    with_grad,
)
from tests.numerics import (
    assert_no_worse_than_torch,
    assert_not_trivial,
    naive_loss,
    token_logprob64,
)

both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])


@pytest.mark.parametrize("name", OPTIONS)
def test_equals_the_dense_loss_in_float64(name: str) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name])
    case = case.double()
    h, w = with_grad(hidden, weight)
    result = linear(h, w, target, case)
    result.loss.backward()
    truth, dhidden, dweight = dense_truth(hidden, weight, target, case)
    for x in (truth, dhidden, dweight):
        assert_not_trivial(x, 0.1)
    torch.testing.assert_close(result.loss.detach(), truth)
    torch.testing.assert_close(h.grad, dhidden)
    torch.testing.assert_close(w.grad, dweight)
    assert (w.grad[V:] == 0).all()
    summary = summarize_stats(result.stats, result.maxima)
    assert 0.05 < summary["clip_fraction"] < 0.95

    h2, w2 = with_grad(hidden, weight)
    logprob, entropy = token_logprob(h2 @ w2.T, target, vocab_size=V, temperature=TEMPERATURE)[:2]
    dense = grpo_loss(**case.call(policy_logprobs=logprob, entropy=entropy))
    torch.testing.assert_close(result.stats, dense.stats)
    torch.testing.assert_close(result.maxima, dense.maxima)
    torch.testing.assert_close(result.logprobs, logprob.detach())
    torch.testing.assert_close(result.entropy, entropy.detach())
    assert not (result.logprobs.requires_grad or result.entropy.requires_grad or result.stats.requires_grad)


@both_backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_no_worse_than_torch(backend: str, dtype: torch.dtype, name: str, device: torch.device) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name], dtype)
    # rounding logits to their dtype is common to both sides, so the truth starts from the rounded ones
    (logits,) = with_grad((hidden @ weight.T).double())
    logprob, entropy = token_logprob64(logits, target, V, TEMPERATURE)
    truth = naive_loss(replace(case.double(), policy_logprobs=logprob, entropy=entropy))
    truth.backward()
    dhidden, dweight = logits.grad @ weight.double(), logits.grad.T @ hidden.double()
    h, w = with_grad(hidden.to(device), weight.to(device))
    result = linear(h, w, target.to(device), case.to(device), backend=backend)
    result.loss.backward()
    h2, w2 = with_grad(hidden, weight)
    logprob, entropy = token_logprob64(h2 @ w2.T, target, V, TEMPERATURE)
    theirs = naive_loss(replace(case, policy_logprobs=logprob, entropy=entropy))
    theirs.backward()
    assert 0.05 < summarize_stats(result.stats, result.maxima)["clip_fraction"] < 0.95
    assert h.grad.dtype == w.grad.dtype == dtype
    assert result.loss.dtype == result.logprobs.dtype == torch.float32
    torch.testing.assert_close(result.loss.cpu().double(), truth, rtol=1e-5, atol=1e-5)
    assert_no_worse_than_torch(h.grad.cpu(), dhidden, h2.grad)
    assert_no_worse_than_torch(w.grad.cpu(), dweight, w2.grad)
    assert_not_trivial(dweight, 0.1)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("chunk_tokens", [1, 7, 57, 4096])
def test_chunk_size_does_not_matter(name: str, chunk_tokens: int) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name])
    want, got = with_grad(hidden, weight), with_grad(hidden, weight)
    a, b = linear(*want, target, case), linear(*got, target, case, chunk_tokens=chunk_tokens)
    a.loss.backward()
    b.loss.backward()
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
    for x, y in zip(want, got, strict=True):
        assert_not_trivial(x.grad, 0.1)
        torch.testing.assert_close(x.grad, y.grad)


def test_the_weight_gradient_is_summed_in_float32() -> None:
    hidden, weight, target, case = head_case(GrpoLossOptions(), torch.bfloat16, (1500,))
    case.advantage[:] = 1.0
    (whole,), (chunked,) = with_grad(weight), with_grad(weight)
    linear(hidden, whole, target, case, chunk_tokens=1500).loss.backward()
    linear(hidden, chunked, target, case, chunk_tokens=2).loss.backward()
    error = float((chunked.grad.float() - whole.grad.float()).norm() / whole.grad.float().norm())
    assert error < 0.01


def test_no_part_of_the_weight_gradient_is_rounded_to_bfloat16(device: torch.device) -> None:
    a, b, total = (torch.randn(s, device=device) for s in ((33, 50), (50, 17), (33, 17)))
    a, b = a.bfloat16(), b.bfloat16()
    truth = total.double() + a.double() @ b.double()
    _add_product(total, a, b)
    torch.testing.assert_close(total.double(), truth, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("columns", "dtype", "memory", "tokens"),
    [
        (151936, torch.bfloat16, 1 << 30, 3456),
        (151936, torch.float32, 64 << 20, 110),
        (50257, torch.bfloat16, 1 << 26, 640),
        (64, torch.float32, 1, 1),
    ],
)
def test_chunk_tokens_within(columns: int, dtype: torch.dtype, memory: int, tokens: int) -> None:
    weight = torch.empty(columns, 1, dtype=dtype)
    assert chunk_tokens_within(memory, weight) == tokens
    assert chunk_tokens_within(memory, weight, dtype) == tokens
    padded = -(-columns // 64) * 64
    assert tokens == 1 or tokens * padded * weight.element_size() <= memory
    with pytest.raises(ValueError, match=r"^memory_bytes must be above 0, got 0"):
        chunk_tokens_within(0, weight)


@pytest.mark.parametrize("name", ["default", "sequence"])
def test_the_logits_are_never_whole(name: str) -> None:
    lengths = (100, 60, 0, 96)
    hidden, weight, target, case = head_case(OPTIONS[name], torch.float32, lengths)
    h, w = with_grad(hidden, weight)
    with Recorder() as seen:
        linear(h, w, target, case, chunk_tokens=16).loss.backward()
    t, chunk = sum(lengths), 16
    assert seen.largest <= max(chunk * 64, t * H, COLUMNS * H), "a row of the chunk is padded to 64 columns"
    assert seen.largest < t * V / 3
    passes = 2 if name == "sequence" else 1
    assert seen.products.count((chunk, COLUMNS)) == passes * t // chunk
    assert seen.products.count((chunk, H)) == seen.products.count((V, H)) == t // chunk

    with Recorder() as dense:
        token_logprob(h @ w.T, target, vocab_size=V)
    assert dense.largest >= t * V, "the recorder sees whole logits where there are some"


@pytest.mark.parametrize("name", ["default", "sequence"])
def test_no_gradient_work_without_a_gradient(name: str) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name], torch.float32)
    h, w = with_grad(hidden, weight)
    want = linear(h, w, target, case)
    with torch.no_grad(), Recorder() as seen:
        under_no_grad = linear(h, w, target, case)
    assert {shape[1] for shape in seen.products} == {COLUMNS}, "logits and nothing else"
    with Recorder() as seen:
        plain = linear(hidden, weight, target, case)
    assert {shape[1] for shape in seen.products} == {COLUMNS}
    for got in (under_no_grad, plain):
        assert not got.loss.requires_grad
        for x, y in zip(got, want, strict=True):
            assert torch.equal(x, y)


def test_only_the_gradient_that_is_wanted() -> None:
    hidden, weight, target, case = head_case(OPTIONS["default"])
    h, w = with_grad(hidden, weight)
    linear(h, w, target, case).loss.backward()
    (only_h,), (only_w,) = with_grad(hidden), with_grad(weight)
    with Recorder() as seen:
        linear(only_h, weight, target, case).loss.backward()
    assert (V, H) not in seen.products and torch.equal(only_h.grad, h.grad)
    with Recorder() as seen:
        linear(hidden, only_w, target, case).loss.backward()
    assert (10, H) not in seen.products and torch.equal(only_w.grad, w.grad)


def test_backward_scales() -> None:
    hidden, weight, target, case = head_case(OPTIONS["everything"])
    h, w = with_grad(hidden, weight)
    linear(h, w, target, case).loss.backward()
    h2, w2 = with_grad(hidden, weight)
    (linear(h2, w2, target, case).loss * -3).backward()
    torch.testing.assert_close(h2.grad, h.grad * -3)
    torch.testing.assert_close(w2.grad, w.grad * -3)


@both_backends
@pytest.mark.parametrize("name", OPTIONS)
def test_masked_and_padded_places_do_not_matter(backend: str, name: str, device: torch.device) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name], torch.float32)
    hidden, weight, target, case = hidden.to(device), weight.to(device), target.to(device), case.to(device)
    h, w = with_grad(hidden, weight)
    want = linear(h, w, target, case, backend=backend)
    want.loss.backward()
    off = ~case.loss_mask
    hidden[off], weight[V:] = math.nan, math.inf
    case.behavior_logprobs[off], case.reference_logprobs[off] = math.nan, math.inf
    h2, w2 = with_grad(hidden, weight)
    got = linear(h2, w2, target, case, backend=backend)
    got.loss.backward()
    assert torch.equal(got.loss, want.loss)
    # float64 sums, which a GPU's atomics add up in an order of their own
    torch.testing.assert_close(got.stats, want.stats, rtol=1e-12, atol=0)
    torch.testing.assert_close(h2.grad, h.grad, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(w2.grad, w.grad, atol=1e-6, rtol=1e-6)
    assert (h2.grad[off] == 0).all() and (w2.grad[V:] == 0).all()


@both_backends
@pytest.mark.parametrize("lengths", [(), (0, 0)])
@pytest.mark.parametrize("name", ["default", "sequence"])
def test_no_tokens(backend: str, lengths: tuple[int, ...], name: str, device: torch.device) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name], torch.bfloat16, lengths)
    h, w = with_grad(hidden.to(device), weight.to(device))
    result = linear(h, w, target.to(device), case.to(device), backend=backend)
    assert result.loss == 0 and result.loss.requires_grad and result.logprobs.shape == (0,)
    result.loss.backward()
    assert h.grad.shape == (0, H) and w.grad.shape == (COLUMNS, H) and (w.grad == 0).all()


@both_backends
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_trained(backend: str, name: str, device: torch.device) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name], torch.float32)
    case.loss_mask[:] = False
    h, w = with_grad(hidden.to(device), weight.to(device))
    result = linear(h, w, target.to(device), case.to(device), backend=backend)
    result.loss.backward()
    assert result.loss == 0 and (h.grad == 0).all() and (w.grad == 0).all()
    assert set(summarize_stats(result.stats, result.maxima).values()) == {0.0}


@pytest.mark.parametrize("name", OPTIONS)
def test_float32_logits_of_bfloat16_inputs_are_not_rounded(name: str) -> None:
    hidden, weight, target, case = head_case(OPTIONS[name], torch.bfloat16)
    loss, dhidden, dweight = dense_truth(hidden, weight, target, case)
    truth, _ = token_logprob64(hidden.double() @ weight.double().T, target, V, TEMPERATURE)
    errors = {}
    for dtype in (None, torch.float32):
        h, w = with_grad(hidden, weight)
        result = linear(h, w, target, case, logits_dtype=dtype)
        result.loss.backward()
        errors[dtype] = float((result.logprobs - truth).abs().max())
        # their own rounding, and that of dlogits
        torch.testing.assert_close(h.grad.double(), dhidden, rtol=0.05, atol=0.02 * float(dhidden.abs().max()))
        torch.testing.assert_close(w.grad.double(), dweight, rtol=0.05, atol=0.02 * float(dweight.abs().max()))
    assert errors[torch.float32] < 1e-5 < 1e-3 < errors[None]
    torch.testing.assert_close(result.loss.double(), loss, rtol=1e-5, atol=1e-6)
    settings = {"vocab_size": V, "temperature": TEMPERATURE, "chunk_tokens": 9, "logits_dtype": torch.float32}
    alone = linear_token_logprob(hidden, weight, target, **settings)
    assert float((alone.logprob - truth).abs().max()) < 1e-5


def test_linear_token_logprob() -> None:
    hidden, weight, target, _ = head_case(OPTIONS["default"], torch.float32)
    weight.requires_grad_()
    settings = {"vocab_size": V, "temperature": TEMPERATURE}
    want = token_logprob(hidden @ weight.T, target, **settings)
    for chunk_tokens in (1, 8, 1000):
        with Recorder() as seen:
            got = linear_token_logprob(hidden, weight, target, **settings, chunk_tokens=chunk_tokens)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y.detach())
            assert not x.requires_grad
        assert chunk_tokens > 1 or seen.largest <= max(COLUMNS * H, len(target) * H)
    empty = linear_token_logprob(hidden[:0], weight, target[:0], **settings)
    assert all(x.shape == (0,) for x in empty)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": torch.zeros(57, H, dtype=torch.float16), "weight": torch.zeros(40, H, dtype=torch.float16)},
         r"^hidden must be bfloat16, float32 or float64 \(float16 gradients underflow\), got torch.float16"),
        ({"hidden": torch.zeros(57, 1, H)}, r"^hidden must be floating point \[T, H\], got .*\[57, 1, 12\]"),
        ({"weight": torch.zeros(40, H)}, r"^weight must be torch.float64 \[Vp, 12\] on cpu, got torch.float32 \[40"),
        ({"weight": torch.zeros(H, 40).double()}, r"^weight must be .*got torch.float64 \[12, 40\]"),
        ({"target": torch.zeros(9, dtype=torch.int64)}, r"^target must be \[57\] on cpu, got \[9\]"),
        ({"target": torch.full((57,), V)}, r"^target must be in \[0, 37\), got 37"),
        ({"behavior_logprobs": torch.zeros(58)}, r"^behavior_logprobs must be \[57\] on cpu, got \[58\]"),
        ({"reference_logprobs": torch.zeros(56)}, r"^reference_logprobs must be \[57\]"),
        ({"chunk_tokens": 0}, r"^chunk_tokens must be at least 1, got 0"),
        ({"logits_dtype": torch.float16}, r"^logits_dtype must be float32 or weight's torch\.\w+, got torch\.float16"),
        ({"options": GrpoLossOptions(kl_beta=0.1), "reference_logprobs": None}, r"^reference_logprobs must be given"),
    ],
)  # fmt: skip
def test_errors(changes: dict, message: str) -> None:
    hidden, weight, target, case = head_case(OPTIONS["default"])
    tensors = {"hidden": hidden, "weight": weight, "target": target}
    fields = {k: v for k, v in changes.items() if k in case.arguments()}
    settings = {k: v for k, v in changes.items() if k not in fields and k not in tensors}
    tensors |= {k: v for k, v in changes.items() if k in tensors}
    with pytest.raises(ValueError, match=message):
        linear(**tensors, case=replace(case, **fields), **settings)


def test_a_backend_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    hidden, weight, target, case = head_case(OPTIONS["default"])
    with pytest.raises(RuntimeError, match=r"^backend triton cannot run token_logprob on cpu"):
        linear(hidden, weight, target, case, backend="triton")
