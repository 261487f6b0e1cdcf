"""BenchmarkResult: what the samples of one benchmark say of a policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_replay.evaluation.bootstrap import RESAMPLES, mean_interval
from megatron_replay.evaluation.pass_at_k import avg_at_k, doubling, pass_at_k
from megatron_replay.evaluation.sample_record import SampleRecord


@dataclass(frozen=True)
class ProblemCount:
    """One problem: its samples, those with a reward, the correct ones among these; tokens and cut-offs of all."""

    problem: int
    samples: int
    judged: int
    correct: int
    tokens: int
    truncated: int


@dataclass(frozen=True)
class BenchmarkResult:
    """Records of one benchmark, `samples` for each problem.

    A sample is correct where its reward is at least `correct_at`. One without a reward is unjudged: it is counted, its
    length too, and it is neither right nor wrong. A problem without a judged sample is in no accuracy, and one with
    fewer than k of them is not in pass@k; `judged_problems` says how many are. Raises ValueError for no record, for a
    problem with another number of samples, and for one that comes twice.
    """

    records: Sequence[SampleRecord]
    samples: int
    correct_at: float = 1.0

    def __post_init__(self) -> None:
        if not self.records:
            raise ValueError("records must have at least one sample, got none")
        seen = {(r.problem, r.sample) for r in self.records}
        if len(seen) != len(self.records):
            raise ValueError(f"records must name each sample once, got {len(self.records)} of {len(seen)} samples")
        for p in self.problems:
            if p.samples != self.samples:
                raise ValueError(f"samples must be {self.samples} of problem {p.problem}, got {p.samples}")

    def correct(self, record: SampleRecord) -> bool | None:
        return None if record.reward is None else record.reward >= self.correct_at

    @cached_property
    def problems(self) -> list[ProblemCount]:
        """In the order of their first records."""
        of: dict[int, list[SampleRecord]] = {}
        for r in self.records:
            of.setdefault(r.problem, []).append(r)
        return [
            ProblemCount(
                problem,
                samples=len(rows),
                judged=sum(r.reward is not None for r in rows),
                correct=sum(bool(self.correct(r)) for r in rows),
                tokens=sum(r.tokens for r in rows),
                truncated=sum(r.truncated for r in rows),
            )
            for problem, rows in of.items()
        ]

    def accuracies(self) -> Tensor:
        """avg@k [N] float64 of the problems with a judged sample."""
        return _column(avg_at_k(p.judged, p.correct) for p in self.problems if p.judged)

    def passes(self, k: int) -> Tensor:
        """pass@k [N] float64 of the problems with at least k judged samples."""
        return _column(pass_at_k(p.judged, p.correct, k) for p in self.problems if p.judged >= k)

    def lengths(self) -> Tensor:
        """Mean tokens [N] float64 of each problem's responses."""
        return _column(p.tokens / p.samples for p in self.problems)

    def truncated(self) -> Tensor:
        """Share [N] float64 of each problem's responses that were cut off."""
        return _column(p.truncated / p.samples for p in self.problems)

    def length_of(self, correct: bool) -> float | None:
        """Mean tokens of all correct, or all incorrect, responses; None where there is none."""
        return _mean(_column(r.tokens for r in self.records if self.correct(r) is correct))

    def to_json(self, *, seed: int, resamples: int = RESAMPLES) -> dict[str, Any]:
        """Means over problems, each with its interval. Every interval starts a generator of its own from `seed`."""

        def interval(values: Tensor) -> list[float] | None:
            if not values.numel():
                return None
            return list(mean_interval(values, generator=torch.Generator().manual_seed(seed), resamples=resamples))

        ks = doubling(self.samples)
        passes = {str(k): self.passes(k) for k in ks}
        rewards = _column(r.reward for r in self.records if r.reward is not None)
        return {
            "problems": len(self.problems),
            "samples": self.samples,
            "correct_at": self.correct_at,
            "avg_at_k": _mean(self.accuracies()),
            "pass_at_k": {k: _mean(x) for k, x in passes.items()},
            "judged_problems": {k: x.numel() for k, x in passes.items()},
            "ci95": {
                "avg_at_k": interval(self.accuracies()),
                "pass_at_k": {k: interval(x) for k, x in passes.items()},
                "length_mean": interval(self.lengths()),
                "truncated_fraction": interval(self.truncated()),
            },
            "reward_mean": _mean(rewards),
            "length_mean": _mean(self.lengths()),
            "length_correct": self.length_of(True),
            "length_incorrect": self.length_of(False),
            "truncated_fraction": _mean(self.truncated()),
            "unjudged": sum(r.reward is None for r in self.records),
            "per_problem": {
                name: [getattr(p, name) for p in self.problems] for name in ("problem", "judged", "correct", "tokens")
            },
        }


def _column(values: Any) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def _mean(values: Tensor) -> float | None:
    return float(values.mean()) if values.numel() else None
