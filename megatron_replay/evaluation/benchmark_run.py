"""BenchmarkRun: the prompts of one benchmark through an engine, chunk by chunk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_replay.engines.build import AnyEngine
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.evaluation.sample_record import SampleRecord
from megatron_replay.rollout import Completion, Prompt

# a uid is counter * samples + sample; counters stay below 2^49, and vLLM's seeds leave 62 bits to a uid
MOST_SAMPLES = 1 << 13


@dataclass(frozen=True)
class BenchmarkRun:
    """`samples` responses to each of `prompts`, in chunks of `chunk` problems; every rank of the run has the same.

    Chunk j is problems j * chunk, ..., wherever the run begins, and a sample's random numbers follow its uid: what is
    sampled is the same however often a run is stopped and goes on. `policy` is what the engine takes weights from,
    `text` gives the text of a response where it is kept.
    """

    prompts: Sequence[Prompt]
    samples: int
    chunk: int
    engine: AnyEngine
    policy: Any
    reward: Callable[[list[Completion]], Sequence[float | None]]
    ranks: EngineRanks
    text: Callable[[Completion], str] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ValueError(f"samples must be in [1, {MOST_SAMPLES}], got {self.samples}")
        if self.chunk < 1:
            raise ValueError(f"chunk must be at least 1 problem, got {self.chunk}")

    def chunks(self, done: int, version: int) -> Iterator[list[SampleRecord]]:
        """The records of the problems after the first `done`, each chunk's when it is finished, in order.

        Every rank of the run drives it to its end, and gets all records. A reward of None or NaN is None in a record.
        Raises RuntimeError where the engine does not return each sample once.
        """
        first = done - done % self.chunk if done < len(self.prompts) else done
        for start in range(first, len(self.prompts), self.chunk):
            prompts = self.prompts[start : start + self.chunk]
            # a colocated engine on a GPU has put its weights away to give the memory back
            self.engine.load_weights(self.policy, version=version)
            completions = self.engine.submit(self.ranks.data.shard(prompts), self.samples).result(version)
            records = self._whole(self._records(completions), prompts)
            yield records[max(0, done - start) * self.samples :]

    def _records(self, completions: list[Completion]) -> list[tuple[int, SampleRecord]]:
        """Each with its uid."""
        return [
            (
                c.uid,
                SampleRecord(
                    problem=c.prompt.prompt_id,
                    sample=c.uid - c.prompt.uid(0, self.samples),
                    reward=None if reward is None or not math.isfinite(reward) else float(reward),
                    tokens=len(c.tokens),
                    truncated=c.finish_reason == "length",
                    text=None if self.text is None else self.text(c),
                ),
            )
            for c, reward in zip(completions, self.reward(completions), strict=True)
        ]

    def _whole(self, mine: list[tuple[int, SampleRecord]], prompts: Sequence[Prompt]) -> list[SampleRecord]:
        """The chunk's records of all replicas, on every rank."""
        parts = [mine]
        if self.ranks.everyone is not None:
            parts = [[] for _ in range(dist.get_world_size())]
            dist.all_gather_object(parts, mine if self.ranks.leads else [], group=self.ranks.everyone)
        found = dict(pair for part in parts for pair in part)
        wanted = [p.uid(i, self.samples) for p in prompts for i in range(self.samples)]
        if sorted(found) != sorted(wanted) or sum(map(len, parts)) != len(wanted):
            raise RuntimeError(
                f"the engine must return {len(wanted)} samples of {len(prompts)} problems, got {len(found)}"
            )
        return [found[uid] for uid in wanted]
