from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_replay.ops import linear_grpo_loss as linear_module
from megatron_replay.ops.grpo_loss import GrpoLossOptions, grpo_loss
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.grpo_stats import summarize_stats
from megatron_replay.ops.linear_grpo_loss import (
    LinearGrpoLoss,
    _add_product,
    _shard,
    chunk_tokens_within,
    linear_grpo_loss,
    linear_token_logprob,
)
from megatron_replay.ops.token_logprob import token_logprob
from tests.numerics import (
    LossCase,
    assert_no_worse_than_torch,
    assert_not_trivial,
    naive_loss,
    random_case,
    token_logprob64,
)

OPTIONS = {
    "default": GrpoLossOptions(),
    "sequence": GrpoLossOptions(ratio_level="sequence", clip_eps_low=0.1, clip_eps_high=0.1, entropy_weight=0.1),
    "cispo": GrpoLossOptions(objective="cispo"),
    "everything": GrpoLossOptions(dual_clip=1.4, kl_beta=0.1, entropy_weight=0.2),
}
V, COLUMNS, H, TEMPERATURE = 37, 40, 12, 0.8


def head_case(
    options: GrpoLossOptions, dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = (9, 0, 1, 17, 24, 6)
):
    """hidden [T, H], weight [COLUMNS, H], target [T] and a loss case whose behavior log-probs are near the policy's."""
    case = random_case(options, lengths)
    t = sum(lengths)
    hidden, weight = torch.randn(t, H).to(dtype), (torch.randn(COLUMNS, H) * 0.6).to(dtype)
    target = torch.randint(0, V, (t,))
    policy, _ = token_logprob64(hidden.double() @ weight.double().T, target, V, TEMPERATURE)
    case.policy_logprobs = policy.to(dtype)
    case.behavior_logprobs = (policy + 0.4 * torch.randn(t)).to(torch.promote_types(dtype, torch.float32))
    case.reference_logprobs = (policy + 0.3 * torch.randn(t)).to(case.behavior_logprobs.dtype)
    return hidden, weight, target, case


both_backends = pytest.mark.parametrize("backend", ["reference", "triton"])


def linear(hidden: Tensor, weight: Tensor, target: Tensor, case: LossCase, **changes: Any) -> LinearGrpoLoss:
    arguments = {k: v for k, v in case.call().items() if k in ("inputs", "options")}
    settings = {"vocab_size": V, "temperature": TEMPERATURE, "chunk_tokens": 10, **changes}
    return linear_grpo_loss(hidden, weight, target, **arguments, **settings)


def with_grad(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def dense_truth(hidden: Tensor, weight: Tensor, target: Tensor, case: LossCase) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dhidden, dweight by autograd in float64, with loops."""
    h, w = with_grad(hidden.double(), weight.double())
    logprob, entropy = token_logprob64(h @ w.T, target, V, TEMPERATURE)
    loss = naive_loss(replace(case.double(), policy_logprobs=logprob, entropy=entropy))
    loss.backward()
    return loss.detach(), h.grad, w.grad


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
    padded = -(-columns // 64) * 64
    assert tokens == 1 or tokens * padded * weight.element_size() <= memory
    with pytest.raises(ValueError, match=r"^memory_bytes must be above 0, got 0"):
        chunk_tokens_within(0, weight)


class Recorder(TorchDispatchMode):
    """The largest tensor that any operator returned, and the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products.append(tuple(out.shape))
        return out


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
    assert torch.equal(got.loss, want.loss) and torch.equal(got.stats, want.stats)
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
    shard = _shard(h, w, target, 0, V, TEMPERATURE, None, 10, "triton")
    monkeypatch.setattr(linear_module, "_shard", lambda *_: shard)
    monkeypatch.setattr(GrpoLossInputs, "check", lambda *_: None)
    with NoScalar():
        linear(h, w, target, case, backend="triton").loss.backward()
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoScalar():
        float(h.sum())


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


def two_ranks(rank: int, store: str, seed: int) -> None:
    """Shards of 20 columns of V = 37 words: the second shard ends in 3 columns of padding that hold NaN."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group, start = dist.group.WORLD, rank * COLUMNS // 2
    mine = slice(start, start + COLUMNS // 2)
    shard = {"vocab_start": start, "vocab_size": V, "temperature": TEMPERATURE, "tp_group": group}
    for name, options in OPTIONS.items():
        hidden, weight, target, case = head_case(options)
        h1, w1 = with_grad(hidden, weight)
        alone = linear(h1, w1, target, case)
        (alone.loss * 0.7).backward()
        weight[V:] = math.nan
        h2, w2 = with_grad(hidden, weight[mine])
        together = linear(h2, w2, target, case, **shard)
        (together.loss * 0.7).backward()
        assert_not_trivial(h1.grad, 0.05)
        for x, y in zip(together, alone, strict=True):
            torch.testing.assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}")
        dist.all_reduce(h2.grad)
        torch.testing.assert_close(h2.grad, h1.grad)
        torch.testing.assert_close(w2.grad, w1.grad[mine])
        # the kernels, in float32, against the same
        h3, w3 = with_grad(hidden.float(), weight[mine].float())
        floats = {k: v.float() for k, v in case.arguments().items() if k.endswith("_logprobs") or k == "entropy"}
        kernels = linear(h3, w3, target, replace(case, **floats), **shard, backend="triton")
        (kernels.loss * 0.7).backward()
        torch.testing.assert_close(kernels.logprobs.double(), alone.logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kernels.stats, alone.stats, rtol=1e-4, atol=1e-4)
        dist.all_reduce(h3.grad)
        torch.testing.assert_close(h3.grad.double(), h1.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w3.grad.double(), w1.grad[mine], rtol=1e-4, atol=1e-4)

    logits = (hidden @ weight.T).detach()
    g, e = torch.randn(2, len(target), dtype=torch.float64)
    whole, part = with_grad(logits, logits[:, mine])
    want = token_logprob(whole, target, vocab_size=V, temperature=TEMPERATURE)
    got = token_logprob(part, target, **shard)
    chunked = linear_token_logprob(hidden, weight[mine], target, **shard, chunk_tokens=9)
    for x, y, z in zip(got, want, chunked, strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(z, y)
    for result in (want, got):
        (result.logprob * g + result.entropy * e).sum().backward()
    assert_not_trivial(whole.grad, 0.1)
    torch.testing.assert_close(part.grad, whole.grad[:, mine])

    # a vocabulary of 15 words lies in the first shard alone
    few = torch.randint(0, 15, (len(target),))
    narrow = token_logprob(logits[:, mine], few, **{**shard, "vocab_size": 15})
    want = token_logprob(logits[:, :15], few, temperature=TEMPERATURE)
    for x, y in zip(narrow, want, strict=True):
        torch.testing.assert_close(x, y)
    dist.destroy_process_group()


def test_two_ranks_equal_one(tmp_path: Path) -> None:
    mp.spawn(two_ranks, args=(str(tmp_path / "store"), 7), nprocs=2)
