"""A benchmark problem: sampled tokens, their rollouts, and operands from which logits come.

Dims: T tokens, N rollouts of equal length, V vocabulary, Vp its columns on one rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from megatron_replay.ops.grpo_loss import GrpoLossOptions, grpo_loss_terms
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.grpo_stats import summarize_stats

Level = Literal["logits", "head"]
OPTIONS = GrpoLossOptions()
LOGIT_STD = 4.0  # a peaked distribution, as a trained model's: a flat one would hide errors in the softmax
OUTER_PERIOD = 5  # of so many tokens one has a ratio below the clip, and one above: the clip removes half of these
CLIP_RANGE = (0.05, 0.95)
CHUNK_ELEMENTS = 1 << 25


@dataclass(frozen=True)
class Size:
    """T tokens against V words, of which one rank of tp holds V / tp columns; H is None where logits are given."""

    T: int
    V: int
    H: int | None
    dtype: torch.dtype
    tp: int = 1

    def __post_init__(self) -> None:
        if self.T < 128 or self.T % 64:
            raise ValueError(f"tokens must be a multiple of 64, at least 128, got {self.T}")
        if self.tp < 1 or self.V % self.tp or self.V // self.tp < 2:
            raise ValueError(f"vocab_size must be a multiple of tp {self.tp}, at least twice it, got {self.V}")
        if self.H is not None and self.H < 1:
            raise ValueError(f"hidden must be at least 1, got {self.H}")

    @property
    def columns(self) -> int:
        return self.V // self.tp

    @property
    def rollout_tokens(self) -> int:
        return 512 if self.T % 512 == 0 and self.T >= 1024 else 64

    @property
    def label(self) -> str:
        hidden = "" if self.H is None else f" H={self.H}"
        return f"T={self.T} V={self.V}{hidden} {name_of(self.dtype)} tp={self.tp}"


@dataclass(frozen=True)
class Problem:
    """operands are (logits [T, Vp],) or (hidden [T, H], weight [Vp, H]); every token is trained."""

    size: Size
    operands: tuple[Tensor, ...]
    target: Tensor  # [T] int64
    inputs: GrpoLossInputs
    clip_fraction_low: float = 0.0
    clip_fraction_high: float = 0.0

    @property
    def level(self) -> Level:
        return "logits" if len(self.operands) == 1 else "head"

    @property
    def active_fraction(self) -> float:
        """Share of tokens whose gradient the clip leaves."""
        return 1 - self.clip_fraction_low - self.clip_fraction_high

    def chunks(self) -> Iterator[slice]:
        step = max(1, CHUNK_ELEMENTS // self.size.columns)
        for start in range(0, self.size.T, step):
            yield slice(start, min(start + step, self.size.T))

    def logits(self, at: slice) -> Tensor:
        """Logits of some tokens, rounded to the operands' dtype."""
        if self.level == "logits":
            return self.operands[0][at]
        hidden, weight = self.operands
        return hidden[at] @ weight.T

    def per_token(self, x: Tensor) -> Tensor:
        """[N] -> [T]"""
        return x.repeat_interleave(self.size.rollout_tokens)

    def save(self, path: Path) -> None:
        tensors = {"target": self.target, "behavior_logprobs": self.inputs.behavior_logprobs}
        tensors["advantage"] = self.inputs.advantage
        torch.save({"size": self.size, "operands": self.operands, **tensors}, path)

    @classmethod
    def load(cls, path: Path) -> Problem:
        # written by this program into a folder of its own
        saved = torch.load(path, weights_only=False)
        inputs = loss_inputs(saved["size"], saved["behavior_logprobs"], saved["advantage"])
        return cls(saved["size"], saved["operands"], saved["target"], inputs)


def make_problem(level: Level, size: Size, device: torch.device, seed: int = 1234) -> Problem:
    """Draw operands, then tokens from the distribution that they define, as an engine would.

    The log-ratios lie well inside or well outside the clip, so that rounding moves no token over it: a token that
    changes sides is a difference that no tolerance of a kernel covers.
    Raises RuntimeError where one side of the clip is hardly active, or hardly anything else.
    """
    source = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=size.dtype, device=device).normal_(generator=source)

    if level == "logits":
        operands = (normal(size.T, size.columns).mul_(LOGIT_STD),)
    else:
        assert size.H is not None
        operands = (normal(size.T, size.H), normal(size.columns, size.H).mul_(LOGIT_STD / size.H**0.5))
    rollouts = size.T // size.rollout_tokens
    advantage = 0.5 + torch.rand(rollouts, device=device, generator=source)
    advantage[1::2] *= -1
    target = torch.empty(size.T, dtype=torch.int64, device=device)
    policy = torch.empty(size.T, device=device)
    drawn = Problem(size, operands, target, loss_inputs(size, policy, advantage))
    for at in drawn.chunks():
        z = drawn.logits(at).float()
        clock = torch.empty_like(z).exponential_(generator=source)
        target[at] = (z - clock.log_()).argmax(1)
        policy[at] = z.gather(1, target[at, None])[:, 0] - z.logsumexp(1)

    u = torch.rand(size.T, device=device, generator=source)
    kind = torch.arange(size.T, device=device) % OUTER_PERIOD
    log_ratio = torch.where(kind == 0, -0.8 + 0.4 * u, torch.where(kind == 1, 0.4 + 0.4 * u, -0.1 + 0.2 * u))
    inputs = loss_inputs(size, policy - log_ratio, advantage)
    terms = grpo_loss_terms(policy, inputs, OPTIONS, backend="reference")
    summary = summarize_stats(terms.stats, terms.maxima)
    low, high = summary["clip_fraction_low"], summary["clip_fraction_high"]
    if not all(CLIP_RANGE[0] < x < CLIP_RANGE[1] for x in (low, high)):
        raise RuntimeError(f"clip fractions must lie in {CLIP_RANGE}, got {low:.3f} low and {high:.3f} high")
    return replace(drawn, inputs=inputs, clip_fraction_low=low, clip_fraction_high=high)


def loss_inputs(size: Size, behavior_logprobs: Tensor, advantage: Tensor) -> GrpoLossInputs:
    """Rollouts of equal length, side by side, averaged over tokens."""
    device, n = advantage.device, advantage.numel()
    return GrpoLossInputs(
        behavior_logprobs=behavior_logprobs,
        advantage=advantage,
        cu_seqlens=torch.arange(n + 1, dtype=torch.int32, device=device) * size.rollout_tokens,
        loss_mask=torch.ones(size.T, dtype=torch.bool, device=device),
        loss_weight=torch.full((n,), 1 / size.T, device=device),
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
