"""Language-model head and GRPO loss in one, in token chunks: the logits are never whole.

Dims: T tokens (packed), N rollouts, H hidden, V vocabulary (true, unpadded), Vp its shard on this rank, c tokens of a
chunk, B age buckets, K = len(STATS), M = len(MAXIMA).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_replay.ops import backend as backends
from megatron_replay.ops.checks import require
from megatron_replay.ops.grpo_loss import GrpoLossOptions, GrpoLossTerms, with_gradients
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.token_logprob import TokenLogprob, VocabShard


class LinearGrpoLoss(NamedTuple):
    """loss 0-d, differentiable; logprobs, entropy [T], stats [B, K], maxima [B, M], detached."""

    loss: Tensor
    logprobs: Tensor
    entropy: Tensor
    stats: Tensor
    maxima: Tensor


def linear_grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    inputs: GrpoLossInputs,
    options: GrpoLossOptions,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 1024,
    logits_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> LinearGrpoLoss:
    """grpo_loss(token_logprob(hidden @ weight.T, target), ...) with the logits memory of one chunk.

    hidden [T, H] and weight [Vp, H] of one dtype; target [T] and `inputs` are of the same T tokens; the remaining
    arguments are those of `token_logprob` and `grpo_loss_terms`, whose equations hold. The derivative of the loss in a
    token's log-prob is known as soon as that log-prob is, so each chunk's logits turn into their gradient in place,
    and into

        dhidden [c, H] = dlogits @ weight,    dweight [Vp, H] += dlogits.T @ hidden   (float32 sum over chunks)

    in the forward pass: three matrix products and no recomputation; backward scales by the incoming gradient. With
    ratio_level "sequence" a token's derivative needs its whole rollout, and the logits are computed twice. Without a
    gradient to compute (torch.no_grad, or inputs that need none) only log-probs are.

    With `tp_group`, hidden is the same on every rank of the group and weight is its shard of the vocabulary.
    dweight belongs to the shard; DHIDDEN IS THE PARTIAL SUM OF THIS SHARD: the caller's mapping must reduce it over
    the group (Megatron: copy_to_tensor_model_parallel_region around hidden, or the sequence-parallel gather).
    loss, logprobs, entropy and stats are equal on all ranks. Hidden states of tokens without a coefficient (masked, or
    clipped with no other term) reach no gradient, whatever they hold.

    `logits_dtype` (default: that of weight) float32 leaves the logits of bfloat16 inputs unrounded, at twice the
    memory; the products that make dhidden and dweight take dlogits rounded to weight's dtype all the same.

    Raises ValueError for wrong shapes, dtypes and ranges; float16 is refused, since its gradients would underflow
    before the loss scale reaches them. RuntimeError for a backend that cannot run.
    Source: the chunked gradient in the forward pass is that of Liger Kernel (Hsu et al., arXiv 2410.10989).
    """
    shard = _shard(
        hidden, weight, target, vocab_start, vocab_size, temperature, tp_group, chunk_tokens, logits_dtype, backend
    )
    if hidden.dtype == torch.float16:
        raise ValueError(
            f"hidden must be bfloat16, float32 or float64 (float16 gradients underflow), got {hidden.dtype}"
        )

    result = _empty_result(hidden)
    inputs.check(result.logprob, result.entropy, options)
    module = backends.load("grpo_loss", backends.resolve("grpo_loss", backend, hidden.device))

    def terms(at: slice, statistics: bool) -> GrpoLossTerms:
        known: GrpoLossTerms = module.grpo_loss_terms(
            result.logprob[at], inputs.tokens(at), options, result.entropy[at], statistics
        )
        return known

    head = _Head(hidden, weight, shard, chunk_tokens, logits_dtype)
    one_pass = head.wants_gradient and options.ratio_level == "token"
    with torch.no_grad():
        for at, logits in head.chunks():
            chunk = shard.forward(logits, target[at])
            _store(result, at, chunk)
            if one_pass:
                # of a part of a rollout only the derivatives are right; value and statistics come from `total`
                known = terms(at, statistics=False)
                head.add_gradient(at, logits, target, result, known.dlogprob, known.dentropy)
        total = terms(slice(0, hidden.shape[0]), statistics=True)
        if head.wants_gradient and not one_pass:
            for at, logits in head.chunks():
                dentropy = None if total.dentropy is None else total.dentropy[at]
                head.add_gradient(at, logits, target, result, total.dlogprob[at], dentropy)
    value, stats, maxima = total.value()
    loss = with_gradients(value, (hidden, weight), (head.dhidden, head.dweight))
    return LinearGrpoLoss(loss, result.logprob, result.entropy, stats, maxima)


def linear_token_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    chunk_tokens: int = 1024,
    logits_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> TokenLogprob:
    """token_logprob(hidden @ weight.T, target) without a gradient, with the logits memory of one chunk.

    hidden [T, H], weight [Vp, H], logits_dtype as in `linear_grpo_loss`; the other arguments and the errors are those
    of `token_logprob`.
    """
    shard = _shard(
        hidden, weight, target, vocab_start, vocab_size, temperature, tp_group, chunk_tokens, logits_dtype, backend
    )
    with torch.no_grad():
        result = _empty_result(hidden)
        for at, logits in _Head(hidden, weight, shard, chunk_tokens, logits_dtype).chunks():
            _store(result, at, shard.forward(logits, target[at]))
    return result


def head_logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """hidden [c, H] @ weight.T -> [c, Vp] in `dtype`; one that is wider than theirs leaves the sums unrounded."""
    if dtype == weight.dtype:
        return torch.mm(hidden, weight.T, out=out)
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=dtype, out=out)
    return torch.mm(hidden.to(dtype), weight.to(dtype).T, out=out)


def chunk_tokens_within(memory_bytes: int, weight: Tensor, logits_dtype: torch.dtype | None = None) -> int:
    """How many tokens a chunk may have so that its logits, against weight [Vp, H], take at most `memory_bytes`.

    At least 1; above 128 a multiple of 128, which fills the tiles of a matrix product. A larger chunk reads and writes
    the float32 sum of dweight less often.
    """
    require(memory_bytes > 0, "memory_bytes", memory_bytes, "must be above 0")
    tokens = max(1, memory_bytes // (_padded(weight.shape[0]) * (logits_dtype or weight.dtype).itemsize))
    return tokens if tokens < 128 else tokens // 128 * 128


class _Head:
    """Logits of token chunks in one reused buffer, and the sums dhidden [T, H] and dweight [Vp, H] of their gradients.

    dweight is float32 at least. Either sum is None where its input needs no gradient.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, shard: VocabShard, chunk_tokens: int, logits_dtype: torch.dtype | None
    ) -> None:
        grad = torch.is_grad_enabled()
        self._hidden, self._weight, self._shard = hidden.detach(), weight.detach(), shard
        columns = weight.shape[0]
        # rows of whole cache lines, so that kernels and matrix products keep wide accesses whatever the shard is
        rows = min(chunk_tokens, hidden.shape[0])
        self._buffer = weight.new_empty(rows, _padded(columns), dtype=logits_dtype)[:, :columns]
        self.dhidden = torch.zeros_like(self._hidden) if grad and hidden.requires_grad else None
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        self.dweight = torch.zeros_like(self._weight, dtype=sum_dtype) if grad and weight.requires_grad else None
        self.wants_gradient = self.dhidden is not None or self.dweight is not None

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk and its logits [c, Vp], valid until the next one; the consumer may overwrite them."""
        total, step = self._hidden.shape[0], self._buffer.shape[0]
        for start in range(0, total, max(step, 1)):
            at = slice(start, min(start + step, total))
            out = self._buffer[: at.stop - at.start]
            yield at, head_logits(self._hidden[at], self._weight, out.dtype, out)

    def add_gradient(
        self,
        at: slice,
        logits: Tensor,
        target: Tensor,
        result: TokenLogprob,
        dlogprob: Tensor,
        dentropy: Tensor | None,
    ) -> None:
        """Turn the chunk's logits into dlogits, in place, and those into its part of dhidden and dweight."""
        chunk = TokenLogprob(*(x[at] for x in result))
        dlogits = self._shard.backward(logits, target[at], chunk, dlogprob, dentropy, out=logits)
        # the products leave out padded columns and inactive tokens: 0 times a NaN there would be NaN
        words = slice(0, self._shard.valid_columns(logits))
        dlogits = dlogits[:, words].to(self._weight.dtype)
        if self.dhidden is not None:
            torch.mm(dlogits, self._weight[words], out=self.dhidden[at])
        if self.dweight is not None:
            active = dlogprob != 0 if dentropy is None else (dlogprob != 0) | (dentropy != 0)
            _add_product(self.dweight[words], dlogits.T, torch.where(active[:, None], self._hidden[at], 0))


def _padded(columns: int) -> int:
    return -(-columns // 64) * 64


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total may be wider than a and b: no part is rounded to their dtype on the way."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _empty_result(hidden: Tensor) -> TokenLogprob:
    rows = hidden.new_empty(
        len(TokenLogprob._fields), hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32)
    )
    return TokenLogprob(*rows)


def _store(result: TokenLogprob, at: slice, chunk: TokenLogprob) -> None:
    for whole, part in zip(result, chunk, strict=True):
        whole[at] = part


def _shard(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_size: int | None,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    chunk_tokens: int,
    logits_dtype: torch.dtype | None,
    backend: str | None,
) -> VocabShard:
    if hidden.dim() != 2 or not hidden.is_floating_point():
        raise ValueError(f"hidden must be floating point [T, H], got {hidden.dtype} {list(hidden.shape)}")
    like = (hidden.dtype, hidden.device)
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[1] or (weight.dtype, weight.device) != like:
        got = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        raise ValueError(f"weight must be {like[0]} [Vp, {hidden.shape[1]}] on {like[1]}, got {got}")
    if target.shape != hidden.shape[:1] or target.device != hidden.device:
        got = f"{list(target.shape)} on {target.device}"
        raise ValueError(f"target must be [{hidden.shape[0]}] on {hidden.device}, got {got}")
    require(chunk_tokens >= 1, "chunk_tokens", chunk_tokens, "must be at least 1")
    if logits_dtype not in (None, weight.dtype, torch.float32):
        raise ValueError(f"logits_dtype must be float32 or weight's {weight.dtype}, got {logits_dtype}")
    return VocabShard.of(
        weight.shape[0],
        target,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        temperature=temperature,
        tp_group=tp_group,
        backend=backend,
    )
