"""DrawSize: fewer replayed rollouts while their ratios have drifted. Not part of the paper's method; off by default."""

from __future__ import annotations

import math

from megatron_replay.ops.checks import require


class DrawSize:
    """n_t = round(scale_t n), with 1/16 <= scale_t <= 1 steered by the effective sample size of the last draw.

    After an update whose replayed rollouts had effective sample size ess (a fraction, 1 is on-policy):

        scale = scale * ess / floor    where ess < floor
        scale = scale * 1.1            elsewhere

    With floor 0 the scale is always 1. A rollout is drawn wherever one was asked for, so that ess stays measured.
    """

    LEAST = 1 / 16
    RECOVERY = 1.1

    def __init__(self, floor: float) -> None:
        require(0 <= floor < 1, "ess_floor", floor, "must be in [0, 1)")
        self.floor = floor
        self.scale = 1.0

    def of(self, n: int) -> int:
        """How many rollouts are drawn where n are asked for."""
        return min(n, max(1, round(self.scale * n)))

    def observe(self, ess: float | None) -> None:
        """Take in the effective sample size of the replayed rollouts of an update; None where there were none.

        One that is not finite says nothing either: the update was refused.
        """
        if self.floor == 0 or ess is None or not math.isfinite(ess):
            return
        change = ess / self.floor if ess < self.floor else self.RECOVERY
        self.scale = min(1.0, max(self.LEAST, self.scale * change))
