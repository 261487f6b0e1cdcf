"""Draws for the emulated kernels, with the definition's answers.

Dims: C slots of a ring, N rollouts, n rollouts asked for, m <= n rollouts drawn.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_replay.ops import priority_draw as ops
from megatron_replay.ops import priority_draw_reference as reference
from megatron_replay.ops.philox import STREAM_REPLAY_DRAW
from megatron_replay.ops.priority_draw import DrawWindow
from tests.cuda_emulation.request import Array, Case

SIZES = (0, 1, 31, 32, 33, 255, 256, 257, 1023, 1024, 1025, 3000)
POISON_SLOT = -77
SEED, STEP = -(2**40) - 5, 2**32 - 3
# a key that large is the log-weight alone, so keys of different rollouts are equal
HUGE = 1e300
Kind = Callable[[Tensor], Tensor]


def window(count: int, log_weight: Tensor, *, spare: int = 5, wraps: bool = True) -> DrawWindow:
    """`log_weight` [count] in a ring of more slots. The slots outside hold what would win every draw."""
    slots = count + spare
    head = slots - count // 2 - 1 if wraps and slots else 0
    ring = DrawWindow(
        torch.full((slots,), 1e308, dtype=torch.float64), torch.zeros(slots, dtype=torch.int64), head, count
    )
    live = ring.slots()
    ring.log_weight[live] = log_weight
    ring.uid[live] = torch.randint(-(2**62), 2**62, (count,))
    return ring


def spread(count: int) -> Tensor:
    """Log-weights over many orders of magnitude, every seventh of them unusable."""
    log_weight = torch.randn(count, dtype=torch.float64) * 3
    unusable = torch.tensor([-torch.inf, torch.nan, torch.inf], dtype=torch.float64).repeat(count)
    log_weight[::7] = unusable[: len(log_weight[::7])]
    return log_weight


def priority_draw(label: str, ring: DrawWindow, n: int, *, seed: int = SEED) -> Case:
    n = min(n, ring.size)
    slots, keys = ops.priority_draw(ring, n, seed=seed, step=STEP, backend="reference")
    return _case("priority_draw", label, ring, n, seed, slots, keys)


def repeated_draw(label: str, ring: DrawWindow, n: int, *, seed: int = SEED, blocks: int = 0) -> Case:
    """blocks: the grid, for a case smaller than those that need the largest one; 0 leaves it to the launch."""
    slots, keys = ops.priority_draw(ring, n, seed=seed, step=STEP, with_replacement=True, backend="reference")
    return _case("repeated_draw", label, ring, n, seed, slots, keys, blocks)


def draw_cases() -> Iterator[Case]:
    for count in SIZES:
        for kind, log_weight in (("spread", spread(count)), ("equal", torch.zeros(count, dtype=torch.float64))):
            ring = window(count, log_weight)
            for n in sorted({0, 1, count // 2, count, count + 9}):
                yield priority_draw(f"{n} of {count}, {kind}", ring, n)
    for n in (1, 100, 1025):
        # the order by uid decides, also at the edge of the selection
        yield priority_draw(f"{n} of 2000 equal keys", window(2000, torch.full((2000,), HUGE, dtype=torch.float64)), n)
    mixed = torch.where(torch.arange(1500) % 3 == 0, HUGE, torch.randn(1500, dtype=torch.float64))
    yield priority_draw("700 of 1500, the first 500 with equal keys", window(1500, mixed), 700)
    yield priority_draw("300 of 1500, the first 500 with equal keys", window(1500, mixed), 300)
    for n in (1, 20, 63, 64):
        yield _equal_uids(n)
    for count in (1, 300):
        for bad in (-torch.inf, torch.nan, torch.inf):
            ring = window(count, torch.full((count,), bad, dtype=torch.float64))
            yield priority_draw(f"{count} with log-weight {bad}", ring, count)
            yield repeated_draw(f"{count} with log-weight {bad}", ring, 3)
    # so many that they overrun the workspace if they are collected
    none = torch.full((5000,), -torch.inf, dtype=torch.float64)
    yield priority_draw("7 of 5000 that cannot be drawn", window(5000, none), 7)
    ring = window(40, spread(40), spare=0, wraps=False)
    yield priority_draw("a full ring from slot 0", ring, 40)
    yield repeated_draw("a full ring from slot 0", ring, 40)
    for count in (0, 1, 31, 33, 256, 1025):
        for n in (1, 33):
            yield repeated_draw(f"{n} of {count}", window(count, spread(count)), n)
    yield repeated_draw("all keys equal", window(300, torch.full((300,), HUGE, dtype=torch.float64)), 5)


def few_cases() -> Iterator[Case]:
    """One of each kind, for what takes long or is done often: several blocks, runs to merge, ties, loops of a block."""
    yield priority_draw("1100 of 1500", window(1500, spread(1500)), 1100)
    mixed = torch.where(torch.arange(600) % 3 == 0, HUGE, torch.randn(600, dtype=torch.float64))
    yield priority_draw("100 of 600, the first 200 with equal keys", window(600, mixed), 100)
    yield priority_draw("40 with log-weight NaN", window(40, torch.full((40,), torch.nan, dtype=torch.float64)), 7)
    yield repeated_draw("21 of 300 on 4 blocks", window(300, spread(300)), 21, blocks=4)


def large_cases() -> Iterator[Case]:
    yield repeated_draw("more draws than the largest grid", window(3, torch.zeros(3, dtype=torch.float64)), 2100)
    ring = window(100_003, spread(100_003))
    yield priority_draw("20000 of 100003", ring, 20_000)
    yield repeated_draw("6 of 100003", ring, 6)


def log_weight_cases() -> Iterator[Case]:
    for priority, name in enumerate(("abs-advantage", "group-std", "uniform")):
        for count in (1, 257):
            advantage, group_std = torch.randn(count), torch.rand(count)
            special = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, 1e-45, 3e38])
            advantage[:6], group_std[:6] = special[:count], special[:count]
            expected = reference.log_weights(advantage, group_std, name, 0.5, 1e-6)
            numbers = (priority, count, *(struct.unpack("<q", struct.pack("<d", x))[0] for x in (0.5, 1e-6)))
            out = Array(
                torch.full((count,), torch.nan, dtype=torch.float64), check=_close_to(f"{name} {count}", expected)
            )
            yield Case(f"{name} of {count}", "log_weights", numbers, (Array(advantage), Array(group_std), out))


def _case(
    operation: str, label: str, ring: DrawWindow, n: int, seed: int, slots: Tensor, keys: Tensor, blocks: int = 0
) -> Case:
    before = torch.full((n,), POISON_SLOT)
    outputs = (
        Array(before, torch.cat([slots, before[len(slots) :]]), offset=8),
        Array(_nan(n), check=_close_to(label, torch.cat([keys, _nan(n)[len(keys) :]]))),
        Array(torch.tensor([POISON_SLOT]), torch.tensor([len(slots)]), offset=8),
    )
    return Case(label, operation, _numbers(ring, n, seed, blocks), (Array(ring.log_weight), Array(ring.uid), *outputs))


def _equal_uids(n: int) -> Case:
    """Rollouts that nothing tells apart: any of them may be drawn, each once."""
    ring = window(64, torch.zeros(64, dtype=torch.float64))
    ring.uid[:] = torch.arange(69) % 16
    live = ring.slots()
    keys = reference.draw_keys(ring.log_weight, ring.uid, seed=SEED, step=STEP)
    label = f"{n} of 64 of which four each have one uid"

    def check_slots(got: Tensor) -> None:
        assert len(got.unique()) == n and bool(torch.isin(got, live).all()), f"{label}: slots {got.tolist()}"
        _close_to(label, keys[live].sort(descending=True).values[:n])(keys[got])

    outputs = (
        Array(torch.full((n,), POISON_SLOT), check=check_slots),
        Array(_nan(n), check=_close_to(label, keys[live].sort(descending=True).values[:n])),
        Array(torch.tensor([POISON_SLOT]), torch.tensor([n])),
    )
    return Case(label, "priority_draw", _numbers(ring, n, SEED), (Array(ring.log_weight), Array(ring.uid), *outputs))


def _numbers(ring: DrawWindow, n: int, seed: int, blocks: int = 0) -> tuple[int, ...]:
    return (ring.uid.numel(), ring.head, ring.size, n, seed, STREAM_REPLAY_DRAW, STEP, blocks)


def _nan(n: int) -> Tensor:
    return torch.full((n,), torch.nan, dtype=torch.float64)


def _close_to(label: str, expected: Tensor) -> Callable[[Tensor], None]:
    """Two logarithms, each within two units in the last place."""

    def check(got: Tensor) -> None:
        assert torch.allclose(got, expected, rtol=1e-14, atol=1e-14, equal_nan=True), (
            f"{label}: numbers differ by up to {(got - expected).abs().nan_to_num(torch.inf).max()}"
        )

    return check
