"""MegatronPolicy on one rank, against transformers and autograd."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_replay.config import SamplingConfig
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.rollout import Completion, Prompt, RolloutBatch
from tests.rollouts import batch, sharing_prompts
from tests.single_rank import VOCAB, policy, random_qwen3

from megatron_replay.trainer.generation import ModelSampler  # isort: skip
from megatron_replay.trainer.optimizer import unwrap  # isort: skip
from megatron_replay.trainer.policy import MegatronPolicy  # isort: skip

LENGTHS = [(3, 4), (1, 1), (5, 2), (2, 6), (9, 12), (3, 4), (4, 1)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_qwen3(tmp_path_factory.mktemp("qwen3"))


def hf_logprobs(folder: Path, source: RolloutBatch, temperature: float = 1.0) -> torch.Tensor:
    """[T] with gradients to the transformers model, and the model."""
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(folder)
    parts = []
    for i in range(len(source)):
        ids = source.tokens[source.cu_seqlens[i] : source.cu_seqlens[i + 1]]
        z = torch.log_softmax(model(ids[None]).logits[0].double() / temperature, -1)
        parts += [z.new_zeros(1), z[:-1].gather(1, ids[1:, None]).squeeze(1)]
    return torch.where(source.loss_mask, torch.cat(parts), 0.0), model


def packed_widths(p: MegatronPolicy) -> list[int]:
    """Tokens of each pack that the model will read."""
    seen: list[int] = []
    unwrap(p.model).embedding.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].size(1)), with_kwargs=True
    )
    return seen


@pytest.mark.parametrize("tied", [True, False])
def test_logprobs_equal_transformers(tmp_path: Path, tied: bool) -> None:
    source = batch(LENGTHS)
    folder = random_qwen3(tmp_path, tied=tied)
    expected, _ = hf_logprobs(folder, source)
    got = policy(folder, bin_tokens=24).logprobs(source)
    assert (got - expected).abs().max() < 1e-5
    assert not got[~source.loss_mask].any()


@pytest.mark.parametrize(
    ("recompute", "backend", "shared"),
    [(False, "reference", False), (True, "reference", False), (False, "triton", False), (False, "reference", True)],
)
def test_update_has_the_loss_and_gradient_of_a_plain_implementation(
    folder: Path, recompute: bool, backend: str, shared: bool
) -> None:
    """Loss and gradient norm of the packed, chunked, scheduled path against dense torch on transformers."""
    source = batch(LENGTHS)
    if shared:
        source = sharing_prompts(batch([(6, n) for _, n in LENGTHS]))
    source = source.replace(birth_step=torch.tensor([7, 5, 7, 3, 7, 7, 6]), importance_weight=torch.linspace(0.3, 1, 7))
    logprobs, model = hf_logprobs(folder, source)
    # behavior near the policy, so that ratios straddle both clip bounds
    noise = 0.5 * torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(3))
    source = source.replace(behavior_logprobs=torch.where(source.loss_mask, logprobs.detach() + noise, 0.0).float())
    advantage = torch.repeat_interleave(source.advantage, source.lengths)
    weight = torch.repeat_interleave(source.importance_weight, source.lengths)
    ratio = (logprobs - source.behavior_logprobs.double()).exp()
    loss = -(weight * torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage))[source.loss_mask].mean()
    loss.backward()
    norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()

    p = policy(folder, bin_tokens=24, backend=backend, recompute_activations=recompute)
    widths = packed_widths(p)
    metrics = p.train(source, step=7)
    assert (sum(widths) < source.tokens.numel()) == shared
    assert abs(metrics["loss"] - loss.item()) < 1e-5 and abs(loss.item()) > 0.01
    assert abs(metrics["grad_norm"] / norm.item() - 1) < 1e-4
    assert metrics["train/microbatches"] >= 3
    assert 0.05 < metrics["train/clip_fraction"] < 0.95
    assert metrics["fresh/rollouts"] == 4 and metrics["replay/rollouts"] == 3
    assert metrics["replay/fraction"] == pytest.approx(3 / 7)
    assert {k for k in metrics if k.endswith("/ess") and k.startswith("age")} == {
        "age_00/ess", "age_01/ess", "age_02/ess", "age_04/ess"
    }  # fmt: skip


def test_ages_have_names_of_their_own_on_request_alone(folder: Path) -> None:
    source = batch(LENGTHS).replace(birth_step=torch.tensor([5, 7, 6, 7, 3, 4, 7]))
    by_age = policy(folder, lr=0.0)
    expected = by_age.train(source, step=7)
    assert expected["age_04/ess"] == pytest.approx(1), "one rollout is its own effective sample"
    assert expected["train/ratio_max"] == expected["replay/ratio_max"] > expected["fresh/ratio_max"] > 0
    p = policy(folder, lr=0.0)
    p.age_metrics = False
    for buckets in (2, 11):
        p.head = dataclasses.replace(p.head, age_buckets=buckets)
        metrics = p.train(source, step=7)
        assert metrics == pytest.approx({k: v for k, v in expected.items() if not k.startswith("age_")}, rel=1e-5)


def test_first_update_on_its_own_logprobs_has_ratio_one(folder: Path) -> None:
    source = batch(LENGTHS)
    p = policy(folder, lr=0.0)
    source = source.replace(behavior_logprobs=p.logprobs(source))
    for step in range(3):  # lr 0: nothing drifts
        metrics = p.train(source, step=0)
        assert abs(metrics["fresh/ratio_mean"] - 1) < 1e-5, step
        assert metrics["fresh/ratio_max"] - 1 < 1e-4
        assert metrics["train_rollout_logprob_abs_diff"] < 1e-5
        assert metrics["train_rollout_logprob_outliers"] == 0


def test_replayed_ratio_is_taken_against_birth(folder: Path) -> None:
    """After a real update, ratio = exp(log p now - log p at birth) on replayed rows, and not 1."""
    source = batch(LENGTHS)
    p = policy(folder, lr=0.05)
    source = source.replace(behavior_logprobs=p.logprobs(source))
    p.train(source, step=0)
    now = p.logprobs(source)
    expected = (now - source.behavior_logprobs)[source.loss_mask].double().exp()
    metrics = p.train(source, step=1)
    assert metrics["fresh/tokens"] == 0
    assert metrics["replay/ratio_mean"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert (expected - 1).abs().mean() > 1e-3
    assert metrics["replay/logprob_abs_diff_mean"] > 1e-3


def test_an_outlier_is_counted(folder: Path) -> None:
    source = batch(LENGTHS)
    p = policy(folder, lr=0.0)
    behavior = p.logprobs(source)
    behavior[int(source.loss_mask.nonzero()[5])] -= 4.0
    metrics = p.train(source.replace(behavior_logprobs=behavior), step=0)
    assert metrics["train_rollout_logprob_outliers"] == 1
    assert metrics["train_rollout_logprob_abs_diff_max"] == pytest.approx(4.0, abs=1e-4)


def test_the_rate_that_is_reported_is_the_one_that_is_applied(folder: Path) -> None:
    """Warm-up over 2 updates, linear decay to 0 in the fourth, which changes nothing; an empty batch counts too."""
    p = policy(folder, adam={"lr_warmup_iters": 2, "total_updates": 4})
    adam = p.optimizer.chained_optimizers[0].optimizer
    applied: list[float] = []
    adam.register_step_pre_hook(lambda *_: applied.append(adam.param_groups[0]["lr"]))
    batches = [batch(LENGTHS), RolloutBatch.empty(), batch(LENGTHS, seed=1), batch(LENGTHS, seed=2)]
    reported = []
    for step, each in enumerate(batches):
        before = [x.detach().clone() for x in unwrap(p.model).parameters()]
        reported.append(p.train(each, step)["lr"])
        same = all(torch.equal(a, b) for a, b in zip(before, unwrap(p.model).parameters(), strict=True))
        assert same == (step in (1, 3))
    assert reported == pytest.approx([5e-4, 1e-3, 5e-4, 0.0])
    assert applied == [reported[0], *reported[2:]]


def test_an_empty_batch_leaves_weights_and_optimizer(folder: Path) -> None:
    p = policy(folder)
    p.train(batch(LENGTHS), step=0)
    weights = {n: x.clone() for n, x in unwrap(p.model).named_parameters()}
    states = [x.clone() for s in p.optimizer.chained_optimizers[0].optimizer.state.values() for x in s.values()]
    metrics = p.train(RolloutBatch.empty(), step=1)
    assert metrics["update_skipped"] == 1.0 and metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0
    assert all(torch.equal(x, weights[n]) for n, x in unwrap(p.model).named_parameters())
    after = [x for s in p.optimizer.chained_optimizers[0].optimizer.state.values() for x in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(states, after, strict=True))


def test_kl_pulls_towards_the_reference_and_weights_come_back(folder: Path) -> None:
    source = batch(LENGTHS)
    p = policy(folder, GrpoLossOptions(kl_beta=0.1), lr=0.02)
    source = source.replace(behavior_logprobs=p.logprobs(source))
    first = p.train(source, step=0)
    assert first["train/kl_mean"] == pytest.approx(0.0, abs=1e-6)
    moved = p.logprobs(source)
    second = p.train(source, step=1)
    gap = (source.behavior_logprobs - moved)[source.loss_mask].double()  # log reference - log policy
    assert second["train/kl_mean"] == pytest.approx((gap.exp() - gap - 1).mean().item(), rel=1e-4)
    assert second["train/kl_mean"] > 1e-4


def test_loss_stage_never_holds_all_logits(folder: Path) -> None:
    """The largest tensor of an update does not grow to tokens x vocabulary."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else (out,):
                # the LM head itself is [48, 32] when transposed
                if isinstance(x, torch.Tensor) and x.dim() == 2 and x.size(1) == 32 and x.size(0) != 48:
                    self.rows = max(self.rows, x.size(0))
            return out

    source = batch([(2, 20)] * 20)
    p = policy(folder, bin_tokens=500)
    with Largest() as seen:
        p.train(source, step=0)
    assert 0 < seen.rows <= 32, "rows of the padded vocabulary (32 columns) alive at once; the chunk is 32"


def test_bf16_trains(folder: Path) -> None:
    source = batch(LENGTHS)
    reference, _ = hf_logprobs(folder, source)
    p = policy(folder, dtype=torch.bfloat16, lr=0.02)
    got = p.logprobs(source)
    assert got.dtype == torch.float32 and (got - reference).abs().max() < 0.3
    first = p.train(source.replace(behavior_logprobs=got), step=0)
    assert first["grad_norm"] > 0 and abs(first["fresh/ratio_mean"] - 1) < 1e-3
    assert not torch.equal(p.logprobs(source), got)


def test_a_float32_head_narrows_the_gap_between_sampler_and_trainer(folder: Path) -> None:
    """With bfloat16 weights; what is left is the rounding of the layers, which the two compute in other shapes."""
    gaps = {}
    for dtype in (None, torch.float32):
        p = policy(folder, dtype=torch.bfloat16)
        p.head = dataclasses.replace(p.head, logits_dtype=dtype)
        sampler = ModelSampler(
            unwrap(p.model), p.groups, vocab_size=VOCAB, max_sequence_length=64, batch_size=16, logits_dtype=dtype
        )
        prompts = [Prompt(tuple(range(3, 7 + i)), counter=i, prompt_id=i) for i in range(8)]
        sampling = SamplingConfig(max_response_length=12, seed=3)
        drawn = sampler([x.tokens for x in prompts], list(range(8)), sampling, eos_id=1)
        done = [
            Completion(x, i, tuple(tokens), tuple(logprobs), "length", 0)
            for i, (x, (tokens, logprobs)) in enumerate(zip(prompts, drawn, strict=True))
        ]
        rollouts = RolloutBatch.from_completions(done, [0.0] * 8)
        gaps[dtype] = float((p.logprobs(rollouts) - rollouts.behavior_logprobs).abs().mean())
    assert 0 < gaps[torch.float32] < gaps[None]
