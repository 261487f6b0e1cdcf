"""The clipped GRPO loss of packed rollouts: options, value and derivative.

Dims: T tokens (packed), N rollouts, B age buckets; K and M columns of statistics: see grpo_stats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_replay.ops import backend as backends
from megatron_replay.ops.checks import require, require_choice
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs

RatioLevel = Literal["token", "sequence"]
Objective = Literal["clip", "cispo"]
KlEstimator = Literal["k1", "k2", "k3"]
Aggregation = Literal["token-mean", "sequence-mean", "fixed-length"]


@dataclass(frozen=True)
class GrpoLossOptions:
    """Which loss `grpo_loss` computes; the equations stand there.

    Raises ValueError, beginning with the field's name, for a value outside its range.
    """

    clip_eps_low: float = 0.2
    clip_eps_high: float = 0.28
    dual_clip: float | None = None  # caps the loss of A < 0 at dual_clip * |A|; None is off
    ratio_level: RatioLevel = "token"  # "sequence" is GSPO
    objective: Objective = "clip"  # "cispo" clips the weight of a policy gradient that reaches every token
    kl_beta: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_weight: float = 0.0  # a bonus: the loss falls as the entropy rises
    log_ratio_clamp: float = 20.0  # the log-ratio is held in [-clamp, clamp] before exp; no gradient outside
    aggregation: Aggregation = "token-mean"
    fixed_length: int | None = None  # the denominator per rollout of "fixed-length" (Dr. GRPO)

    def __post_init__(self) -> None:
        require(0 <= self.clip_eps_low < 1, "clip_eps_low", self.clip_eps_low, "must be in [0, 1)")
        require(
            0 <= self.clip_eps_high < float("inf"), "clip_eps_high", self.clip_eps_high, "must be finite, at least 0"
        )
        require(
            self.dual_clip is None or 1 < self.dual_clip < float("inf"),
            "dual_clip",
            self.dual_clip,
            "must be above 1 and finite, or None",
        )
        require(
            self.dual_clip is None or self.objective == "clip",
            "dual_clip",
            self.dual_clip,
            "needs objective clip (the weight of cispo is already bounded)",
        )
        require_choice("ratio_level", self.ratio_level, get_args(RatioLevel))
        require_choice("objective", self.objective, get_args(Objective))
        require_choice("kl_estimator", self.kl_estimator, get_args(KlEstimator))
        require_choice("aggregation", self.aggregation, get_args(Aggregation))
        require(0 <= self.kl_beta < float("inf"), "kl_beta", self.kl_beta, "must be finite, at least 0")
        require(abs(self.entropy_weight) < float("inf"), "entropy_weight", self.entropy_weight, "must be finite")
        # exp(80) still fits float32
        require(0 < self.log_ratio_clamp <= 80, "log_ratio_clamp", self.log_ratio_clamp, "must be in (0, 80]")
        if self.aggregation == "fixed-length":
            require(
                self.fixed_length is not None and self.fixed_length >= 1,
                "fixed_length",
                self.fixed_length,
                "must be at least 1 token with aggregation fixed-length",
            )
        else:
            require(self.fixed_length is None, "fixed_length", self.fixed_length, "needs aggregation fixed-length")


class GrpoLossTerms(NamedTuple):
    """loss 0-d, dlogprob [T], dentropy [T] or None where entropy_weight is 0; stats [B, K], maxima [B, M] float64.

    loss, stats and maxima are None where only the derivatives were asked for.
    """

    loss: Tensor | None
    dlogprob: Tensor
    dentropy: Tensor | None
    stats: Tensor | None
    maxima: Tensor | None

    def value(self) -> tuple[Tensor, Tensor, Tensor]:
        """loss, stats and maxima, which were asked for."""
        assert self.loss is not None and self.stats is not None and self.maxima is not None
        return self.loss, self.stats, self.maxima


class GrpoLoss(NamedTuple):
    """loss 0-d, differentiable; stats [B, K] and maxima [B, M] float64, detached."""

    loss: Tensor
    stats: Tensor
    maxima: Tensor


def rollout_loss_weights(
    response_lengths: Tensor, total_tokens: int | Tensor, total_rollouts: int | Tensor, options: GrpoLossOptions
) -> Tensor:
    """[N] float32: what one trained token of rollout i weighs in the loss.

    token-mean 1 / total_tokens; sequence-mean 1 / (length_i total_rollouts); fixed-length
    1 / (fixed_length total_rollouts). response_lengths [N] counts trained tokens; the totals are those of the whole
    step, over all ranks and microbatches, as ints or 0-d tensors. A length or total of 0 gives weight 0.
    """
    length = response_lengths.double()
    if options.aggregation == "token-mean":
        denominator = torch.ones_like(length) * total_tokens
    elif options.aggregation == "sequence-mean":
        denominator = length * total_rollouts
    else:
        denominator = torch.full_like(length, float(options.fixed_length or 0)) * total_rollouts
    trained = (length > 0) & (denominator > 0)
    return torch.where(trained, 1 / torch.where(trained, denominator, 1), 0).float()


def grpo_loss_terms(
    policy_logprobs: Tensor,
    inputs: GrpoLossInputs,
    options: GrpoLossOptions,
    *,
    entropy: Tensor | None = None,
    backend: str | None = None,
) -> GrpoLossTerms:
    """The loss and its derivative in closed form, outside autograd.

    For trained token t of rollout i, with C = log_ratio_clamp, x_t = policy_t - behavior_t and A = advantage_i:

        r_t    = exp(clamp(x_t, -C, C)), or with ratio_level "sequence" exp(clamp(mean of x over rollout i, -C, C))
        clip:    pg_t = -min(r A, clamp(r, 1 - clip_eps_low, 1 + clip_eps_high) A),  at most dual_clip |A| where A < 0
        cispo:   pg_t = -sg(clamp(r, 1 - clip_eps_low, 1 + clip_eps_high)) A policy_t
        kl_t   : u = clamp(reference_t - policy_t, -C, C);  k1 = -u,  k2 = u^2 / 2,  k3 = exp(u) - u - 1
        loss   = sum_t loss_weight_i (importance_weight_i pg_t + kl_beta kl_t - entropy_weight entropy_t)

    A clamp to [-C, C] passes no gradient outside. policy_logprobs and entropy [T] are floating point; what stands in
    `inputs`, its shapes and its padding: see GrpoLossInputs.

    stats and maxima have one row per age bucket clamp(age, 0, age_buckets - 1), columns STATS and MAXIMA:
    clipped_low and clipped_high count tokens whose gradient the clip removed (cispo: whose weight it changed),
    log_ratio_clamped tokens whose ratio or reference difference met C, abs_log_ratio_* use |x_t| itself,
    kl_sum the chosen estimator, behavior_kl_sum k3 of the behavior against the policy, seq_ratio_sum and
    seq_ratio_sq_sum the rollouts' exp(clamp(sum of x, -C, C)) and its square, advantage_abs_sum |A| per rollout.

    Arithmetic is float32, or float64 for float64 policy_logprobs. Raises ValueError for wrong shapes, dtypes, and
    inputs that the options need and that are missing; RuntimeError for a backend that cannot run.
    Source: PPO (arXiv 1707.06347), dual clip (1912.09729), DAPO clip-higher (2503.14476), GSPO (2507.18071),
    CISPO (2506.13585), Dr. GRPO (2503.20783), the KL estimators of Schulman, "Approximating KL divergence" (2020).
    """
    inputs.check(policy_logprobs, entropy, options)
    chosen = backends.resolve("grpo_loss", backend, policy_logprobs.device)
    with torch.no_grad():
        terms: GrpoLossTerms = backends.load("grpo_loss", chosen).grpo_loss_terms(
            policy_logprobs, inputs, options, entropy
        )
    return terms


def grpo_loss(
    policy_logprobs: Tensor,
    inputs: GrpoLossInputs,
    options: GrpoLossOptions,
    *,
    entropy: Tensor | None = None,
    backend: str | None = None,
) -> GrpoLoss:
    """`grpo_loss_terms` under autograd: a loss differentiable, once, in policy_logprobs and entropy.

    Arguments, equations and errors are those of `grpo_loss_terms`. A microbatch with no trained token has loss 0 with
    a graph and gradients 0, so every rank can call backward.
    """
    terms = grpo_loss_terms(policy_logprobs, inputs, options, entropy=entropy, backend=backend)
    value, stats, maxima = terms.value()
    loss = with_gradients(value, (policy_logprobs, entropy), (terms.dlogprob, terms.dentropy))
    return GrpoLoss(loss, stats, maxima)


def with_gradients(loss: Tensor, inputs: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> Tensor:
    """The value `loss` as a function of `inputs` whose derivatives are known; backward only scales them."""
    out: Tensor = _KnownGradients.apply(loss, tuple(gradients), *inputs)  # type: ignore[no-untyped-call]
    return out


class _KnownGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: tuple[Tensor | None, ...], *inputs: Tensor | None) -> Tensor:
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [None if x is None else x.dtype for x in inputs]
        return loss.detach().clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        # one pass over each: a product in the sum's dtype would take as much memory again
        return (
            None,
            None,
            *(None if g is None else torch.mul(g, dloss, out=torch.empty_like(g, dtype=dtype)) for g, dtype in pairs),
        )
