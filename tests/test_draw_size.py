from __future__ import annotations

import math

import pytest

from megatron_replay.draw_size import DrawSize


def test_off_it_changes_nothing() -> None:
    size = DrawSize(0.0)
    for ess in (0.01, 0.9, None):
        size.observe(ess)
    assert [size.of(n) for n in (0, 1, 7, 1000)] == [0, 1, 7, 1000] and size.scale == 1


def test_it_shrinks_in_proportion_below_the_floor_and_recovers_above() -> None:
    size = DrawSize(0.8)
    size.observe(0.4)
    assert size.scale == 0.5 and size.of(100) == 50
    size.observe(None)
    assert size.scale == 0.5, "a step without replay says nothing"
    size.observe(0.8)
    assert size.scale == pytest.approx(0.55)
    for _ in range(20):
        size.observe(0.9)
    assert size.scale == 1


def test_it_never_ends_the_measurement() -> None:
    size = DrawSize(0.5)
    size.observe(0.0)
    for ess in (math.nan, math.inf, 0.0):
        size.observe(ess)
        assert size.scale == 1 / 16, "an update that was refused says nothing"
    assert size.scale == 1 / 16 and size.of(3) == 1 and size.of(0) == 0 and size.of(160) == 10


def test_a_bad_floor_is_named() -> None:
    for floor in (-0.1, 1.0):
        with pytest.raises(ValueError, match=rf"ess_floor must be in \[0, 1\), got {floor}"):
            DrawSize(floor)
