"""Greedy answers of an engine, and how near two sets of them are."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_replay.config import VllmConfig
from megatron_replay.engines.group_request import RawSample
from megatron_replay.engines.vllm_options import ServedModel, engine_options

NEW_TOKENS = 24
PROMPT_TOKENS = 160  # vLLM's prefix cache keeps whole blocks alone, which on a CPU have 128
MAX_MODEL_LEN = 256
PARAMS: dict[str, Any] = {
    "n": 1, "temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0, "detokenize": False
}  # fmt: skip
# heads of a size that vLLM's attention has on a CPU
ENGINE_SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
Answers = list[dict[str, Any]]  # of each prompt: tokens, logprobs


def llm_options(folder: Path, dtype: str = "float32") -> dict[str, Any]:
    """Of vLLM's LLM(), for a tiny model with the weights in its folder."""
    served = ServedModel(folder, dtype, MAX_MODEL_LEN, seed=0, device="cpu", load_format="auto")
    return engine_options(VllmConfig(max_num_seqs=16, memory_gib=0.1), served)


def prompts(vocab_size: int, count: int = 8) -> list[list[int]]:
    """Each fills a block of the prefix cache."""
    r = random.Random(1)
    return [[r.randrange(2, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def answers(groups: Sequence[Sequence[RawSample]]) -> Answers:
    return [{"tokens": list(group[0].tokens), "logprobs": list(group[0].logprobs)} for group in groups]


def check_same(got: Answers, expected: Answers, tolerance: float) -> float:
    """All tokens equal and log-probs within `tolerance`; returns how near they were."""
    equal = sum(g["tokens"] == e["tokens"] for g, e in zip(got, expected, strict=True))
    assert equal == len(expected), f"{equal} of {len(expected)} sequences are equal"
    gap = max(
        abs(a - b)
        for g, e in zip(got, expected, strict=True)
        for a, b in zip(g["logprobs"], e["logprobs"], strict=True)
    )
    assert gap <= tolerance, gap
    return gap
