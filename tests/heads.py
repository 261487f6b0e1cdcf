"""Small LM heads with a loss on top, for the tests of linear_grpo_loss."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.ops.linear_grpo_loss import LinearGrpoLoss, linear_grpo_loss
from tests.numerics import LossCase, naive_loss, random_case, token_logprob64

OPTIONS = {
    "default": GrpoLossOptions(),
    "sequence": GrpoLossOptions(ratio_level="sequence", clip_eps_low=0.1, clip_eps_high=0.1, entropy_weight=0.1),
    "cispo": GrpoLossOptions(objective="cispo"),
    "everything": GrpoLossOptions(dual_clip=1.4, kl_beta=0.1, entropy_weight=0.2),
}
V, COLUMNS, H, TEMPERATURE = 37, 40, 12, 0.8


def head_case(
    options: GrpoLossOptions, dtype: torch.dtype = torch.float64, lengths: tuple[int, ...] = (9, 0, 1, 17, 24, 6)
):
    """hidden [T, H], weight [COLUMNS, H], target [T] and a loss case whose behavior log-probs are near the policy's."""
    case = random_case(options, lengths)
    t = sum(lengths)
    hidden, weight = torch.randn(t, H).to(dtype), (torch.randn(COLUMNS, H) * 0.6).to(dtype)
    target = torch.randint(0, V, (t,))
    policy, _ = token_logprob64(hidden.double() @ weight.double().T, target, V, TEMPERATURE)
    case.policy_logprobs = policy.to(dtype)
    case.behavior_logprobs = (policy + 0.4 * torch.randn(t)).to(torch.promote_types(dtype, torch.float32))
    case.reference_logprobs = (policy + 0.3 * torch.randn(t)).to(case.behavior_logprobs.dtype)
    return hidden, weight, target, case


def linear(hidden: Tensor, weight: Tensor, target: Tensor, case: LossCase, **changes: Any) -> LinearGrpoLoss:
    arguments = {k: v for k, v in case.call().items() if k in ("inputs", "options")}
    settings = {"vocab_size": V, "temperature": TEMPERATURE, "chunk_tokens": 10, **changes}
    return linear_grpo_loss(hidden, weight, target, **arguments, **settings)


def with_grad(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def dense_truth(hidden: Tensor, weight: Tensor, target: Tensor, case: LossCase) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, dhidden, dweight by autograd in float64, with loops."""
    h, w = with_grad(hidden.double(), weight.double())
    logprob, entropy = token_logprob64(h @ w.T, target, V, TEMPERATURE)
    loss = naive_loss(replace(case.double(), policy_logprobs=logprob, entropy=entropy))
    loss.backward()
    return loss.detach(), h.grad, w.grad


class Recorder(TorchDispatchMode):
    """The largest tensor that any operator returned, and the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_):
            self.products.append(tuple(out.shape))
        return out
