from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_replay.ops.grpo_loss import GrpoLossOptions, grpo_loss_terms
from megatron_replay.ops.grpo_stats import MAXIMA, STATS, summarize_stats
from tests.numerics import random_case

EVERYTHING = GrpoLossOptions(dual_clip=1.4, kl_beta=0.1, kl_estimator="k2", entropy_weight=-0.1, log_ratio_clamp=0.6)


def test_microbatches_add_up() -> None:
    options = EVERYTHING
    case = random_case(options, (7, 3, 1, 13, 29, 5))
    whole = grpo_loss_terms(**case.call())
    stats, maxima, loss, dlogprob = torch.zeros_like(whole.stats), torch.zeros_like(whole.maxima), 0.0, []
    for i, (start, end) in enumerate(case.bounds):
        part = {
            k: v[start:end] if v.shape == case.loss_mask.shape else v[i : i + 1]
            for k, v in case.arguments().items()
            if isinstance(v, Tensor)
        }
        part["cu_seqlens"] = torch.tensor([0, end - start], dtype=torch.int32)
        terms = grpo_loss_terms(**case.call(**part))
        stats, maxima = stats + terms.stats, torch.maximum(maxima, terms.maxima)
        loss, dlogprob = loss + terms.loss, [*dlogprob, terms.dlogprob]
    torch.testing.assert_close(loss, whole.loss)
    torch.testing.assert_close(torch.cat(dlogprob), whole.dlogprob)
    torch.testing.assert_close(stats, whole.stats)
    torch.testing.assert_close(maxima, whole.maxima)


def test_statistics_by_bucket_against_loops() -> None:
    options = GrpoLossOptions(dual_clip=1.3, kl_beta=0.1, log_ratio_clamp=0.5)
    case = random_case(options, spread=0.6).double()
    terms = grpo_loss_terms(**case.call())
    want = torch.zeros(3, len(STATS), dtype=torch.float64)
    most = torch.zeros(3, len(MAXIMA), dtype=torch.float64)
    for i, (start, end) in enumerate(case.bounds):
        row, a, total = min(int(case.age[i]), 2), float(case.advantage[i]), 0.0
        tokens = [t for t in range(start, end) if case.loss_mask[t]]
        for t in tokens:
            x = float(case.policy_logprobs[t] - case.behavior_logprobs[t])
            u = float(case.reference_logprobs[t] - case.policy_logprobs[t])
            d, k = max(-0.5, min(0.5, x)), max(-0.5, min(0.5, u))
            r, total = math.exp(d), total + x
            each = {
                "tokens": 1,
                "ratio_sum": r,
                "clipped_low": a < 0 and r < 0.8,
                "clipped_high": a > 0 and r > 1.28,
                "dual_clipped": a < 0 and r > 1.3,
                "log_ratio_clamped": abs(x) > 0.5 or abs(u) > 0.5,
                "abs_log_ratio_sum": abs(x),
                "abs_log_ratio_outliers": abs(x) > 1,
                "kl_sum": math.exp(k) - k - 1,
                "behavior_kl_sum": math.exp(d) - d - 1,
                "entropy_sum": float(case.entropy[t]),
            }
            want[row] += torch.tensor([float(each.get(name, 0)) for name in STATS])
            most[row] = torch.maximum(most[row], torch.tensor([r, abs(x)]))
        if tokens:
            w = math.exp(max(-0.5, min(0.5, total)))
            each = {"rollouts": 1, "seq_ratio_sum": w, "seq_ratio_sq_sum": w * w, "advantage_abs_sum": abs(a)}
            want[row] += torch.tensor([float(each.get(name, 0)) for name in STATS])
    assert (want.sum(0) > 0).all(), "every column is exercised"
    torch.testing.assert_close(terms.stats, want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(terms.maxima, most, rtol=1e-6, atol=1e-6)
    assert not terms.stats.requires_grad


def test_summary() -> None:
    case = random_case(GrpoLossOptions(log_ratio_clamp=2.0))
    terms = grpo_loss_terms(**case.call())
    summary = summarize_stats(terms.stats, terms.maxima)
    mask = case.loss_mask
    x = (case.policy_logprobs - case.behavior_logprobs).double()
    sums = (
        torch.tensor([x[s:e][mask[s:e]].sum() for s, e in case.bounds if e > s], dtype=torch.float64).clamp(-2, 2).exp()
    )
    assert summary["tokens"] == int(mask.sum()) and summary["rollouts"] == 5
    assert summary["ratio_mean"] == pytest.approx(float(x[mask].clamp(-2, 2).exp().mean()), rel=1e-5)
    assert summary["logprob_abs_diff_mean"] == pytest.approx(float(x[mask].abs().mean()), rel=1e-5)
    assert summary["ess"] == pytest.approx(float(sums.sum() ** 2 / (5 * sums.square().sum())), rel=1e-5)
    assert 0.1 < summary["ess"] < 0.99
    assert summary["clip_fraction"] == pytest.approx(summary["clip_fraction_low"] + summary["clip_fraction_high"])
    assert summary["advantage_abs_mean"] == pytest.approx(float(case.advantage[[0, 2, 3, 4, 5]].abs().mean()), rel=1e-5)
    assert summarize_stats(terms.stats.sum(0), terms.maxima.amax(0)) == summary
    rows = [summarize_stats(s, m)["tokens"] for s, m in zip(terms.stats, terms.maxima, strict=True)]
    assert sum(rows) == summary["tokens"] and len(rows) == 3
    with pytest.raises(ValueError, match=r"^stats must be \[15\]"):
        summarize_stats(terms.stats[:, 1:], terms.maxima)
    with pytest.raises(ValueError, match=r"^maxima must be \[3, 2\], got \[2\]"):
        summarize_stats(terms.stats, terms.maxima[0])
