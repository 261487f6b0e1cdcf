"""Log-probability and entropy of target tokens from logits whose vocabulary may be sharded over ranks.

Dims: T tokens, V vocabulary (true, unpadded), Vp its shard on this rank, padding included.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_replay.ops import backend as backends
from megatron_replay.ops.token_logprob_reference import LOG_ZERO, valid_columns


class TokenLogprob(NamedTuple):
    """logprob, entropy, lse [T], in nats, of z = logits / temperature; float32, or float64 for float64 logits.

    maximum [T] is the largest logit and log_sum [T] = lse - maximum / temperature. Apart they keep what lse rounds
    away: (logit - maximum) / temperature - log_sum has no rounding of the size of the logits.
    """

    logprob: Tensor
    entropy: Tensor
    lse: Tensor
    maximum: Tensor
    log_sum: Tensor


@dataclass(frozen=True)
class VocabShard:
    """Which words the columns of a shard are, and how the shards meet."""

    vocab_start: int
    vocab_size: int
    temperature: float
    tp_group: dist.ProcessGroup | None
    backend: backends.Backend

    @classmethod
    def of(
        cls,
        columns: int,
        target: Tensor,
        *,
        vocab_start: int,
        vocab_size: int | None,
        temperature: float,
        tp_group: dist.ProcessGroup | None,
        backend: str | None,
    ) -> VocabShard:
        """Check the arguments of a vocabulary-parallel op on a shard of that many columns."""
        ranks = 1 if tp_group is None else dist.get_world_size(tp_group)
        if vocab_start < 0 or (ranks == 1 and vocab_start != 0):
            raise ValueError(
                f"vocab_start must be {'0 without other shards' if ranks == 1 else '>= 0'}, got {vocab_start}"
            )
        if vocab_size is None:
            vocab_size = columns * ranks
        if vocab_size < 1 or (ranks == 1 and vocab_size > columns):
            needs = f"in [1, {columns}] on one rank" if ranks == 1 else "at least 1"
            raise ValueError(f"vocab_size must be {needs}, got {vocab_size}")
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature must be positive and finite, got {temperature}")
        if target.dtype != torch.int64 or target.dim() != 1:
            raise ValueError(f"target must be int64 [T], got {target.dtype} {list(target.shape)}")
        # on a GPU the look would cost a synchronisation
        if target.device.type == "cpu" and target.numel() > 0:
            least, most = (int(x) for x in target.aminmax())
            if least < 0 or most >= vocab_size:
                raise ValueError(f"target must be in [0, {vocab_size}), got {least if least < 0 else most}")
        chosen = backends.resolve("token_logprob", backend, target.device)
        return cls(vocab_start, vocab_size, float(temperature), tp_group, chosen)

    @property
    def _columns(self) -> dict[str, Any]:
        return {"vocab_start": self.vocab_start, "vocab_size": self.vocab_size, "temperature": self.temperature}

    def valid_columns(self, logits: Tensor) -> int:
        """How many leading columns of the shard are words; the rest is padding."""
        return valid_columns(logits, self.vocab_start, self.vocab_size)

    def forward(self, logits: Tensor, target: Tensor) -> TokenLogprob:
        """Partials [4, T] of this shard, gathered from all shards in one collective and merged in rank order."""
        module = backends.load("token_logprob", self.backend)
        partials = module.token_logprob_forward(logits, target, **self._columns)
        ranks = 1 if self.tp_group is None else dist.get_world_size(self.tp_group)
        if ranks == 1:
            return merge_partials(partials[None], self.temperature)
        everyone = partials.new_empty(ranks, *partials.shape)
        dist.all_gather(list(everyone), partials, group=self.tp_group)
        return merge_partials(everyone, self.temperature)

    def backward(
        self,
        logits: Tensor,
        target: Tensor,
        result: TokenLogprob,
        dlogprob: Tensor | None,
        dentropy: Tensor | None,
        out: Tensor | None = None,
    ) -> Tensor:
        """dlogits [T, Vp] of this shard, no communication; `out` may be `logits`."""
        module = backends.load("token_logprob", self.backend)
        dlogits: Tensor = module.token_logprob_backward(
            logits, target, result, dlogprob, dentropy, **self._columns, out=out
        )
        return dlogits


def merge_partials(partials: Tensor, temperature: float) -> TokenLogprob:
    """[R, 4, T], one `token_logprob_forward` of each vocabulary shard -> the result over the whole vocabulary.

    With (m_r, s_r, x_r, e_r) of shard r, M = max_r m_r and d_r = (m_r - M) / temperature:  S = sum_r s_r exp(d_r),
    logprob = (sum_r x_r - M) / temperature - log S,  entropy = log S - sum_r exp(d_r) (e_r + d_r s_r) / S.
    Every rank merges the same numbers in the same order, so all get the same bits.
    """
    local, total, target, moment = partials.unbind(1)  # [R, T] each
    maximum = local.amax(0)  # [T]
    shift = ((local - maximum) / temperature).clamp_(min=LOG_ZERO)  # -inf for a shard of padding alone
    scale = shift.exp()
    total = total * scale
    whole = total.sum(0)
    log_sum = whole.log()
    return TokenLogprob(
        logprob=(target.sum(0) - maximum) / temperature - log_sum,
        entropy=log_sum - (moment * scale + shift * total).sum(0) / whole,
        lse=maximum / temperature + log_sum,
        maximum=maximum,
        log_sum=log_sum,
    )


def token_logprob(
    logits: Tensor,
    target: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    tp_group: dist.ProcessGroup | None = None,
    backend: str | None = None,
) -> TokenLogprob:
    """Log-probability of each target token and entropy of its distribution, at a sampling temperature.

        z = logits / temperature;  logprob = z_target - LSE(z);  entropy = LSE(z) - sum_j p_j z_j,  p = softmax(z)

    logits [T, Vp] floating: the columns of words vocab_start, vocab_start + 1, ... on this rank; target [T] int64:
    global word ids. Columns of words >= vocab_size are padding: probability and gradient exactly 0, contents ignored.
    `vocab_size` None means no padding: Vp words on each rank. All arithmetic is float32, or float64 for float64 logits.

    With `tp_group`, every rank of the group calls with the same target and gets the same result. Communication is
    one all-gather of [4, T] in the forward pass and none in the backward pass: each rank receives the gradient of
    its own columns, so a loss that every rank computes must not be summed over the group.
    logprob and entropy are differentiable in logits, once; the rest is not.

    Raises ValueError for wrong shapes, dtypes and ranges (targets are checked on CPU tensors only: on a GPU the check
    would cost a synchronisation), RuntimeError for a backend that cannot run.
    Source: the vocabulary-parallel cross entropy of Megatron-LM (Shoeybi et al., arXiv 1909.08053), with entropy.
    """
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"logits must be floating point [T, Vp], got {logits.dtype} {list(logits.shape)}")
    if target.shape != logits.shape[:1] or target.device != logits.device:
        raise ValueError(
            f"target must be [{logits.shape[0]}] on {logits.device}, got {list(target.shape)} on {target.device}"
        )
    shard = VocabShard.of(
        logits.shape[1],
        target,
        vocab_start=vocab_start,
        vocab_size=vocab_size,
        temperature=temperature,
        tp_group=tp_group,
        backend=backend,
    )
    return TokenLogprob(*_TokenLogprob.apply(logits, target, shard))  # type: ignore[no-untyped-call]


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, shard: VocabShard) -> tuple[Tensor, ...]:
        result = shard.forward(logits, target)
        ctx.save_for_backward(logits, target, *result)
        ctx.shard = shard
        ctx.mark_non_differentiable(*result[2:])
        ctx.set_materialize_grads(False)
        return tuple(result)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogprob: Tensor | None, dentropy: Tensor | None, *_: None) -> tuple[Tensor, None, None]:
        logits, target, *result = ctx.saved_tensors
        return ctx.shard.backward(logits, target, TokenLogprob(*result), dlogprob, dentropy), None, None
