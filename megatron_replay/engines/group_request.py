"""GroupRequest: how one prompt's group is asked of vLLM, and what its samples become."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_replay.config import SamplingConfig
from megatron_replay.rollout import Completion, Prompt


@dataclass(frozen=True)
class RawSample:
    """One sample as an engine told it: L tokens, L log-probs (None: it had none), the weight version of each span."""

    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    finish_reason: str | None
    weight_versions: tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """Why an answer is no whole group: the count that it goes in, words, and whether asking again is of no use."""

    counter: str
    words: str
    final: bool = False


@dataclass(frozen=True)
class MissingGroup:
    """A prompt whose group is not there: how often it has failed, and why the last time."""

    prompt: Prompt
    failures: int = 0
    reason: str = ""


@dataclass(frozen=True)
class GroupRequest:
    """`group_size` samples of a prompt, sampled by weights of `version`."""

    sampling: SamplingConfig
    eos_id: int
    group_size: int
    version: int
    seeded: bool = True

    def params(self, prompt: Prompt) -> dict[str, Any]:
        """vLLM's SamplingParams. Sample i is drawn with seed + i, which is how vLLM numbers them.

        Seeds follow the rollout's uid, so no two rollouts of a run share one, and a rerun has the same.
        """
        params: dict[str, Any] = {
            "n": self.group_size,
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            # 0 is off for vLLM too
            "top_k": self.sampling.top_k,
            "max_tokens": self.sampling.max_response_length,
            # the one stop is ours; ignore_eos keeps out those that the model's own files name
            "stop_token_ids": [self.eos_id],
            "ignore_eos": True,
            # of the sampled token alone
            "logprobs": 0,
            "detokenize": False,
        }
        if self.seeded:
            # 62 bits: with the number of a rollout added it stays below 2^63
            first = int.from_bytes(hashlib.sha256(str(self.sampling.seed).encode()).digest()[:8]) >> 2
            params["seed"] = first + prompt.uid(0, self.group_size)
        return params

    def problem(self, samples: Sequence[RawSample]) -> Problem | None:
        """What keeps these samples from being a whole group of the version; None: nothing does."""
        if unfinished := [s.finish_reason for s in samples if s.finish_reason not in ("stop", "length")]:
            return Problem("aborted", f"finish_reason must be stop or length, got {unfinished[0]!r}")
        if len(samples) != self.group_size:
            return Problem("server_failures", f"samples must be {self.group_size}, got {len(samples)}")
        versions = {version for s in samples for version in s.weight_versions or ("none",)}
        if versions != {str(self.version)}:
            return Problem("wrong_version", f"weight version must be {self.version}, got {', '.join(sorted(versions))}")
        limit = self.sampling.max_response_length
        if short := [len(s.tokens) for s in samples if s.finish_reason == "length" and len(s.tokens) != limit]:
            # an engine cuts at its own maximum and says nothing
            words = f"samples that do not end must have --rl-max-response-length {limit} tokens, got {min(short)}"
            return Problem("server_failures", f"{words}: is the engine's max-model-len below --seq-length?", final=True)
        return None

    def completions(self, prompt: Prompt, samples: Sequence[RawSample]) -> list[Completion]:
        """The group, in the order of the samples."""
        return [
            Completion(
                prompt=prompt,
                uid=prompt.uid(index, self.group_size),
                tokens=sample.tokens,
                logprobs=sample.logprobs,
                finish_reason="stop" if sample.tokens and sample.tokens[-1] == self.eos_id else "length",
                weight_version=self.version,
            )
            for index, sample in enumerate(samples)
        ]
