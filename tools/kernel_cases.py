"""The launches of every Triton kernel that are worth a look: dtypes, shards of the vocabulary, options of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_replay.ops import grpo_loss_triton, token_logprob_triton
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.token_logprob import TokenLogprob

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QWEN3_WORDS = 151936
GPT2_WORDS = 50257
AGE_BUCKETS = 11


class Kernel(NamedTuple):
    """Where a kernel stands, and two sizes of a launch: bytes are counted between them, the second is compiled."""

    module: ModuleType
    function: str
    unit: str
    sizes: tuple[int, int]


KERNELS = {
    "token_logprob_forward": Kernel(token_logprob_triton, "_forward_kernel", "row", (0, 2)),
    "token_logprob_backward": Kernel(token_logprob_triton, "_backward_kernel", "row", (0, 2)),
    "grpo_loss": Kernel(grpo_loss_triton, "_rollout_kernel", "token", (100, 1101)),
    "grpo_loss_buckets": Kernel(grpo_loss_triton, "_bucket_kernel", "rollout", (30, 97)),
}


class Case(NamedTuple):
    """A way to launch one kernel: `call(size)` calls the public wrapper on `size` rows, tokens or rollouts."""

    kernel: str
    config: dict[str, Any]
    call: Callable[[int], object]


@dataclass(frozen=True)
class Shard:
    """Logits of the last of `tp` ranks."""

    case: str
    dtype: str
    tp: int
    columns: int
    stride: int

    def tensors(self, rows: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        start = (self.tp - 1) * self.columns
        logits = torch.zeros(rows, self.stride, dtype=DTYPES[self.dtype])[:, : self.columns]
        vocabulary = {"vocab_start": start, "vocab_size": start + self.columns, "temperature": 0.9}
        return logits, torch.full((rows,), start + 1), vocabulary

    def forward(self, rows: int) -> None:
        logits, target, vocabulary = self.tensors(rows)
        token_logprob_triton.token_logprob_forward(logits, target, **vocabulary)

    def backward(self, rows: int, entropy: bool, coefficient: float) -> None:
        """In place, as the fused head calls it."""
        logits, target, vocabulary = self.tensors(rows)
        result = TokenLogprob(*[torch.ones(rows)] * len(TokenLogprob._fields))
        gradient = torch.full((rows,), coefficient)
        gradients = (gradient, gradient if entropy else None)
        token_logprob_triton.token_logprob_backward(logits, target, result, *gradients, **vocabulary, out=logits)


def shards() -> Iterator[Shard]:
    for dtype, tp in (("bf16", 1), ("fp16", 1), ("fp32", 1), ("bf16", 2), ("bf16", 4), ("bf16", 8), ("bf16", 16)):
        yield Shard(f"{dtype}, TP {tp}", dtype, tp, QWEN3_WORDS // tp, QWEN3_WORDS // tp)
    yield Shard("bf16, odd columns, even stride", "bf16", 1, GPT2_WORDS, -(-GPT2_WORDS // 64) * 64)
    yield Shard("bf16, odd stride", "bf16", 1, GPT2_WORDS, GPT2_WORDS)


def _backward_case(shard: Shard, *, entropy: bool, coefficient: float = 1.0) -> Case:
    text = shard.case + ", entropy" * entropy + ", coefficient 0" * (coefficient == 0)
    config = asdict(shard) | {"case": text, "entropy": entropy, "coefficient": coefficient}
    call = partial(shard.backward, entropy=entropy, coefficient=coefficient)
    return Case("token_logprob_backward", config, call)


def logprob_cases() -> Iterator[Case]:
    for shard in shards():
        yield Case("token_logprob_forward", asdict(shard), shard.forward)
        yield _backward_case(shard, entropy=False)
        yield _backward_case(shard, entropy=True)
    yield _backward_case(next(shards()), entropy=True, coefficient=0.0)


def _loss(size: int, options: GrpoLossOptions, *, statistics: bool = True, full: bool = False, each: int = 0) -> None:
    """The loss of `size` tokens in two rollouts, or of `size` rollouts of `each` tokens; `full` gives all inputs."""
    bounds = [i * each for i in range(size + 1)] if each else [0, 5, size]
    n, tokens = len(bounds) - 1, torch.zeros(bounds[-1])
    inputs = GrpoLossInputs(
        behavior_logprobs=tokens,
        advantage=torch.ones(n),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        loss_weight=torch.ones(n),
        reference_logprobs=tokens if full else None,
        importance_weight=torch.ones(n) if full else None,
        age=torch.arange(n) % AGE_BUCKETS if full else None,
        age_buckets=AGE_BUCKETS if full else 1,
    )
    grpo_loss_triton.grpo_loss_terms(tokens, inputs, options, tokens if full else None, statistics)


def loss_cases() -> Iterator[Case]:
    default = GrpoLossOptions()
    everything = GrpoLossOptions(ratio_level="sequence", dual_clip=3.0, kl_beta=0.1, entropy_weight=0.01)
    for text, call in {
        "default": partial(_loss, options=default),
        "everything": partial(_loss, options=everything, full=True),
        "cispo": partial(_loss, options=GrpoLossOptions(objective="cispo")),
        "derivatives only": partial(_loss, options=default, statistics=False),
    }.items():
        yield Case("grpo_loss", {"case": text}, call)
    for text, full in (("one bucket", False), (f"{AGE_BUCKETS} ages", True)):
        call = partial(_loss, options=default, full=full, each=1)
        yield Case("grpo_loss_buckets", {"case": text}, call)
