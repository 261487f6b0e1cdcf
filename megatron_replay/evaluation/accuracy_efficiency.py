"""AccuracyEfficiency: accuracy and length of a run against those of a baseline, in one number (AES)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """`value` with what it was made of: the relative changes of accuracy and of length."""

    value: float
    delta_accuracy: float
    delta_length: float


@dataclass(frozen=True)
class AccuracyEfficiency:
    """The accuracy-efficiency score, our reading of O1-Pruner (Luo et al. 2025, arXiv 2501.12570):

        dAcc = (acc - base_acc) / base_acc,  dLen = (base_len - len) / base_len
        AES  = alpha dLen + beta |dAcc|   where dAcc >= 0
             = alpha dLen - gamma |dAcc|  where dAcc < 0

    Positive: better than the baseline. Lengths are mean tokens of all responses. With gamma above beta a loss of
    accuracy weighs more than an equal gain.
    """

    alpha: float = 1.0
    beta: float = 3.0
    gamma: float = 5.0

    def __post_init__(self) -> None:
        for name in ("alpha", "beta", "gamma"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")

    def score(self, accuracy: float, length: float, base_accuracy: float, base_length: float) -> Score:
        """Raises ValueError where the baseline's accuracy or length is 0: nothing is relative to that."""
        for name, value in (("base_accuracy", base_accuracy), ("base_length", base_length)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 for an accuracy-efficiency score, got {value}")
        for name, value in (("accuracy", accuracy), ("length", length)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {value}")
        gain = (accuracy - base_accuracy) / base_accuracy
        saved = (base_length - length) / base_length
        weight = self.beta if gain >= 0 else -self.gamma
        return Score(self.alpha * saved + weight * abs(gain), delta_accuracy=gain, delta_length=saved)
