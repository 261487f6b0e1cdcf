"""Log-probability and entropy of one vocabulary shard in plain torch: the definition that every kernel is held to.

Dims: T tokens, V vocabulary (true, unpadded), Vp its shard on this rank, v the columns of the shard that are below V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_replay.ops.token_logprob import TokenLogprob

# exp of it is 0 in float32 and float64 alike; unlike -inf it can be multiplied by 0
LOG_ZERO = -1e4
CACHE_BYTES = 4 << 20


def compute_dtype(x: Tensor) -> torch.dtype:
    """float32 at least; float64 stays."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def valid_columns(logits: Tensor, vocab_start: int, vocab_size: int) -> int:
    """How many leading columns of the shard are words; the rest is padding."""
    return max(0, min(logits.shape[1], vocab_size - vocab_start))


def token_logprob_forward(
    logits: Tensor, target: Tensor, *, vocab_start: int, vocab_size: int, temperature: float
) -> Tensor:
    """What this shard knows, as rows of one tensor [4, T]: its maximum, and three sums relative to it.

    With m = max_j logits_j over the words of the shard and d_j = (logits_j - m) / temperature:
    m;  sum_j exp(d_j);  logits_target, or 0 in another shard;  sum_j exp(d_j) d_j.
    A shard of padding alone has maximum -inf and sums 0. Rows are float32, or float64 for float64 logits.
    """
    partials = logits.new_zeros(4, logits.shape[0], dtype=compute_dtype(logits))
    words = logits[:, : valid_columns(logits, vocab_start, vocab_size)]
    if words.shape[1] == 0:
        partials[0] = -torch.inf
        return partials
    column, inside = _local(target, vocab_start, words.shape[1])
    for at in _blocks(words):
        x = words[at].to(partials.dtype)  # [t, v]
        maximum = x.amax(1)
        # a row of -inf keeps its sums at 0 instead of becoming -inf - -inf
        centre = torch.where(maximum == -torch.inf, 0, maximum)
        d = (x - centre[:, None]).div_(temperature).clamp_(min=LOG_ZERO)
        exp = d.exp()
        partials[0, at] = maximum
        partials[1, at] = exp.sum(1)
        partials[2, at] = torch.where(inside[at], x.gather(1, column[at, None])[:, 0], 0)
        partials[3, at] = exp.mul_(d).sum(1)
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
    """dlogits [T, Vp] of this shard, in the logits' dtype; `out` may be `logits` itself.

    With log p_j = (logits_j - maximum) / temperature - log_sum and H the entropy, all of `result`:
    dlogits_j = [dlogprob (1[j = target] - p_j) - dentropy p_j (log p_j + H)] / temperature, and exactly 0 for padded
    columns and for tokens whose dlogprob and dentropy are 0, whatever their logits hold. None stands for 0.
    """
    out = torch.empty_like(logits) if out is None else out
    valid = valid_columns(logits, vocab_start, vocab_size)
    out[:, valid:] = 0
    if valid == 0:
        return out
    dtype = compute_dtype(logits)
    dlogprob = torch.zeros_like(result.log_sum) if dlogprob is None else dlogprob.to(dtype) / temperature  # [T]
    inactive = dlogprob == 0
    if dentropy is not None:
        dentropy = dentropy.to(dtype) / temperature
        inactive &= dentropy == 0
    column, inside = _local(target, vocab_start, valid)
    at_target = torch.where(inside, dlogprob, 0)
    for at in _blocks(logits):
        x = logits[at, :valid].to(dtype)
        log_p = (x - result.maximum[at, None]).div_(temperature).sub_(result.log_sum[at, None])  # [t, v]
        if dentropy is None:
            grad = log_p.exp_().mul_(-dlogprob[at, None])
        else:
            grad = log_p.clamp_(min=LOG_ZERO).exp()
            grad.mul_(log_p.add_(result.entropy[at, None]).mul_(-dentropy[at, None]).sub_(dlogprob[at, None]))
        grad.scatter_add_(1, column[at, None], at_target[at, None])
        out[at, :valid] = grad.masked_fill_(inactive[at, None], 0)
    return out


def _blocks(logits: Tensor) -> Iterator[slice]:
    """Slices of rows: on a CPU so few that the temporaries of a block stay in its cache, else all at once."""
    total = logits.shape[0]
    rows = max(1, CACHE_BYTES // (4 * logits.shape[1])) if logits.device.type == "cpu" else max(1, total)
    for start in range(0, total, rows):
        yield slice(start, min(start + rows, total))


def _local(target: Tensor, vocab_start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Column of each target in the shard, in range even where the target is another shard's, and whether it is ours."""
    column = target - vocab_start
    return column.clamp(0, valid - 1), (column >= 0) & (column < valid)
