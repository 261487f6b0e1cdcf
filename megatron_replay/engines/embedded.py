"""The embedded engine: rollouts sampled on the training model itself, so its weights are always the policy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_replay.config import SamplingConfig
from megatron_replay.rollout import Completion, Prompt

Sampler = Callable[[Sequence[Sequence[int]], Sequence[int], SamplingConfig, int], list[tuple[list[int], list[float]]]]


@dataclass(frozen=True)
class Sampled:
    """Completions that are there already."""

    completions: list[Completion]

    def result(self, version: int) -> list[Completion]:
        return self.completions


class EmbeddedEngine:
    """Engine over a sampler that shares the policy's weights (for Megatron: trainer.generation.ModelSampler)."""

    def __init__(self, sampler: Sampler, sampling: SamplingConfig, eos_id: int) -> None:
        self.sampler = sampler
        self.sampling = sampling
        self.eos_id = eos_id
        self.weight_version = -1

    def load_weights(self, policy: object, version: int) -> None:
        """Nothing moves: the sampler reads the policy's own parameters. The version tags what follows."""
        self.weight_version = version

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> Sampled:
        """Nothing is left to wait for: the sampler needs the processes that train."""
        return Sampled(self.generate(prompts, group_size))

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing was started."""

    def generate(self, prompts: Sequence[Prompt], group_size: int) -> list[Completion]:
        """`group_size` completions of each prompt, group by group."""
        asked = [(p, p.uid(i, group_size)) for p in prompts for i in range(group_size)]
        drawn = self.sampler([p.tokens for p, _ in asked], [uid for _, uid in asked], self.sampling, self.eos_id)
        return [
            Completion(
                prompt=prompt,
                uid=uid,
                tokens=tuple(tokens),
                logprobs=tuple(logprobs),
                finish_reason="stop" if tokens and tokens[-1] == self.eos_id else "length",
                weight_version=self.weight_version,
            )
            for (prompt, uid), (tokens, logprobs) in zip(asked, drawn, strict=True)
        ]
