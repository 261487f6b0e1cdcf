"""Log-probability and entropy of one vocabulary shard in Triton. Definition: `token_logprob_reference`.

One program is one row. The forward pass reads it once and the backward pass reads and writes it once, in accesses of
128 bits; between them no [T, Vp] tensor exists, since dlogits may stand where the logits stood.

Dims: T tokens, V vocabulary (true, unpadded), Vp its shard on this rank, L threads of a program.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_replay.ops.launch import launch_config
from megatron_replay.ops.token_logprob_reference import valid_columns

if TYPE_CHECKING:
    from megatron_replay.ops.token_logprob import TokenLogprob

LOG2_E = tl.constexpr(math.log2(math.e))
LN_2 = tl.constexpr(math.log(2))
# exp2 of it is 0; unlike -inf it can be multiplied by 0
LOG_ZERO = tl.constexpr(-1e4)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _add_block(top, total, moment, x, scale):
    """Online softmax, one exp2 per element: x [K, L, W] joins top, total, moment [L], one lane a thread.

    total = sum 2^d and moment = sum 2^d d with d = (x - top) scale. The reductions over K and W stay inside a thread.
    """
    new_top = tl.maximum(top, tl.max(tl.max(x, axis=2), axis=0))
    # the maximum drops a NaN, d keeps it
    d = tl.maximum((x - new_top[None, :, None]) * scale, LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(d)
    shift = tl.maximum((top - new_top) * scale, LOG_ZERO)
    keep = tl.exp2(shift)
    moment = (moment + shift * total) * keep + tl.sum(tl.sum(p * d, axis=2), axis=0)
    total = total * keep + tl.sum(tl.sum(p, axis=2), axis=0)
    return new_top, total, moment


@triton.jit
def _forward_kernel(
    logits, target, partials, T, stride, columns, words, vocab_start, inv_temperature,
    STRIDE_UNIT: tl.constexpr, COLUMN_UNIT: tl.constexpr,
    VECTORS: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    BLOCK: tl.constexpr = VECTORS * THREADS * WIDTH
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride * STRIDE_UNIT
    columns = columns * COLUMN_UNIT
    scale = inv_temperature * LOG2_E
    lane = tl.arange(0, BLOCK)
    top = tl.full((THREADS,), LOWEST, tl.float32)
    total = tl.zeros((THREADS,), tl.float32)
    moment = tl.zeros((THREADS,), tl.float32)
    whole = words // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        x = tl.load(base + start + lane).to(tl.float32)
        top, total, moment = _add_block(top, total, moment, tl.reshape(x, (VECTORS, THREADS, WIDTH)), scale)
    for start in range(whole, words, BLOCK):
        at = start + lane
        # the mask of the load is the allocation's, whose end is aligned, so that it stays 128 bits wide
        x = tl.load(base + at, mask=at < columns, other=0.0).to(tl.float32)
        x = tl.where(at < words, x, -float("inf"))
        top, total, moment = _add_block(top, total, moment, tl.reshape(x, (VECTORS, THREADS, WIDTH)), scale)

    best = tl.max(top, axis=0)
    shift = tl.maximum((top - best) * scale, LOG_ZERO)
    keep = tl.exp2(shift)
    moment = tl.sum((moment + shift * total) * keep, axis=0) * LN_2
    total = tl.sum(total * keep, axis=0)
    column = tl.load(target + row) - vocab_start
    inside = (column >= 0) & (column < words)
    chosen = tl.load(base + column, mask=inside, other=0.0).to(tl.float32)
    out = partials + row
    tl.store(out, tl.where(total == 0, -float("inf"), best))
    out += T
    tl.store(out, total)
    out += T
    tl.store(out, chosen)
    out += T
    tl.store(out, moment)


@triton.jit
def _gradient(x, at, column, top, log_sum, dlogprob, dentropy, entropy, inv_temperature, ENTROPY: tl.constexpr):
    log_p = (x - top) * inv_temperature - log_sum
    if ENTROPY:
        log_p = tl.maximum(log_p, LOG_ZERO, propagate_nan=tl.PropagateNan.ALL)
    p = tl.exp2(log_p * LOG2_E)
    grad = dlogprob * (tl.where(at == column, 1.0, 0.0) - p)
    if ENTROPY:
        grad -= dentropy * p * (log_p + entropy)
    return grad


@triton.jit
def _backward_kernel(
    logits, out, target, maximum, log_sum, entropy, dlogprob, dentropy, stride, out_stride, columns, words,
    vocab_start, inv_temperature,
    ENTROPY: tl.constexpr, STRIDE_UNIT: tl.constexpr, OUT_STRIDE_UNIT: tl.constexpr, COLUMN_UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride * STRIDE_UNIT
    out_base = out + row * out_stride * OUT_STRIDE_UNIT
    columns = columns * COLUMN_UNIT
    lane = tl.arange(0, BLOCK)
    dlogprob_t = tl.load(dlogprob + row) * inv_temperature
    dentropy_t = 0.0
    entropy_t = 0.0
    if ENTROPY:
        dentropy_t = tl.load(dentropy + row) * inv_temperature
        entropy_t = tl.load(entropy + row)
    if (dlogprob_t != 0) | (dentropy_t != 0):
        top = tl.load(maximum + row)
        log_sum_t = tl.load(log_sum + row)
        column = (tl.load(target + row) - vocab_start).to(tl.int32)
        whole = words // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            at = start + lane
            x = tl.load(base + at).to(tl.float32)
            grad = _gradient(x, at, column, top, log_sum_t, dlogprob_t, dentropy_t, entropy_t, inv_temperature, ENTROPY)
            tl.store(out_base + at, grad.to(out.dtype.element_ty))
        for start in range(whole, columns, BLOCK):
            at = start + lane
            x = tl.load(base + at, mask=at < columns, other=0.0).to(tl.float32)
            grad = _gradient(x, at, column, top, log_sum_t, dlogprob_t, dentropy_t, entropy_t, inv_temperature, ENTROPY)
            grad = tl.where(at < words, grad, 0.0)
            tl.store(out_base + at, grad.to(out.dtype.element_ty), mask=at < columns)
    else:
        # a token without a coefficient costs no read
        for start in range(0, columns, BLOCK):
            at = start + lane
            tl.store(out_base + at, tl.zeros((BLOCK,), out.dtype.element_ty), mask=at < columns)


def token_logprob_forward(
    logits: Tensor, target: Tensor, *, vocab_start: int, vocab_size: int, temperature: float
) -> Tensor:
    """Partials [4, T] float32 of this shard: see the reference."""
    _check("logits", logits)
    tokens, columns = logits.shape
    partials = torch.empty(4, tokens, dtype=torch.float32, device=logits.device)
    if tokens == 0:
        return partials
    config = launch_config("token_logprob_forward", logits.device)
    stride_unit, column_unit = _unit(logits.stride(0)), _unit(columns)
    with torch.cuda.device_of(logits):
        _forward_kernel[(tokens,)](
            logits,
            target,
            partials,
            tokens,
            logits.stride(0) // stride_unit,
            columns // column_unit,
            valid_columns(logits, vocab_start, vocab_size),
            vocab_start,
            1 / temperature,
            STRIDE_UNIT=stride_unit,
            COLUMN_UNIT=column_unit,
            VECTORS=config.per_thread,
            THREADS=config.threads,
            WIDTH=vector_width(logits),
            num_warps=config.num_warps,
        )
    return partials


def token_logprob_backward(
    logits: Tensor,
    target: Tensor,
    result: TokenLogprob,
    dlogprob: Tensor | None,
    dentropy: Tensor | None,
    *,
    vocab_start: int,
    vocab_size: int,
    temperature: float,
    out: Tensor | None = None,
) -> Tensor:
    """dlogits [T, Vp] of this shard, in the logits' dtype; `out` may be `logits` itself: see the reference."""
    out = torch.empty_like(logits) if out is None else out
    _check("logits", logits)
    _check("out", out)
    tokens, columns = logits.shape
    if tokens == 0:
        return out
    config = launch_config("token_logprob_backward", logits.device)
    stride_unit, out_stride_unit, column_unit = _unit(logits.stride(0)), _unit(out.stride(0)), _unit(columns)
    with torch.cuda.device_of(logits):
        _backward_kernel[(tokens,)](
            logits,
            out,
            target,
            result.maximum,
            result.log_sum,
            result.entropy,
            torch.zeros_like(result.log_sum) if dlogprob is None else dlogprob.contiguous(),
            result.entropy if dentropy is None else dentropy.contiguous(),
            logits.stride(0) // stride_unit,
            out.stride(0) // out_stride_unit,
            columns // column_unit,
            valid_columns(logits, vocab_start, vocab_size),
            vocab_start,
            1 / temperature,
            ENTROPY=dentropy is not None,
            STRIDE_UNIT=stride_unit,
            OUT_STRIDE_UNIT=out_stride_unit,
            COLUMN_UNIT=column_unit,
            BLOCK=config.per_thread * config.threads * vector_width(logits),
            num_warps=config.num_warps,
        )
    return out


def vector_width(x: Tensor) -> int:
    """Elements in 128 bits."""
    return 16 // x.element_size()


def _unit(size: int) -> int:
    """The largest power of two up to 16 that divides a size: what the compiler must know to make wide accesses."""
    return math.gcd(size, 16)


def _check(name: str, x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"{name} must be bfloat16, float16 or float32 with backend triton, got {x.dtype}")
    if x.shape[1] > 1 and x.stride(1) != 1:
        raise ValueError(f"{name} must have stride 1 along the vocabulary with backend triton, got {x.stride(1)}")
