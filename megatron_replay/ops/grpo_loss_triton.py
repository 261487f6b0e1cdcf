"""The GRPO loss in Triton. Definition: `grpo_loss_reference`; equations: `grpo_loss.grpo_loss_terms`.

One launch goes over the packed tokens: one program is one rollout, so that its advantage, weights, sequence ratio and
age are read once and broadcast to its tokens, and its statistics are summed in a fixed order without atomics. A second,
tiny launch sums the rollouts' rows into age buckets, in rollout order.

Dims: T tokens (packed), N rollouts, B age buckets, K = len(STATS), M = len(MAXIMA), R = 1 + K + M.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_replay.ops.grpo_loss import GrpoLossOptions, GrpoLossTerms
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.grpo_stats import MAXIMA, STATS
from megatron_replay.ops.launch import launch_config

ROW = tl.constexpr(1 + len(STATS) + len(MAXIMA))
SUMS = tl.constexpr(1 + len(STATS))
SUM_LANES = tl.constexpr(32)  # a power of two, at least ROW
SUM_ROLLOUTS = tl.constexpr(32)


@triton.jit
def _exp_parts(u):
    """exp(u) - 1 and exp(u) - 1 - u, without the cancellation near 0."""
    # Taylor of (exp(u) - 1 - u) / (u^2 / 2); the first term left out is below 1e-8 of the sum for |u| < 1/2
    series = 1.0 + u / 9.0
    series = 1.0 + u / 8.0 * series
    series = 1.0 + u / 7.0 * series
    series = 1.0 + u / 6.0 * series
    series = 1.0 + u / 5.0 * series
    series = 1.0 + u / 4.0 * series
    series = 0.5 * u * u * (1.0 + u / 3.0 * series)
    exp = tl.exp(u)
    small = tl.abs(u) < 0.5
    return tl.where(small, u + series, exp - 1.0), tl.where(small, series, exp - 1.0 - u)


@triton.jit
def _clamp(x, low, high):
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _rollout_kernel(
    policy, behavior, reference, entropy, mask, cu_seqlens, advantage, loss_weight, importance_weight,
    dlogprob, dentropy, rows, T, N,
    ratio_low, ratio_high, dual_clip, kl_beta, entropy_weight, limit,
    SEQUENCE: tl.constexpr, CISPO: tl.constexpr, DUAL_CLIP: tl.constexpr, REFERENCE: tl.constexpr, KL: tl.constexpr,
    IMPORTANCE: tl.constexpr, ENTROPY: tl.constexpr, DENTROPY: tl.constexpr, STATISTICS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rollout = tl.program_id(0)
    # the program after the last rollout trains no token: it writes zeros to the padding behind them
    real = rollout < N
    begin = tl.load(cu_seqlens + rollout)
    end = tl.load(cu_seqlens + rollout + 1, mask=real, other=T)
    trained_end = tl.where(real, end, begin)
    advantage_r = tl.load(advantage + rollout, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(loss_weight + rollout, mask=real, other=0.0).to(tl.float32)
    pg_weight = weight
    if IMPORTANCE:
        pg_weight = weight * tl.load(importance_weight + rollout, mask=real, other=0.0).to(tl.float32)
    lane = tl.arange(0, BLOCK)

    sequence_x = 0.0
    if SEQUENCE:
        x_sum = tl.zeros((BLOCK,), tl.float64)
        count = tl.zeros((BLOCK,), tl.float32)  # exact up to 2^24 tokens of a rollout
        for start in range(begin, end, BLOCK):
            t = start + lane
            trained = tl.load(mask + t, mask=t < trained_end, other=0) != 0
            x = tl.load(policy + t, mask=trained, other=0.0).to(tl.float32)
            x -= tl.load(behavior + t, mask=trained, other=0.0).to(tl.float32)
            x_sum += x.to(tl.float64)
            count += tl.where(trained, 1.0, 0.0)
        sequence_x = tl.sum(x_sum, axis=0).to(tl.float32) / tl.maximum(tl.sum(count, axis=0), 1.0)

    # one lane adds few tokens, so float32 lanes lose nothing; the lanes are summed in float64
    loss = tl.zeros((BLOCK,), tl.float64)
    x_total = tl.zeros((BLOCK,), tl.float64)
    tokens = tl.zeros((BLOCK,), tl.float32)
    ratios = tl.zeros((BLOCK,), tl.float32)
    lows = tl.zeros((BLOCK,), tl.float32)
    highs = tl.zeros((BLOCK,), tl.float32)
    duals = tl.zeros((BLOCK,), tl.float32)
    clamps = tl.zeros((BLOCK,), tl.float32)
    distances = tl.zeros((BLOCK,), tl.float32)
    outliers = tl.zeros((BLOCK,), tl.float32)
    kls = tl.zeros((BLOCK,), tl.float32)
    behavior_kls = tl.zeros((BLOCK,), tl.float32)
    entropies = tl.zeros((BLOCK,), tl.float32)
    ratio_max = tl.zeros((BLOCK,), tl.float32)
    distance_max = tl.zeros((BLOCK,), tl.float32)

    for start in range(begin, end, BLOCK):
        t = start + lane
        trained = tl.load(mask + t, mask=t < trained_end, other=0) != 0
        logp = tl.load(policy + t, mask=trained, other=0.0).to(tl.float32)
        token_x = logp - tl.load(behavior + t, mask=trained, other=0.0).to(tl.float32)
        x = token_x
        if SEQUENCE:
            x = tl.where(trained, sequence_x, 0.0)
        clamped = tl.abs(x) > limit
        ratio = tl.exp(_clamp(x, -limit, limit))
        bounded = _clamp(ratio, ratio_low, ratio_high)
        a = tl.where(trained, advantage_r, 0.0)
        dual = tl.zeros((BLOCK,), tl.int1)
        if CISPO:
            low = ratio < ratio_low
            high = ratio > ratio_high
            dpg = -bounded * a
            pg = dpg * logp
        else:
            low = (a < 0) & (ratio < ratio_low)
            high = (a > 0) & (ratio > ratio_high)
            pg = -tl.minimum(ratio * a, bounded * a, propagate_nan=tl.PropagateNan.ALL)
            if DUAL_CLIP:
                dual = (a < 0) & (ratio > dual_clip)
                pg = tl.where(a < 0, tl.minimum(pg, -dual_clip * a, propagate_nan=tl.PropagateNan.ALL), pg)
            # the mean over a rollout's tokens and its derivative cancel, so both ratio levels have this derivative
            dpg = tl.where(clamped | low | high | dual, 0.0, -ratio * a)
        value = pg_weight * pg
        derivative = pg_weight * dpg
        kl = tl.zeros((BLOCK,), tl.float32)
        if REFERENCE:
            difference = tl.load(reference + t, mask=trained, other=0.0).to(tl.float32) - logp
            outside = tl.abs(difference) > limit
            u = _clamp(difference, -limit, limit)
            if KL == "k1":
                kl = -u
                dkl = tl.full((BLOCK,), 1.0, tl.float32)
            elif KL == "k2":
                kl = 0.5 * u * u
                dkl = -u
            else:
                exp_minus_1, kl = _exp_parts(u)
                dkl = -exp_minus_1
            value += kl_beta * weight * kl
            derivative += kl_beta * weight * tl.where(outside, 0.0, dkl)
            clamped = clamped | outside
        if ENTROPY:
            h = tl.load(entropy + t, mask=trained, other=0.0).to(tl.float32)
            value -= entropy_weight * weight * h
        tl.store(dlogprob + t, tl.where(trained, derivative, 0.0), mask=t < end)
        if DENTROPY:
            tl.store(dentropy + t, tl.where(trained, -entropy_weight * weight, 0.0), mask=t < end)
        if STATISTICS:
            distance = tl.abs(token_x)
            _, behavior_kl = _exp_parts(_clamp(token_x, -limit, limit))
            loss += tl.where(trained, value, 0.0).to(tl.float64)
            x_total += token_x.to(tl.float64)
            tokens += tl.where(trained, 1.0, 0.0)
            ratios += tl.where(trained, ratio, 0.0)
            lows += tl.where(trained & low, 1.0, 0.0)
            highs += tl.where(trained & high, 1.0, 0.0)
            duals += tl.where(dual & trained, 1.0, 0.0)
            clamps += tl.where(clamped & trained, 1.0, 0.0)
            distances += distance
            outliers += tl.where(distance > 1.0, 1.0, 0.0)
            kls += tl.where(trained, kl, 0.0)
            behavior_kls += behavior_kl
            if ENTROPY:
                entropies += h
            ratio_max = tl.maximum(ratio_max, tl.where(trained, ratio, 0.0))
            distance_max = tl.maximum(distance_max, distance)

    if STATISTICS:
        n_tokens = tl.sum(tokens.to(tl.float64), axis=0)
        alive = n_tokens > 0
        x_sum_all = tl.sum(x_total, axis=0)
        sequence_ratio = tl.exp(_clamp(x_sum_all.to(tl.float32), -limit, limit)).to(tl.float64)
        sequence_ratio = tl.where(alive, sequence_ratio, 0.0)
        row = rows + rollout.to(tl.int64) * ROW
        # the loss, then STATS, then MAXIMA, in their order
        values = (
            tl.sum(loss, axis=0),
            n_tokens,
            tl.where(alive, 1.0, 0.0),
            tl.sum(ratios.to(tl.float64), axis=0),
            tl.sum(lows.to(tl.float64), axis=0),
            tl.sum(highs.to(tl.float64), axis=0),
            tl.sum(duals.to(tl.float64), axis=0),
            tl.sum(clamps.to(tl.float64), axis=0),
            tl.sum(distances.to(tl.float64), axis=0),
            tl.sum(outliers.to(tl.float64), axis=0),
            tl.sum(kls.to(tl.float64), axis=0),
            tl.sum(behavior_kls.to(tl.float64), axis=0),
            tl.sum(entropies.to(tl.float64), axis=0),
            sequence_ratio,
            sequence_ratio * sequence_ratio,
            tl.where(alive, tl.abs(advantage_r), 0.0),
            tl.max(ratio_max, axis=0),
            tl.max(distance_max, axis=0),
        )
        for i in tl.static_range(ROW):
            tl.store(row + i, values[i].to(tl.float64), mask=real)


@triton.jit
def _bucket_kernel(rows, age, out, N, last_bucket, AGE: tl.constexpr):
    """out [B, R] of rows [N, R]: program b sums, or takes the maximum of, the rollouts of bucket b."""
    bucket = tl.program_id(0)
    column = tl.arange(0, SUM_LANES)
    total = tl.zeros((SUM_LANES,), tl.float64)
    largest = tl.zeros((SUM_LANES,), tl.float64)
    end = N
    if not AGE:
        end = tl.where(bucket == 0, N, 0)
    for start in range(0, end, SUM_ROLLOUTS):
        n = start + tl.arange(0, SUM_ROLLOUTS)
        mine = n < N
        if AGE:
            at = tl.load(age + n, mask=mine, other=0)
            mine = mine & (tl.minimum(tl.maximum(at, 0), last_bucket) == bucket)
        wanted = mine[:, None] & (column < ROW)[None, :]
        x = tl.load(rows + n[:, None].to(tl.int64) * ROW + column[None, :], mask=wanted, other=0.0)
        total += tl.sum(x, axis=0)
        largest = tl.maximum(largest, tl.max(x, axis=0))
    tl.store(out + bucket * ROW + column, tl.where(column < SUMS, total, largest), mask=column < ROW)


def grpo_loss_terms(
    policy_logprobs: Tensor,
    inputs: GrpoLossInputs,
    options: GrpoLossOptions,
    entropy: Tensor | None,
    statistics: bool = True,
) -> GrpoLossTerms:
    if policy_logprobs.dtype == torch.float64:
        raise ValueError(f"policy_logprobs must be at most float32 with backend triton, got {policy_logprobs.dtype}")
    n, tokens, device = inputs.advantage.numel(), policy_logprobs.numel(), policy_logprobs.device
    dlogprob = torch.empty(tokens, dtype=torch.float32, device=device)
    dentropy = torch.empty_like(dlogprob) if options.entropy_weight != 0 else None
    rows = torch.empty(n, ROW.value, dtype=torch.float64, device=device)
    config = launch_config("grpo_loss", device)
    # an argument that the options leave out is never read; any tensor stands for it
    unused = policy_logprobs
    reference, importance = inputs.reference_logprobs, inputs.importance_weight
    with torch.cuda.device_of(policy_logprobs):
        _rollout_kernel[(n + 1,)](
            policy_logprobs.contiguous(),
            inputs.behavior_logprobs.contiguous(),
            unused if reference is None else reference.contiguous(),
            unused if entropy is None else entropy.contiguous(),
            inputs.loss_mask.contiguous().view(torch.uint8),
            inputs.cu_seqlens.contiguous(),
            inputs.advantage.contiguous(),
            inputs.loss_weight.contiguous(),
            unused if importance is None else importance.contiguous(),
            dlogprob,
            unused if dentropy is None else dentropy,
            rows,
            tokens,
            n,
            1.0 - options.clip_eps_low,
            1.0 + options.clip_eps_high,
            float(options.dual_clip or 0.0),
            float(options.kl_beta),
            float(options.entropy_weight),
            float(options.log_ratio_clamp),
            SEQUENCE=options.ratio_level == "sequence",
            CISPO=options.objective == "cispo",
            DUAL_CLIP=options.dual_clip is not None,
            REFERENCE=reference is not None,
            KL=options.kl_estimator,
            IMPORTANCE=importance is not None,
            ENTROPY=entropy is not None,
            DENTROPY=dentropy is not None,
            STATISTICS=statistics,
            BLOCK=config.per_thread * config.threads,
            num_warps=config.num_warps,
        )
        if not statistics:
            return GrpoLossTerms(None, dlogprob, dentropy, None, None)
        buckets = torch.empty(inputs.age_buckets, ROW.value, dtype=torch.float64, device=device)
        age = inputs.age
        _bucket_kernel[(inputs.age_buckets,)](
            rows, rows if age is None else age.contiguous(), buckets, n, inputs.age_buckets - 1, AGE=age is not None
        )
    loss, stats, maxima = buckets.split([1, len(STATS), len(MAXIMA)], dim=1)
    return GrpoLossTerms(loss.sum().float(), dlogprob, dentropy, stats.contiguous(), maxima.contiguous())
