"""Log-probability and entropy of one vocabulary shard in plain torch: the definition that every kernel is held to.

Dims: T tokens, V vocabulary (true, unpadded), Vp its shard on this rank, v the columns of the shard that are below V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron_replay.ops.token_logprob import TokenLogprob

# exp of it is 0 in float32 and float64 alike; unlike -inf it can be multiplied by 0
LOG_ZERO = -1e4


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
    x = logits[:, : valid_columns(logits, vocab_start, vocab_size)].to(compute_dtype(logits))  # [T, v]
    partials = x.new_zeros(4, x.shape[0])
    if x.shape[1] == 0:
        partials[0] = -torch.inf
        return partials
    maximum = torch.amax(x, 1, out=partials[0])
    column, inside = _local(target, vocab_start, x.shape[1])
    partials[2] = torch.where(inside, x.gather(1, column[:, None])[:, 0], 0)
    # a row of -inf keeps its sums at 0 instead of becoming -inf - -inf
    centre = torch.where(maximum == -torch.inf, 0, maximum)
    d = (x - centre[:, None]).div_(temperature).clamp_(min=LOG_ZERO)
    exp = d.exp()
    partials[1] = exp.sum(1)
    partials[3] = exp.mul_(d).sum(1)
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
    log_p = (logits[:, :valid].to(dtype) - result.maximum[:, None]).div_(temperature)  # [T, v]
    log_p = log_p.sub_(result.log_sum[:, None]).clamp_(min=LOG_ZERO)
    grad = log_p.exp()
    inactive = dlogprob == 0
    if dentropy is None:
        grad.mul_(-dlogprob[:, None])
    else:
        dentropy = dentropy.to(dtype) / temperature
        inactive &= dentropy == 0
        grad.mul_(log_p.add_(result.entropy[:, None]).mul_(-dentropy[:, None]).sub_(dlogprob[:, None]))
    column, inside = _local(target, vocab_start, valid)
    grad.scatter_add_(1, column[:, None], torch.where(inside, dlogprob, 0)[:, None])
    out[:, :valid] = grad.masked_fill_(inactive[:, None], 0)
    return out


def _local(target: Tensor, vocab_start: int, valid: int) -> tuple[Tensor, Tensor]:
    """Column of each target in the shard, in range even where the target is another shard's, and whether it is ours."""
    column = target - vocab_start
    return column.clamp(0, valid - 1), (column >= 0) & (column < valid)
