"""Baseline: another evaluation of the same problems, which this one is held against."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_replay.evaluation.accuracy_efficiency import AccuracyEfficiency
from megatron_replay.evaluation.bootstrap import difference_interval
from megatron_replay.evaluation.pass_at_k import avg_at_k

from .settings import differing

NUMBERS = ("problem", "judged", "correct", "tokens")


@dataclass(frozen=True)
class Baseline:
    """An evaluation.json. `benchmarks` are those of its benchmarks that are compared, by name."""

    path: Path
    benchmarks: Mapping[str, Mapping[str, Any]]

    @classmethod
    def load(
        cls, path: Path, identities: Mapping[str, str], settings: Mapping[str, Any], correct_at: float
    ) -> Baseline:
        """Raises ValueError that begins with --baseline for a file that is no evaluation of these benchmarks, or one
        whose samples were drawn or judged otherwise.

        `identities` maps each name to the identity of its problems; `settings` and `correct_at` are this evaluation's.
        """
        flag = f"--baseline {path}"
        try:
            evaluation = json.loads(path.read_text())
            found, other = evaluation["benchmarks"], dict(evaluation["settings"])
            benchmarks = {name: found[name] for name in identities if name in found}
            for row in benchmarks.values():
                counted = [row["per_problem"][x] for x in NUMBERS]
                if (
                    len({len(x) for x in counted}) != 1
                    or not isinstance(row["identity"], str)
                    or "correct_at" not in row
                ):
                    raise ValueError("its numbers of each problem are not whole")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{flag} is no evaluation.json ({type(error).__name__}: {error})") from error
        for name, identity in identities.items():
            if name not in benchmarks:
                raise ValueError(f"{flag} must have the benchmark {name}, got {', '.join(found) or 'none'}")
            if benchmarks[name]["identity"] != identity:
                raise ValueError(f"{flag} must be of the same problems, got others for the benchmark {name}")
            if benchmarks[name]["correct_at"] != correct_at:
                got = benchmarks[name]["correct_at"]
                raise ValueError(f"{flag} must have --correct-at {correct_at} as here, got {got} for {name}")
            for key in ("avg_at_k", "length_mean"):
                value = benchmarks[name][key]
                if not isinstance(value, float) or not 0 < value < math.inf:
                    raise ValueError(
                        f"{flag} must have {key} above 0 for an accuracy-efficiency score, got {value} for {name}"
                    )
        if words := differing(settings, other):
            raise ValueError(f"{flag} must have {words}")
        return cls(path, benchmarks)

    def compare(
        self, results: Mapping[str, Mapping[str, Any]], score: AccuracyEfficiency, *, seed: int, resamples: int
    ) -> dict[str, Any]:
        """The score of each benchmark and their mean; paired differences of accuracy and length, with intervals.

        A benchmark without one judged sample has no score.
        """
        rows = {name: self._row(name, ours, score, seed, resamples) for name, ours in results.items()}
        scores = [r["score"] for r in rows.values()]
        return {
            "baseline": str(self.path),
            "grade": "our reading of O1-Pruner, arXiv 2501.12570",
            "constants": {"alpha": score.alpha, "beta": score.beta, "gamma": score.gamma},
            "score_mean": None if None in scores else sum(scores) / len(scores),
            "benchmarks": rows,
        }

    def _row(
        self, name: str, ours: Mapping[str, Any], score: AccuracyEfficiency, seed: int, resamples: int
    ) -> dict[str, Any]:
        base = self.benchmarks[name]
        row: dict[str, Any] = {"score": None, "delta_accuracy": None, "delta_length": None}
        if ours["avg_at_k"] is not None:
            found = score.score(ours["avg_at_k"], ours["length_mean"], base["avg_at_k"], base["length_mean"])
            row = {"score": found.value, "delta_accuracy": found.delta_accuracy, "delta_length": found.delta_length}
        for key, values in (("accuracy", _accuracies), ("length", _lengths)):
            mine, theirs = values(ours), values(base)
            # a problem that one of the two could not judge has no difference
            both = torch.isfinite(mine) & torch.isfinite(theirs)
            row[f"{key}_difference"] = row[f"{key}_difference_ci95"] = None
            if bool(both.any()):
                generator = torch.Generator().manual_seed(seed)
                ends = difference_interval(mine[both], theirs[both], generator=generator, resamples=resamples)
                row[f"{key}_difference"] = float((mine[both] - theirs[both]).mean())
                row[f"{key}_difference_ci95"] = list(ends)
        return row


def _accuracies(row: Mapping[str, Any]) -> Tensor:
    """[N] float64, in the order of the problems; NaN where no sample was judged."""
    per = row["per_problem"]
    pairs = zip(per["judged"], per["correct"], strict=True)
    return torch.tensor([avg_at_k(n, c) if n else math.nan for n, c in pairs], dtype=torch.float64)


def _lengths(row: Mapping[str, Any]) -> Tensor:
    """[N] float64, mean tokens."""
    return torch.tensor(row["per_problem"]["tokens"], dtype=torch.float64) / row["samples"]
