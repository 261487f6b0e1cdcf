"""BenchmarkRun: chunks, resuming, what is not judged, and whose random numbers a sample has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.evaluation.benchmark_run import MOST_SAMPLES, BenchmarkRun
from megatron_replay.evaluation.sample_record import SampleRecord
from megatron_replay.rollout import Completion, Prompt
from megatron_replay.tasks.prompts import HELDOUT_COUNTER
from tools.evaluating.benchmark import MOST_PROBLEMS, numbered

ALONE = EngineRanks(DataParallelGroup(), None, torch.device("cpu"))


@dataclass
class Answered:
    completions: list[Completion]
    engine: FakeEngine
    version: int

    def result(self, version: int) -> list[Completion]:
        assert version == self.version == self.engine.version
        return self.completions


@dataclass
class FakeEngine:
    """What it says follows from the uid alone; `lost` is left out. Like a colocated one it needs weights each time."""

    lost: int | None = None
    version: int = -1
    batches: list[list[int]] = field(default_factory=list)

    def load_weights(self, policy: object, version: int) -> None:
        assert policy == "policy"
        self.version = version

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> Answered:
        assert self.version >= 0
        self.batches.append([p.prompt_id for p in prompts])
        made = [completion(p, p.uid(i, group_size)) for p in prompts for i in range(group_size)]
        return Answered([c for c in made if c.uid != self.lost], self, self.version)


def completion(prompt: Prompt, uid: int) -> Completion:
    length = 1 + uid % 5
    reason = "length" if uid % 3 == 0 else "stop"
    return Completion(prompt, uid, (uid % 7,) * length, (0.0,) * length, reason, weight_version=4)


def reward(completions: Sequence[Completion]) -> list[float | None]:
    return [None if c.uid % 11 == 0 else math.nan if c.uid % 13 == 0 else float(c.uid % 2) for c in completions]


PROMPTS = numbered([Prompt((1, 2, i), i, prompt_id=3 * i) for i in range(10)], "x")


def run(chunk: int, engine: FakeEngine | None = None, samples: int = 4, text: bool = False) -> BenchmarkRun:
    return BenchmarkRun(
        PROMPTS, samples, chunk, engine or FakeEngine(), "policy", reward, ALONE,
        text=(lambda c: f"said {c.tokens[0]}") if text else None,
    )  # fmt: skip


def all_of(run: BenchmarkRun, done: int = 0) -> list[SampleRecord]:
    return [r for records in run.chunks(done, 4) for r in records]


def test_each_sample_of_each_problem_is_there_once_and_as_the_engine_gave_it() -> None:
    found = all_of(run(3, text=True))
    assert [(r.problem, r.sample) for r in found] == [(3 * i, j) for i in range(10) for j in range(4)]
    for r, uid in zip(found, (p.uid(j, 4) for p in PROMPTS for j in range(4)), strict=True):
        assert r.tokens == 1 + uid % 5 and r.truncated == (uid % 3 == 0) and r.text == f"said {uid % 7}"
        # neither None nor NaN becomes a 0
        assert r.reward == (None if uid % 11 == 0 or uid % 13 == 0 else uid % 2)
    assert 0 < sum(r.reward is None for r in found) < 20 and {r.reward for r in found} == {None, 0.0, 1.0}


def test_chunks_change_nothing_and_begin_at_the_same_problems() -> None:
    whole = all_of(run(10))
    for chunk in (1, 3, 4, 100):
        assert all_of(run(chunk)) == whole
        for done in range(11):
            engine = FakeEngine()
            assert all_of(run(chunk, engine), done) == whole[done * 4 :]
            # the chunk that holds the first problem left is sampled as it was, and no earlier one
            first = done - done % chunk if done < 10 else 10
            assert engine.batches == [[3 * i for i in range(10)][at : at + chunk] for at in range(first, 10, chunk)]


def test_a_chunk_comes_when_it_is_finished() -> None:
    engine = FakeEngine()
    chunks = run(4, engine).chunks(0, 4)
    assert len(next(chunks)) == 16 and len(engine.batches) == 1
    assert len(next(chunks)) == 16 and len(next(chunks)) == 8 and next(chunks, None) is None


def test_a_sample_that_does_not_come_ends_the_run() -> None:
    engine = FakeEngine(lost=PROMPTS[5].uid(2, 4))
    with pytest.raises(RuntimeError, match="the engine must return 16 samples of 4 problems, got 15"):
        all_of(run(4, engine))


def test_numbers_follow_from_name_and_place() -> None:
    plain = [Prompt((1,), 0, i) for i in range(5)]
    counters = {name: [p.counter for p in numbered(plain, name)] for name in ("x", "y", "xx", "AIME25", "AIME26")}
    everything = [c for found in counters.values() for c in found]
    # uids of training runs stay below, 62 bits are left for those of all samples
    assert len(set(everything)) == 25 and min(everything) >= HELDOUT_COUNTER
    assert max(everything) < 2 * HELDOUT_COUNTER and 2 * HELDOUT_COUNTER * MOST_SAMPLES <= 1 << 62
    for found in counters.values():
        assert found == list(range(found[0], found[0] + 5)) and found[0] % MOST_PROBLEMS == 0
    assert [p.counter for p in numbered(plain[:2], "x")] == counters["x"][:2]


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"samples must be in \[1, 8192\], got 8193"):
        run(1, samples=8193)
    with pytest.raises(ValueError, match="chunk must be at least 1 problem, got 0"):
        run(0)

    class Many(list[Prompt]):
        def __len__(self) -> int:
            return MOST_PROBLEMS + 1

    with pytest.raises(ValueError, match="it must have at most 16777216 problems, got 16777217"):
        numbered(Many(), "x")
