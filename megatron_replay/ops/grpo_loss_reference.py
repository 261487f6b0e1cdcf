"""The GRPO loss in plain torch: the definition that every kernel is held to. Equations: `grpo_loss.grpo_loss_terms`.

Dims: T tokens (packed), N rollouts, B age buckets, K = len(STATS), M = len(MAXIMA). Per-rollout tensors get one more
row, all zeros, for the tokens that belong to no rollout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.ops.grpo_loss import GrpoLossOptions, GrpoLossTerms
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.grpo_stats import MAXIMA, STATS


def grpo_loss_terms(
    policy_logprobs: Tensor,
    inputs: GrpoLossInputs,
    options: GrpoLossOptions,
    entropy: Tensor | None,
    statistics: bool = True,
) -> GrpoLossTerms:
    dtype = torch.float64 if policy_logprobs.dtype == torch.float64 else torch.float32
    limit = options.log_ratio_clamp
    n, device = inputs.advantage.numel(), policy_logprobs.device

    position = torch.arange(policy_logprobs.numel(), dtype=torch.int32, device=device)
    rollout = torch.searchsorted(inputs.cu_seqlens[1:], position, right=True)  # [T], N where no rollout holds the token
    mask = inputs.loss_mask & (rollout < n)

    def masked(x: Tensor) -> Tensor:  # [T] -> [T]
        return torch.where(mask, x.to(dtype), 0)

    def spread(x: Tensor) -> Tensor:  # [N] or [N+1] -> [T]
        x = x.to(dtype)
        return masked(torch.cat([x, x.new_zeros(n + 1 - x.numel())])[rollout])

    def per_rollout(x: Tensor) -> Tensor:  # [T] -> [N+1]; float64, so that the order of a GPU's atomics hardly shows
        return torch.zeros(n + 1, dtype=torch.float64, device=device).index_add_(0, rollout, x.double())

    policy = masked(policy_logprobs)
    a = spread(inputs.advantage)
    weight = spread(inputs.loss_weight)
    pg_weight = weight if inputs.importance_weight is None else weight * spread(inputs.importance_weight)

    token_log_ratio = policy - masked(inputs.behavior_logprobs)
    trained = per_rollout(mask)
    sequence_log_ratio = per_rollout(token_log_ratio)
    by_sequence = options.ratio_level == "sequence"
    log_ratio = spread(sequence_log_ratio / trained.clamp(min=1)) if by_sequence else token_log_ratio
    clamped = log_ratio.abs() > limit
    ratio = log_ratio.clamp(-limit, limit).exp()

    low, high = 1 - options.clip_eps_low, 1 + options.clip_eps_high
    dual_clipped = torch.zeros_like(mask)
    if options.objective == "cispo":
        clipped_low, clipped_high = ratio < low, ratio > high
        dpg = -ratio.clamp(low, high) * a
        pg = dpg * policy
    else:
        clipped_low, clipped_high = (a < 0) & (ratio < low), (a > 0) & (ratio > high)
        pg = -torch.minimum(ratio * a, ratio.clamp(low, high) * a)
        if options.dual_clip is not None:
            dual_clipped = (a < 0) & (ratio > options.dual_clip)
            pg = torch.where(dual_clipped, -options.dual_clip * a, pg)
        # the mean over a rollout's tokens and its derivative cancel: d loss / d policy_t is the same in both levels
        dpg = torch.where(clamped | clipped_low | clipped_high | dual_clipped, 0, -ratio * a)
    value = pg_weight * pg
    dlogprob = pg_weight * dpg

    kl = torch.zeros_like(policy)
    if inputs.reference_logprobs is not None:
        difference = masked(inputs.reference_logprobs) - policy
        outside = difference.abs() > limit
        kl, dkl = _kl(difference.clamp(-limit, limit), options.kl_estimator)
        value = value + options.kl_beta * weight * kl
        dlogprob = dlogprob + options.kl_beta * weight * torch.where(outside, 0, dkl)
        clamped = clamped | outside

    entropy = torch.zeros_like(policy) if entropy is None else masked(entropy)
    dentropy = None
    if options.entropy_weight != 0:
        value = value - options.entropy_weight * weight * entropy
        dentropy = -options.entropy_weight * weight
    if not statistics:
        return GrpoLossTerms(None, dlogprob, dentropy, None, None)

    # masked tokens have log-ratio 0 and ratio 1: never clipped, but to be left out of the sums of ratios
    # expm1(x) - x is k3 without the cancellation near 0
    behavior_log_ratio = token_log_ratio.clamp(-limit, limit)
    token_stats = {
        "tokens": mask,
        "ratio_sum": masked(ratio),
        "clipped_low": clipped_low,
        "clipped_high": clipped_high,
        "dual_clipped": dual_clipped,
        "log_ratio_clamped": clamped,
        "abs_log_ratio_sum": token_log_ratio.abs(),
        "abs_log_ratio_outliers": token_log_ratio.abs() > 1,
        "kl_sum": kl,
        "behavior_kl_sum": behavior_log_ratio.expm1() - behavior_log_ratio,
        "entropy_sum": entropy,
    }
    token_maxima = {"ratio_max": masked(ratio), "abs_log_ratio_max": token_log_ratio.abs()}
    alive = trained[:n] > 0
    sequence_ratio = torch.where(alive, sequence_log_ratio[:n].clamp(-limit, limit).exp(), 0)
    rollout_stats = {
        "rollouts": alive,
        "seq_ratio_sum": sequence_ratio,
        "seq_ratio_sq_sum": sequence_ratio.square(),
        "advantage_abs_sum": torch.where(alive, inputs.advantage.abs(), 0),
    }
    bucket = torch.zeros(n + 1, dtype=torch.int64, device=device)
    if inputs.age is not None:
        bucket[:n] = inputs.age.clamp(0, inputs.age_buckets - 1)
    stats = torch.zeros(inputs.age_buckets, len(STATS), dtype=torch.float64, device=device)
    for column, name in enumerate(STATS):
        if name in token_stats:
            stats[:, column].index_add_(0, bucket[rollout], token_stats[name].double())
        else:
            stats[:, column].index_add_(0, bucket[:n], rollout_stats[name].double())
    maxima = torch.zeros(inputs.age_buckets, len(MAXIMA), dtype=torch.float64, device=device)
    for column, name in enumerate(MAXIMA):
        maxima[:, column].scatter_reduce_(0, bucket[rollout], token_maxima[name].double(), "amax")

    loss = value.sum(dtype=torch.float64).to(dtype)
    return GrpoLossTerms(loss, dlogprob, dentropy, stats, maxima)


def _kl(u: Tensor, estimator: str) -> tuple[Tensor, Tensor]:
    """KL(policy || reference) at u = reference - policy log-prob, and its derivative in the policy's log-prob."""
    if estimator == "k1":
        return -u, torch.ones_like(u)
    if estimator == "k2":
        return u.square() / 2, -u
    return u.expm1() - u, -u.expm1()
