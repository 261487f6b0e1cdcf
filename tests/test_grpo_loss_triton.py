"""What only the kernel can get wrong: blocks, memory, order, derivatives alone. The rest: test_grpo_loss.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_replay.ops import grpo_loss_reference as reference
from megatron_replay.ops import grpo_loss_triton as kernels
from megatron_replay.ops.grpo_loss import GrpoLossOptions, GrpoLossTerms
from megatron_replay.ops.grpo_stats import STATS
from megatron_replay.ops.launch import LaunchConfig, overridden
from tests.numerics import LossCase, assert_not_trivial, random_case

OPTIONS = {
    "default": GrpoLossOptions(),
    "sequence": GrpoLossOptions(ratio_level="sequence", clip_eps_low=0.05, clip_eps_high=0.05, kl_beta=0.1),
    "cispo": GrpoLossOptions(objective="cispo", entropy_weight=0.1),
    "everything": GrpoLossOptions(dual_clip=1.4, kl_beta=0.1, entropy_weight=0.1, log_ratio_clamp=0.9),
}
# empty rollouts at both ends and side by side, one-token rollouts, rollouts around the size of a block
LENGTHS = (0, 31, 1, 32, 0, 0, 33, 200, 1, 64, 0)


def run(module: object, case: LossCase, device: torch.device, statistics: bool = True) -> GrpoLossTerms:
    call = case.to(device).call()
    return module.grpo_loss_terms(call["policy_logprobs"], call["inputs"], case.options, call["entropy"], statistics)


def precision(device: torch.device) -> float:
    """How many times looser than numpy a device's exp is: a GPU's exp2 is approximate, as is its argument x log2(e)."""
    return 1.0 if device.type == "cpu" else 5.0


def assert_terms_close(got: GrpoLossTerms, want: GrpoLossTerms, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    """`want` in float64."""
    rtol *= precision(got.dlogprob.device)
    for name, x, y in zip(GrpoLossTerms._fields, got, want, strict=True):
        assert (x is None) == (y is None), name
        if x is not None:
            torch.testing.assert_close(
                x.cpu().double(), y.cpu().double(), rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("config", [LaunchConfig(1, 1), LaunchConfig(4, 4)])
@pytest.mark.usefixtures("poisoned_memory")
def test_every_column_against_float64(name: str, config: LaunchConfig, device: torch.device) -> None:
    case = random_case(OPTIONS[name], LENGTHS)
    case.age = torch.tensor([9, 0, 1, -3, 5, 2, 1, 0, 2, 7, 1])
    with overridden("grpo_loss", config):
        got = run(kernels, case, device)
    want = run(reference, case.double(), torch.device("cpu"))
    assert_terms_close(got, want)
    assert_not_trivial(want.dlogprob, 0.1)
    clipped = want.stats[:, STATS.index("clipped_low")] + want.stats[:, STATS.index("clipped_high")]
    assert 0.05 < float(clipped.sum() / want.stats[:, STATS.index("tokens")].sum()) < 0.95
    assert (want.stats[:, STATS.index("tokens")] > 0).all(), "every age bucket is in use"


@pytest.mark.parametrize("name", ["default", "sequence"])
def test_65537_tokens(name: str, device: torch.device) -> None:
    case = random_case(OPTIONS[name], (65_537 - 12_000, 1, 0, 11_999), spread=0.3)
    got = run(kernels, case, device)
    want = run(reference, case.double(), torch.device("cpu"))
    assert case.loss_mask.numel() == 65_537
    assert_terms_close(got, want, rtol=2e-6)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.usefixtures("poisoned_memory")
def test_derivatives_alone(name: str, device: torch.device) -> None:
    case = random_case(OPTIONS[name], LENGTHS)
    whole, alone = run(kernels, case, device), run(kernels, case, device, statistics=False)
    assert torch.equal(whole.dlogprob, alone.dlogprob)
    assert (whole.dentropy is None) == (alone.dentropy is None)
    assert whole.dentropy is None or torch.equal(whole.dentropy, alone.dentropy)
    assert alone.loss is alone.stats is alone.maxima is None
    same = run(reference, case, device, statistics=False)
    assert same.loss is same.stats is same.maxima is None
    torch.testing.assert_close(alone.dlogprob, same.dlogprob, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("poisoned_memory")
def test_two_runs_are_equal_to_the_bit(device: torch.device) -> None:
    case = random_case(OPTIONS["everything"], LENGTHS)
    for x, y in zip(run(kernels, case, device), run(kernels, case, device), strict=True):
        assert torch.equal(x, y)


@pytest.mark.usefixtures("poisoned_memory")
def test_the_order_of_rollouts_moves_rows_and_nothing_else(device: torch.device) -> None:
    """A rollout's derivative does not depend on what is packed beside it."""
    case = random_case(OPTIONS["sequence"], (40, 7))
    alone = []
    for i, (start, end) in enumerate(case.bounds):
        part = {
            k: v[start:end] if v.shape == case.loss_mask.shape else v[i : i + 1]
            for k, v in case.arguments().items()
            if isinstance(v, torch.Tensor)
        }
        part["cu_seqlens"] = torch.tensor([0, end - start], dtype=torch.int32)
        alone.append(run(kernels, replace(case, **part), device).dlogprob)
    assert torch.equal(run(kernels, case, device).dlogprob, torch.cat(alone))


@pytest.mark.parametrize("log_ratio", [0.0, 1e-4, -1e-4, 1e-2, 0.3, -0.3, 0.499, 0.501, -0.501, 3.0, -20.0, 20.0])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_near_and_far_from_zero(log_ratio: float, estimator: str, device: torch.device) -> None:
    """k3 = exp(u) - u - 1 and its derivative keep their digits where exp(u) - 1 would cancel."""
    options = GrpoLossOptions(kl_beta=1.0, kl_estimator=estimator)
    case = LossCase(
        policy_logprobs=torch.zeros(1),
        behavior_logprobs=torch.tensor([log_ratio]),
        advantage=torch.zeros(1),
        cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
        loss_mask=torch.tensor([True]),
        loss_weight=torch.ones(1),
        options=options,
        reference_logprobs=torch.tensor([log_ratio]),
    )
    got = run(kernels, case, device)
    u = float(torch.tensor(log_ratio))
    k3, exp_minus_1 = math.expm1(u) - u, math.expm1(u)
    if abs(u) < 1e-3:
        k3 = u * u / 2 * (1 + u / 3)
    value = {"k1": -u, "k2": u * u / 2, "k3": k3}[estimator]
    slope = {"k1": 1.0, "k2": -u, "k3": -exp_minus_1}[estimator]
    rel = 1e-6 * precision(device)
    assert float(got.loss) == pytest.approx(value, rel=rel, abs=1e-30)
    assert float(got.dlogprob[0]) == pytest.approx(slope, rel=rel, abs=1e-30)


def test_low_precision_inputs(device: torch.device) -> None:
    case = random_case(OPTIONS["everything"])
    half = {
        k: v.bfloat16()
        for k, v in case.arguments().items()
        if isinstance(v, torch.Tensor) and v.is_floating_point() and k != "cu_seqlens"
    }
    widened = replace(case, **{k: v.float() for k, v in half.items()})
    for x, y in zip(run(kernels, replace(case, **half), device), run(kernels, widened, device), strict=True):
        assert torch.equal(x, y)


def test_refuses_float64(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^policy_logprobs must be at most float32 .*got torch.float64"):
        run(kernels, random_case(OPTIONS["default"]).double(), device)
