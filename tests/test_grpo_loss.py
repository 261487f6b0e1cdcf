from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_replay.ops import grpo_loss_reference as reference
from megatron_replay.ops import grpo_loss_triton as kernels
from megatron_replay.ops.grpo_loss import GrpoLossOptions, grpo_loss, grpo_loss_terms, rollout_loss_weights
from megatron_replay.ops.grpo_stats import STATS, summarize_stats
from tests.numerics import LossCase, assert_no_worse_than_torch, assert_not_trivial, naive_loss, random_case, torch_loss

OPTIONS = {
    "default": GrpoLossOptions(),
    "dual clip": GrpoLossOptions(dual_clip=1.5),
    "sequence": GrpoLossOptions(ratio_level="sequence", clip_eps_low=0.05, clip_eps_high=0.05),
    "sequence, dual clip": GrpoLossOptions(
        ratio_level="sequence", clip_eps_low=0.05, clip_eps_high=0.05, dual_clip=1.1
    ),
    "cispo": GrpoLossOptions(objective="cispo"),
    "cispo, sequence": GrpoLossOptions(
        objective="cispo", ratio_level="sequence", clip_eps_low=0.05, clip_eps_high=0.05
    ),
    "k1": GrpoLossOptions(kl_beta=0.3, kl_estimator="k1"),
    "k2": GrpoLossOptions(kl_beta=0.3, kl_estimator="k2"),
    "k3": GrpoLossOptions(kl_beta=0.3, kl_estimator="k3"),
    "entropy": GrpoLossOptions(entropy_weight=0.2),
    "tight clamp": GrpoLossOptions(log_ratio_clamp=0.2, clip_eps_low=0.1, clip_eps_high=0.1, kl_beta=0.1),
    "everything": GrpoLossOptions(
        dual_clip=1.4, kl_beta=0.1, kl_estimator="k2", entropy_weight=-0.1, log_ratio_clamp=0.6
    ),
}


Evaluate = Callable[[LossCase], tuple[Tensor, Tensor, Tensor | None, dict[str, float]]]


@pytest.fixture(params=["reference", "triton"])
def evaluate(request: pytest.FixtureRequest, device: torch.device) -> Evaluate:
    """LossCase -> loss, its gradients in policy_logprobs and entropy, summary of all rows; on both backends."""

    def run(case: LossCase) -> tuple[Tensor, Tensor, Tensor | None, dict[str, float]]:
        case = case.to(device)
        policy = case.policy_logprobs.detach().clone().requires_grad_()
        entropy = None if case.entropy is None else case.entropy.detach().clone().requires_grad_()
        result = grpo_loss(**case.call(policy_logprobs=policy, entropy=entropy), backend=request.param)
        result.loss.backward()
        dentropy = None if entropy is None or entropy.grad is None else entropy.grad.cpu()
        summary = summarize_stats(result.stats, result.maxima)
        return result.loss.detach().cpu(), policy.grad.cpu(), dentropy, summary

    return run


def any_order(summary: dict[str, float]) -> Any:
    """float64 sums that a GPU's atomics add up in an order of their own."""
    return pytest.approx(summary, rel=1e-12)


def evaluate_naive(case: LossCase) -> tuple[Tensor, Tensor, Tensor]:
    case = replace(case.double())
    case.policy_logprobs = case.policy_logprobs.clone().requires_grad_()
    case.entropy = case.entropy.clone().requires_grad_()
    loss = naive_loss(case)
    loss.backward()
    dentropy = torch.zeros_like(case.entropy) if case.entropy.grad is None else case.entropy.grad
    return loss.detach(), case.policy_logprobs.grad, dentropy


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(7, 0, 1, 13, 29, 5), (1, 30, 20, 0, 3, 2, 4, 1, 6, 2, 3, 5, 1, 8)])
def test_value_and_gradient_of_every_option(evaluate: Evaluate, name: str, lengths: tuple[int, ...]) -> None:
    case = random_case(OPTIONS[name], lengths)
    loss, dpolicy, dentropy, summary = evaluate(case)
    want, dpolicy64, dentropy64 = evaluate_naive(case)
    assert_not_trivial(want, 0.1)
    assert_not_trivial(dpolicy64, 0.1)
    torch.testing.assert_close(loss.double(), want, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(dpolicy.double(), dpolicy64, rtol=1e-5, atol=2e-6)
    if OPTIONS[name].entropy_weight != 0:
        assert_not_trivial(dentropy64, 0.05)
        torch.testing.assert_close(dentropy.double(), dentropy64, rtol=1e-6, atol=1e-7)
    assert 0.05 < summary["clip_fraction"] < 0.95
    if OPTIONS[name].ratio_level == "token" and name not in ("tight clamp", "everything"):
        assert summary["clip_fraction_low"] > 0.02 and summary["clip_fraction_high"] > 0.02
    if OPTIONS[name].dual_clip is not None:
        assert 0.01 < summary["dual_clip_fraction"] < 0.5
    if name in ("tight clamp", "everything"):
        assert 0.05 < summary["log_ratio_clamp_fraction"] < 0.95


def test_no_worse_than_torch(evaluate: Evaluate) -> None:
    case = random_case(GrpoLossOptions(), (101, 0, 77, 1, 300))
    loss, dpolicy, _, summary = evaluate(case)
    truth, truth_grad, _ = evaluate_naive(case)
    theirs = replace(case, policy_logprobs=case.policy_logprobs.clone().requires_grad_())
    their_loss = torch_loss(theirs)
    their_loss.backward()
    assert_no_worse_than_torch(loss, truth, their_loss, eps=1e-5)
    assert_no_worse_than_torch(dpolicy, truth_grad, theirs.policy_logprobs.grad, eps=1e-6)
    assert summary["clip_fraction_low"] > 0.05 and summary["clip_fraction_high"] > 0.05
    assert_not_trivial(truth, 1.0)


# cispo's weight is a constant to the gradient but not to the value: no finite difference shows that
@pytest.mark.parametrize("name", [name for name, options in OPTIONS.items() if options.objective == "clip"])
def test_gradcheck_in_float64(name: str) -> None:
    case = random_case(OPTIONS[name], (5, 1, 0, 9)).double()

    def f(policy: Tensor, entropy: Tensor) -> Tensor:
        return grpo_loss(**case.call(policy_logprobs=policy, entropy=entropy)).loss

    inputs = (case.policy_logprobs.requires_grad_(), case.entropy.requires_grad_())
    assert f(*inputs).dtype == torch.float64
    assert torch.autograd.gradcheck(f, inputs, eps=1e-7)


def single(
    evaluate: Evaluate, log_ratio: float, advantage: float, options: GrpoLossOptions, reference: float | None = None
) -> tuple[float, float, dict[str, float]]:
    """One trained token of weight 1."""
    case = LossCase(
        policy_logprobs=torch.tensor([-1.0]),
        behavior_logprobs=torch.tensor([-1.0 - log_ratio]),
        advantage=torch.tensor([advantage]),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.tensor([True]),
        loss_weight=torch.ones(1),
        options=options,
        reference_logprobs=None if reference is None else torch.tensor([-1.0 + reference]),
    )
    loss, grad, _, summary = evaluate(case)
    return float(loss), float(grad), summary


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad", "counted"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.5, 2.0, -2.56, 0.0, "clip_fraction_high"),
        (0.5, 2.0, -1.0, -1.0, None),
        (1.5, -2.0, 3.0, 3.0, None),
        (0.5, -2.0, 1.6, 0.0, "clip_fraction_low"),
        (4.0, -2.0, 6.0, 0.0, "dual_clip_fraction"),
        (4.0, 2.0, -2.56, 0.0, "clip_fraction_high"),
        (9.0, 0.0, 0.0, 0.0, None),
    ],
)
def test_by_hand(
    evaluate: Evaluate, ratio: float, advantage: float, loss: float, grad: float, counted: str | None
) -> None:
    got, dpolicy, summary = single(evaluate, math.log(ratio), advantage, GrpoLossOptions(dual_clip=3.0))
    assert got == pytest.approx(loss, abs=1e-5) and dpolicy == pytest.approx(grad, abs=1e-5)
    for name in ("clip_fraction_low", "clip_fraction_high", "dual_clip_fraction"):
        assert summary[name] == float(name == counted)


@pytest.mark.parametrize(
    ("ratio", "weight", "counted"),
    [
        (1.1, 1.1, None),
        (9.0, 1.28, "clip_fraction_high"),
        (0.1, 0.8, "clip_fraction_low"),
        (math.exp(200), 1.28, "both"),
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_by_hand(evaluate: Evaluate, ratio: float, weight: float, counted: str | None, advantage: float) -> None:
    loss, grad, summary = single(evaluate, math.log(ratio), advantage, GrpoLossOptions(objective="cispo"))
    assert loss == pytest.approx(weight * advantage, abs=1e-5)  # -w A logp with logp = -1
    assert grad == pytest.approx(-weight * advantage, abs=1e-5), "the gradient reaches clipped tokens"
    assert summary["clip_fraction_high"] == float(counted in ("clip_fraction_high", "both"))
    assert summary["clip_fraction_low"] == float(counted == "clip_fraction_low")
    assert summary["log_ratio_clamp_fraction"] == float(counted == "both")


@pytest.mark.parametrize("log_ratio", [-200.0, -50.0, 50.0, 200.0])
@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_stale_tokens(
    evaluate: Evaluate, log_ratio: float, advantage: float, dual_clip: float | None, level: str
) -> None:
    options = GrpoLossOptions(dual_clip=dual_clip, ratio_level=level, kl_beta=0.1)
    loss, grad, summary = single(evaluate, log_ratio, advantage, options, reference=-log_ratio)
    assert math.isfinite(loss) and math.isfinite(grad)
    assert all(math.isfinite(x) for x in summary.values())
    assert summary["log_ratio_clamp_fraction"] == 1.0
    assert grad == 0.0, "outside the clamp neither the ratio nor the KL pulls"
    kl = 0.1 * (math.exp(math.copysign(20, -log_ratio)) - math.copysign(20, -log_ratio) - 1)
    ratio = math.exp(math.copysign(20, log_ratio))
    if advantage > 0:
        pg = -min(ratio, 1.28) * advantage
    else:
        pg = max(ratio, 0.8) * 1.5
        pg = pg if dual_clip is None else min(pg, dual_clip * 1.5)
    assert loss == pytest.approx(pg + kl, rel=1e-5)
    assert summary["logprob_abs_diff_max"] == abs(log_ratio) and summary["logprob_outlier_count"] == 1


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 200.0, -200.0])
@pytest.mark.parametrize("name", OPTIONS)
def test_masked_places_do_not_matter(evaluate: Evaluate, garbage: float, name: str) -> None:
    case = random_case(OPTIONS[name])
    clean = evaluate(case)
    unused = torch.tensor([1])  # the empty rollout
    for x in (case.policy_logprobs, case.behavior_logprobs, case.entropy, case.reference_logprobs):
        x[~case.loss_mask] = garbage
    for x in (case.advantage, case.loss_weight, case.importance_weight):
        x[unused] = garbage
    poisoned = evaluate(case)
    for x, y in zip(clean[:3], poisoned[:3], strict=True):
        assert x is y is None or torch.equal(x, y)
    assert poisoned[3] == any_order(clean[3])
    assert (poisoned[1][~case.loss_mask] == 0).all()


def test_a_broken_trained_token_is_not_hidden(evaluate: Evaluate) -> None:
    case = random_case(GrpoLossOptions())
    case.policy_logprobs[case.loss_mask.nonzero()[0]] = math.nan
    assert math.isnan(float(evaluate(case)[0]))


@pytest.mark.parametrize("name", ["default", "sequence", "everything"])
def test_nothing_trained(evaluate: Evaluate, name: str) -> None:
    case = random_case(OPTIONS[name])
    case.loss_mask[:] = False
    case.policy_logprobs[:] = math.nan
    loss, dpolicy, dentropy, summary = evaluate(case)
    assert loss == 0 and (dpolicy == 0).all()
    assert dentropy is None or (dentropy == 0).all()
    assert set(summary.values()) == {0.0}


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)])
def test_no_tokens(evaluate: Evaluate, lengths: tuple[int, ...]) -> None:
    loss, dpolicy, _, summary = evaluate(random_case(OPTIONS["everything"], lengths))
    assert loss == 0 and dpolicy.shape == (0,)
    assert set(summary.values()) == {0.0}


def test_tokens_past_the_last_rollout_are_padding(evaluate: Evaluate) -> None:
    case = random_case(OPTIONS["everything"])
    want = evaluate(case)
    pad = torch.full((3,), math.nan)
    for name in ("policy_logprobs", "behavior_logprobs", "entropy", "reference_logprobs"):
        setattr(case, name, torch.cat([getattr(case, name), pad]))
    case.loss_mask = torch.cat([case.loss_mask, torch.zeros(3, dtype=torch.bool)])
    got = evaluate(case)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], torch.cat([want[1], torch.zeros(3)]))
    assert got[3] == any_order(want[3])


@pytest.mark.parametrize("module", [reference, kernels], ids=["reference", "triton"])
def test_a_mask_past_the_last_rollout_trains_nothing(module: Any, device: torch.device) -> None:
    """Only the CPU refuses such a mask; a GPU would have to synchronise to see it."""
    case = random_case(GrpoLossOptions(), (4,))
    case.loss_mask[:] = True
    case.cu_seqlens = torch.tensor([0, 3], dtype=torch.int32)
    case.policy_logprobs[3] = math.nan
    terms = module.grpo_loss_terms(**case.to(device).call())
    assert terms.dlogprob[3] == 0 and terms.stats[:, STATS.index("tokens")].sum() == 3


def test_first_update_has_ratio_one(evaluate: Evaluate) -> None:
    case = random_case(GrpoLossOptions(), spread=0.0)
    _, grad, _, summary = evaluate(case)
    assert summary["ratio_mean"] == summary["ratio_max"] == summary["ess"] == 1.0
    assert summary["clip_fraction"] == summary["behavior_kl_mean"] == 0.0
    rollout = torch.repeat_interleave(case.cu_seqlens.diff().long())
    want = -(case.advantage * case.loss_weight * case.importance_weight)[rollout] * case.loss_mask
    torch.testing.assert_close(grad, want)


def test_replayed_tokens_use_the_behavior_logprobs(evaluate: Evaluate) -> None:
    case = random_case(GrpoLossOptions(), spread=0.5)
    assert abs(evaluate(case)[3]["ratio_mean"] - 1) > 0.02


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "fixed-length"])
def test_numerator_mask_is_denominator_mask(evaluate: Evaluate, aggregation: str) -> None:
    fixed = 16 if aggregation == "fixed-length" else None
    options = GrpoLossOptions(aggregation=aggregation, fixed_length=fixed)
    case = random_case(options, (7, 0, 1, 13, 29, 5), spread=0.0)
    lengths = torch.tensor([int(case.loss_mask[s:e].sum()) for s, e in case.bounds])
    assert lengths.sum() < case.loss_mask.numel()
    case.advantage[:] = -1.0
    case.importance_weight = None
    case.loss_weight = rollout_loss_weights(lengths, int(lengths.sum()), 6, options)
    # ratio 1 and A = -1: the loss is the sum of the weights
    share = {"token-mean": 1.0, "sequence-mean": 5 / 6, "fixed-length": int(lengths.sum()) / (16 * 6)}[aggregation]
    assert float(evaluate(case)[0]) == pytest.approx(share, rel=1e-6)
    tensor_totals = rollout_loss_weights(lengths, lengths.sum(), torch.tensor(6), options)
    assert torch.equal(tensor_totals, case.loss_weight) and tensor_totals.dtype == torch.float32


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "fixed-length"])
def test_empty_denominators_give_weight_zero(aggregation: str) -> None:
    options = GrpoLossOptions(aggregation=aggregation, fixed_length=4 if aggregation == "fixed-length" else None)
    assert (rollout_loss_weights(torch.tensor([0, 0]), 0, 0, options) == 0).all()
    assert (rollout_loss_weights(torch.tensor([3, 0]), 0, torch.tensor(0), options) == 0).all()
    weights = rollout_loss_weights(torch.tensor([3, 0]), 3, 2, options)
    assert weights[0] > 0 and weights[1] == 0
    assert rollout_loss_weights(torch.tensor([], dtype=torch.int64), 3, 2, options).shape == (0,)


def test_low_precision_logprobs(evaluate: Evaluate) -> None:
    case = random_case(GrpoLossOptions())
    half = replace(case, policy_logprobs=case.policy_logprobs.bfloat16())
    same = replace(case, policy_logprobs=half.policy_logprobs.float())
    loss, grad, _, _ = evaluate(half)
    want, want_grad, _, _ = evaluate(same)
    assert loss.dtype == torch.float32 and torch.equal(loss, want)
    assert grad.dtype == torch.bfloat16 and torch.equal(grad, want_grad.bfloat16())


def test_backward_scales(evaluate: Evaluate) -> None:
    case = random_case(OPTIONS["everything"])
    _, grad, _, _ = evaluate(case)
    case.policy_logprobs.requires_grad_()
    (grpo_loss(**case.call()).loss * -3).backward()
    torch.testing.assert_close(case.policy_logprobs.grad, grad * -3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip_eps_low": 1.0}, r"^clip_eps_low must be in \[0, 1\), got 1.0"),
        ({"clip_eps_low": -0.1}, r"^clip_eps_low must"),
        ({"clip_eps_high": math.inf}, r"^clip_eps_high must be finite, at least 0, got inf"),
        ({"clip_eps_high": math.nan}, r"^clip_eps_high must"),
        ({"dual_clip": 1.0}, r"^dual_clip must be above 1 and finite, or None, got 1.0"),
        ({"dual_clip": 3.0, "objective": "cispo"}, r"^dual_clip needs objective clip .*got 3.0"),
        ({"ratio_level": "word"}, r"^ratio_level must be one of token, sequence, got 'word'"),
        ({"objective": "ppo"}, r"^objective must be one of clip, cispo, got 'ppo'"),
        ({"kl_beta": -1.0}, r"^kl_beta must"),
        ({"kl_estimator": "k4"}, r"^kl_estimator must be one of k1, k2, k3, got 'k4'"),
        ({"entropy_weight": math.nan}, r"^entropy_weight must be finite, got nan"),
        ({"log_ratio_clamp": 0.0}, r"^log_ratio_clamp must be in \(0, 80\], got 0.0"),
        ({"log_ratio_clamp": 100.0}, r"^log_ratio_clamp must"),
        ({"aggregation": "mean"}, r"^aggregation must be one of"),
        ({"aggregation": "fixed-length"}, r"^fixed_length must be at least 1 token .*got None"),
        ({"aggregation": "fixed-length", "fixed_length": 0}, r"^fixed_length must .*got 0"),
        ({"fixed_length": 10}, r"^fixed_length needs aggregation fixed-length, got 10"),
    ],
)
def test_option_errors(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GrpoLossOptions(**changes)


def test_a_backend_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=r"^backend triton cannot run grpo_loss on cpu"):
        grpo_loss_terms(**random_case(GrpoLossOptions()).call(), backend="triton")
