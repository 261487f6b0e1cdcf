"""RolloutBatch, the one packed container, and the two records that cross the engine: Prompt and Completion.

Dims: N rollouts, T tokens (prompts and responses of all N, packed without padding).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length"]
TOKEN_DTYPES = {"tokens": torch.int64, "loss_mask": torch.bool, "behavior_logprobs": torch.float32}
TOKEN_FIELDS = tuple(TOKEN_DTYPES)
# ids of any vocabulary fit int32: so they are stored, and so they travel
STORED_TOKEN_DTYPES = TOKEN_DTYPES | {"tokens": torch.int32}
ROLLOUT_DTYPES = {
    "reward": torch.float32,
    "advantage": torch.float32,
    "group_std": torch.float32,
    "importance_weight": torch.float32,
    "group_ids": torch.int64,
    "birth_step": torch.int64,
    "uid": torch.int64,
    "prompt_id": torch.int64,
}


@dataclass(frozen=True)
class Prompt:
    """One prompt of a step. `counter` counts prompts over the whole run; `prompt_id` names it in its task."""

    tokens: tuple[int, ...]
    counter: int
    prompt_id: int

    def uid(self, sample: int, group_size: int) -> int:
        """The run-wide number of one of its rollouts; it does not depend on the parallel layout."""
        return self.counter * group_size + sample


@dataclass(frozen=True)
class Completion:
    """What an engine returns for one sample: token ids as sampled, never re-tokenised text.

    `tokens` includes the final EOS when `finish_reason` is "stop". `logprobs` are those of the sampling
    distribution, one for each token; None or NaN where the engine had none.
    """

    prompt: Prompt
    uid: int
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish_reason: FinishReason
    weight_version: int

    def problem(self) -> str | None:
        """Why this completion cannot be trained on, or None."""
        if not self.tokens:
            return "has no tokens"
        if len(self.logprobs) != len(self.tokens):
            return f"has {len(self.logprobs)} log-probs for {len(self.tokens)} tokens"
        bad = [i for i, x in enumerate(self.logprobs) if x is None or not math.isfinite(x)]
        return f"has no finite log-prob at token {bad[0]}: {self.logprobs[bad[0]]}" if bad else None


@dataclass(frozen=True)
class RolloutBatch:
    """N packed rollouts. Padding is never inside; every tensor lives on one device.

    tokens [T] int64; loss_mask [T] bool, True on response tokens, final EOS included;
    behavior_logprobs [T] float32, 0 where the mask is False; cu_seqlens [N+1] int32;
    reward, advantage, group_std, importance_weight [N] float32; group_ids, birth_step, uid, prompt_id [N] int64.
    `importance_weight` multiplies a rollout's loss: the truncated weight between trainer and engine, times, for a drawn
    rollout, that of prioritized replay; 1 where none applies.
    """

    tokens: Tensor
    loss_mask: Tensor
    behavior_logprobs: Tensor
    cu_seqlens: Tensor
    reward: Tensor
    advantage: Tensor
    group_std: Tensor
    importance_weight: Tensor
    group_ids: Tensor
    birth_step: Tensor
    uid: Tensor
    prompt_id: Tensor

    def __post_init__(self) -> None:
        if self.cu_seqlens.dtype != torch.int32 or self.cu_seqlens.dim() != 1 or self.cu_seqlens.numel() == 0:
            raise ValueError(
                f"cu_seqlens must be int32 [N+1], got {self.cu_seqlens.dtype} {list(self.cu_seqlens.shape)}"
            )
        n, t = len(self), self.tokens.numel()
        for names, size in ((TOKEN_DTYPES, t), (ROLLOUT_DTYPES, n)):
            for name, dtype in names.items():
                x = getattr(self, name)
                if x.dtype != dtype or x.shape != (size,):
                    raise ValueError(f"{name} must be {dtype} [{size}], got {x.dtype} {list(x.shape)}")

    def __len__(self) -> int:
        return self.cu_seqlens.numel() - 1

    def check_bounds(self) -> None:
        """Raise ValueError unless cu_seqlens rises from 0 to T. Apart from __post_init__: on a GPU the look waits."""
        cu, t = self.cu_seqlens, self.tokens.numel()
        if int(cu[0]) != 0 or int(cu[-1]) != t or bool((cu.diff() < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to the {t} tokens, got {cu.tolist()}")

    @property
    def device(self) -> torch.device:
        return self.tokens.device

    @property
    def lengths(self) -> Tensor:
        """[N] int64, prompt and response tokens of each rollout."""
        return self.cu_seqlens.diff().long()

    @property
    def response_lengths(self) -> Tensor:
        """[N] int64, trained tokens of each rollout."""
        counts = torch.cat([self.loss_mask.new_zeros(1, dtype=torch.int64), self.loss_mask.long().cumsum(0)])
        return counts[self.cu_seqlens.long()].diff()

    @classmethod
    def from_completions(cls, completions: Sequence[Completion], rewards: Sequence[float]) -> RolloutBatch:
        """Pack completions; advantages are 0 until `advantage.with_group_advantages` sets them.

        The version of the weights that sampled a rollout is the step at which those weights were current: its birth.
        The loss mask follows from lengths alone: no token of the prompt, every token of the response.
        Raises ValueError for a completion without finite log-probs: it could never be replayed.
        """
        if len(completions) != len(rewards):
            raise ValueError(f"rewards has {len(rewards)} entries for {len(completions)} completions")
        for c in completions:
            if (why := c.problem()) is not None:
                raise ValueError(f"behavior_logprobs: the completion with uid {c.uid} {why}")
        tokens: list[int] = []
        mask: list[bool] = []
        logprobs: list[float] = []
        bounds = [0]
        for c in completions:
            prompt = c.prompt.tokens
            tokens += [*prompt, *c.tokens]
            mask += [False] * len(prompt) + [True] * len(c.tokens)
            logprobs += [0.0] * len(prompt) + [float(x) for x in c.logprobs if x is not None]
            bounds.append(len(tokens))
        zeros = torch.zeros(len(completions))
        return cls(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            loss_mask=torch.tensor(mask, dtype=torch.bool),
            behavior_logprobs=torch.tensor(logprobs, dtype=torch.float32),
            cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
            reward=torch.tensor(rewards, dtype=torch.float32).reshape(len(completions)),
            advantage=zeros,
            group_std=zeros.clone(),
            importance_weight=torch.ones(len(completions)),
            group_ids=torch.tensor([c.prompt.counter for c in completions], dtype=torch.int64),
            birth_step=torch.tensor([c.weight_version for c in completions], dtype=torch.int64),
            uid=torch.tensor([c.uid for c in completions], dtype=torch.int64),
            prompt_id=torch.tensor([c.prompt.prompt_id for c in completions], dtype=torch.int64),
        )

    @classmethod
    def empty(cls) -> RolloutBatch:
        return cls.from_completions([], [])

    @classmethod
    def cat(cls, batches: Sequence[RolloutBatch]) -> RolloutBatch:
        """All rollouts of all batches, in order."""
        if not batches:
            return cls.empty()
        merged = {
            f.name: torch.cat([getattr(b, f.name) for b in batches])
            for f in dataclasses.fields(cls)
            if f.name != "cu_seqlens"
        }
        lengths = torch.cat([b.lengths for b in batches])
        return cls(cu_seqlens=cumulative(lengths), **merged)

    def select(self, index: Tensor) -> RolloutBatch:
        """The rollouts named by a bool mask [N] or by int64 positions (repeats allowed), copied."""
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        lengths = self.lengths[index]
        starts = self.cu_seqlens.long()[index]
        bounds = cumulative(lengths)
        total = int(bounds[-1])
        # token j of the result is token (j - its bound) of its rollout
        offset = torch.repeat_interleave(starts - bounds[:-1].long(), lengths, output_size=total)
        at = torch.arange(total, device=self.device) + offset
        picked = {name: getattr(self, name)[at] for name in TOKEN_FIELDS}
        picked |= {name: getattr(self, name)[index] for name in ROLLOUT_DTYPES}
        return RolloutBatch(cu_seqlens=bounds, **picked)

    def to(self, device: torch.device | str) -> RolloutBatch:
        return RolloutBatch(**{f.name: getattr(self, f.name).to(device) for f in dataclasses.fields(self)})

    def replace(self, **changes: Tensor) -> RolloutBatch:
        return dataclasses.replace(self, **changes)


def cumulative(lengths: Tensor) -> Tensor:
    """cu_seqlens [N+1] int32 of lengths [N]; raises OverflowError past 2^31 - 1 tokens."""
    bounds = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=bounds[1:])
    if int(bounds[-1]) > torch.iinfo(torch.int32).max:
        raise OverflowError(f"cu_seqlens: {int(bounds[-1])} tokens do not fit int32")
    return bounds.to(torch.int32)
