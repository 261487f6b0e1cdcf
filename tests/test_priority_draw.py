"""The draw: both implementations against exact probabilities, and against each other row for row."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_replay.ops import priority_draw_reference as reference
from megatron_replay.ops.priority_draw import DrawWindow, largest, log_weights, priority_draw

BACKENDS = ("reference", "cpp")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def window(
    weight: list[float] | Tensor, uid: Tensor | None = None, *, head: int = 0, size: int | None = None
) -> DrawWindow:
    w = torch.as_tensor(weight, dtype=torch.float64)
    return DrawWindow(
        w.log(), torch.arange(w.numel()) if uid is None else uid, head, w.numel() if size is None else size
    )


def chi_square(seen: Tensor, p: Tensor) -> float:
    """Of counts against probabilities, over the categories that can occur; the others must not have."""
    assert not bool(seen[p == 0].any())
    expected = seen.sum() * p[p > 0]
    return float(((seen[p > 0] - expected) ** 2 / expected).sum())


def limit(degrees: int) -> float:
    """Quantile 0.999 of chi-square (Wilson-Hilferty)."""
    return degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3


@each_backend
def test_weights_in_closed_form(backend: str) -> None:
    advantage, std = torch.tensor([2.0, -0.5, 0.0]), torch.tensor([0.3, 0.0, 0.1])

    def weights(priority: str, alpha: float) -> list[float]:
        return log_weights(advantage, std, priority, alpha, 1e-6, backend=backend).exp().tolist()

    assert weights("abs-advantage", 1.0) == pytest.approx([2 + 1e-6, 0.5 + 1e-6, 1e-6], rel=1e-12)
    assert weights("abs-advantage", 0.0) == [1, 1, 1]
    assert weights("group-std", 0.5) == pytest.approx([0.3, 0, 0.1], rel=1e-7)
    assert weights("uniform", 0.5) == [1, 1, 1]
    bad = torch.tensor([float("nan"), float("inf"), -float("inf")])
    assert log_weights(bad, bad, "abs-advantage", 0.5, 1e-6, backend=backend).tolist() == [-math.inf] * 3
    assert log_weights(bad, bad, "group-std", 0.5, 1e-6, backend=backend).tolist() == [-math.inf] * 3
    wide = torch.stack([advantage, std], 1)
    columns = wide[:, 0], wide[:, 1]
    for priority in ("abs-advantage", "group-std"):
        dense = log_weights(advantage, std, priority, 0.5, 1e-6, backend=backend)
        assert torch.equal(log_weights(*columns, priority, 0.5, 1e-6, backend=backend), dense)
    with pytest.raises(ValueError, match="priority must be one of .*, got 'rank'"):
        log_weights(advantage, std, "rank", 0.5, 1e-6)
    with pytest.raises(ValueError, match=r"group_std must be float32 \[3\] on cpu, got torch.float64 \[3\]"):
        log_weights(advantage, std.double(), "uniform", 0.5, 1e-6)


@each_backend
def test_a_key_depends_on_its_rollout_and_step_alone(backend: str) -> None:
    g = torch.Generator().manual_seed(0)
    weight, uid = torch.rand(100, generator=g, dtype=torch.float64), torch.arange(100)
    order = torch.randperm(100, generator=g)

    def drawn(w: Tensor, u: Tensor, seed: int = 3, step: int = 5) -> dict[int, float]:
        slots, keys = priority_draw(window(w, u), 100, seed=seed, step=step, backend=backend)
        return dict(zip(u[slots].tolist(), keys.tolist(), strict=True))

    keys = drawn(weight, uid)
    assert list(keys.values()) == sorted(keys.values(), reverse=True)
    assert drawn(weight[order], uid[order]) == keys
    for other in (drawn(weight, uid, seed=4), drawn(weight, uid, step=6)):
        assert not set(other.values()) & set(keys.values())
    # scaling all weights shifts all keys and draws the same
    scaled = drawn(weight * 8, uid)
    assert list(scaled) == list(keys) and scaled[7] - keys[7] == pytest.approx(math.log(8), rel=1e-12)


@settings(max_examples=70, deadline=None)
@given(
    st.integers(1, 700), st.integers(0, 2**32 - 1), st.integers(-(2**63), 2**63 - 1), st.data(),
    st.sampled_from(["random", "equal", "huge", "tiny", "one heavy"]), st.booleans(),
)  # fmt: skip
def test_the_compiled_draw_is_the_reference_s_row_for_row(
    slots: int, step: int, seed: int, data: st.DataObject, kind: str, with_replacement: bool
) -> None:
    size = data.draw(st.integers(0, slots))
    head = data.draw(st.integers(0, slots - 1))
    n = data.draw(st.integers(0, 2 * size + 2 if size < 100 else size // 4))
    g = torch.Generator().manual_seed(step)
    log_weight = torch.randn(slots, generator=g, dtype=torch.float64)
    if kind == "equal":
        log_weight[:] = -0.7
    elif kind in ("huge", "tiny"):
        log_weight *= {"huge": 1e305, "tiny": 1e-300}[kind]
    elif kind == "one heavy":
        log_weight[head] = 600.0
    unusable = torch.rand(slots, generator=g) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    log_weight[unusable] = torch.tensor([-math.inf, math.nan, math.inf]).repeat(slots)[: int(unusable.sum())].double()
    uid = torch.randperm(4 * slots, generator=g)[:slots] * data.draw(st.sampled_from([1, -(2**50), 2**40]))
    w = DrawWindow(log_weight, uid, head, size)
    ours, expected = (
        priority_draw(w, n, seed=seed, step=step, with_replacement=with_replacement, backend=b)
        for b in ("cpp", "reference")
    )
    assert torch.equal(ours[0], expected[0])
    assert torch.allclose(ours[1], expected[1], rtol=1e-14, atol=1e-14)
    usable = int(torch.isfinite(log_weight[w.slots()]).sum())
    assert ours[0].numel() == ((n if usable else 0) if with_replacement else min(n, usable))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_nothing(threads: int) -> None:
    w = window(torch.rand(100_003, generator=torch.Generator().manual_seed(1), dtype=torch.float64), head=70_000)
    expected = [
        priority_draw(w, 5000, seed=2, step=3, backend="cpp"),
        priority_draw(w, 40, seed=2, step=3, with_replacement=True),
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = [
            priority_draw(w, 5000, seed=2, step=3, backend="cpp"),
            priority_draw(w, 40, seed=2, step=3, with_replacement=True),
        ]
    finally:
        torch.set_num_threads(before)
    for (a, b), (c, d) in zip(expected, found, strict=True):
        assert torch.equal(a, c) and torch.equal(b, d)


@pytest.mark.parametrize(
    "weight",
    [
        [0.1, 0.5, 1.0, 2.0, 4.0, 0.0, 8.0, 16.0],
        [2.6458 if i == 0 else 0.3780 for i in range(8)],  # one correct of eight
        [0.5] * 8,
        [1e-12, 1.0, 1e12],
        [3.0],
    ],
    ids=["spread", "binary rewards", "equal", "far apart", "one"],
)
def test_a_million_draws_follow_the_weights(weight: list[float]) -> None:
    w = window(weight)
    slots, _ = priority_draw(w, 1_000_000, seed=9, step=1, with_replacement=True, backend="cpp")
    p = torch.tensor(weight, dtype=torch.float64) / sum(weight)
    likely = p > 1e-9  # with 10^6 draws the others have no law to be held to
    seen = torch.bincount(slots, minlength=len(weight))
    assert int(seen[~likely].sum()) <= 1
    degrees = max(1, int(likely.sum()) - 1)
    assert chi_square(seen[likely], p[likely] / p[likely].sum()) < limit(degrees)


def inclusion(weight: list[float], n: int) -> dict[tuple[int, ...], float]:
    """Exact probabilities of the ordered outcomes of n draws one after another without replacement."""
    out = {}
    for order in itertools.permutations([i for i, w in enumerate(weight) if w > 0], n):
        p, left = 1.0, sum(weight)
        for i in order:
            p *= weight[i] / left
            left -= weight[i]
        out[order] = p
    return out


@each_backend
@pytest.mark.parametrize(("weight", "n"), [([4.0, 2.0, 1.0, 0.5, 0.0], 2), ([1.0, 1.0, 1.0, 5.0], 3)])
def test_draws_without_replacement_are_exact_in_their_order_too(backend: str, weight: list[float], n: int) -> None:
    exact = inclusion(weight, n)
    draws = 15_000 if backend == "cpp" else 1200
    seen = dict.fromkeys(exact, 0)
    w = window(weight)
    for step in range(draws):
        seen[tuple(priority_draw(w, n, seed=1, step=step, backend=backend)[0].tolist())] += 1
    chi = chi_square(torch.tensor(list(seen.values())), torch.tensor(list(exact.values()), dtype=torch.float64))
    assert chi < limit(len(exact) - 1)


def test_each_of_more_than_2_to_the_24_rollouts_can_be_drawn() -> None:
    """torch.multinomial ends at 2^24 categories; keys with fewer bits would tie, and ties go to the smallest uid."""
    count, n = 2**24 + 2**20, 200_000
    w = DrawWindow(torch.zeros(count, dtype=torch.float64), torch.arange(count), 0, count)
    slots, keys = priority_draw(w, n, seed=3, step=1, backend="cpp")
    assert slots.unique().numel() == n and bool((keys.diff() < 0).all()), "no two keys are equal"
    parts = 64
    seen = torch.bincount(slots * parts // count, minlength=parts)
    assert chi_square(seen, torch.full((parts,), 1 / parts, dtype=torch.float64)) < limit(parts - 1)
    assert bool((slots >= 2**24).any())


@each_backend
def test_unusable_weights_are_never_drawn(backend: str) -> None:
    weight = torch.tensor([0.0, float("nan"), float("inf"), -1.0, 1e-300, 1.0], dtype=torch.float64)
    for step in range(50):
        slots, keys = priority_draw(window(weight), 6, seed=0, step=step, backend=backend)
        assert set(slots.tolist()) == {4, 5} and bool(torch.isfinite(keys).all())
    for with_replacement in (False, True):
        slots, keys = priority_draw(
            window(weight[:4]), 3, seed=0, step=0, with_replacement=with_replacement, backend=backend
        )
        assert slots.numel() == keys.numel() == 0


@each_backend
@pytest.mark.parametrize("with_replacement", [False, True])
def test_nor_beside_keys_beyond_float32(backend: str, with_replacement: bool) -> None:
    log_weight = torch.full((1000,), -1e300, dtype=torch.float64)
    log_weight[::100], log_weight[50::100] = math.nan, math.inf
    w = DrawWindow(log_weight, torch.arange(1000), 0, 1000)
    slots, keys = priority_draw(w, 5, seed=0, step=0, with_replacement=with_replacement, backend=backend)
    # all keys are equal, since the random part is lost: the smallest uids win
    assert slots.tolist() == ([1] * 5 if with_replacement else [1, 2, 3, 4, 5]) and keys.tolist() == [-1e300] * 5


@each_backend
@pytest.mark.parametrize("with_replacement", [False, True])
def test_empty_windows_and_draws(backend: str, with_replacement: bool) -> None:
    for w, n in ((window([]), 3), (window([1.0, 2.0], size=0), 3), (window([1.0, 2.0]), 0)):
        slots, keys = priority_draw(w, n, seed=0, step=0, with_replacement=with_replacement, backend=backend)
        assert slots.numel() == keys.numel() == 0
        assert (slots.dtype, keys.dtype) == (torch.int64, torch.float64)


@each_backend
def test_slots_outside_the_window_are_never_drawn(backend: str) -> None:
    w = window(torch.ones(10, dtype=torch.float64), head=8, size=4)
    assert w.slots().tolist() == [8, 9, 0, 1]
    assert set(priority_draw(w, 99, seed=0, step=0, backend=backend)[0].tolist()) == {8, 9, 0, 1}
    repeated, _ = priority_draw(w, 99, seed=0, step=0, with_replacement=True, backend=backend)
    assert set(repeated.tolist()) == {8, 9, 0, 1}


def test_a_draw_with_replacement_is_the_argmax_of_each_repeat_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    w = window([0.5, 2.0, 0.0, 1.0, 3.0], torch.tensor([40, 3, 17, 8, 25]))
    keys = [reference.draw_keys(w.log_weight, w.uid, seed=1, step=4, repeat=j) for j in range(23)]
    for block in (1, 15, 2**20):  # one draw, three draws, all at a time
        monkeypatch.setattr(reference, "BLOCK", block)
        slots, found = priority_draw(w, 23, seed=1, step=4, with_replacement=True, backend="reference")
        assert slots.tolist() == [int(k.argmax()) for k in keys] and found.tolist() == [float(k.max()) for k in keys]


def test_equal_keys_go_to_the_smaller_uid() -> None:
    keys, uid = torch.tensor([1.0, 2.0, 2.0, 1.0]), torch.tensor([9, 7, 4, 8])
    assert largest(keys, uid, 3).tolist() == [2, 1, 3]
    assert largest(keys, uid, 99).tolist() == [2, 1, 3, 0]


@each_backend
@pytest.mark.parametrize("with_replacement", [False, True])
def test_equal_keys_are_drawn_in_the_order_of_their_uids(backend: str, with_replacement: bool) -> None:
    """Beside a log-weight of 1e300 nothing is left of the random part: all keys are equal."""
    uid = torch.randperm(300, generator=torch.Generator().manual_seed(0)) - 150
    w = DrawWindow(torch.full((300,), 1e300, dtype=torch.float64), uid, 40, 270)
    slots, keys = priority_draw(w, 100, seed=0, step=0, with_replacement=with_replacement, backend=backend)
    live = uid[w.slots()].sort().values.tolist()
    assert uid[slots].tolist() == (live[:1] * 100 if with_replacement else live[:100])
    assert keys.tolist() == [1e300] * 100


@each_backend
@pytest.mark.parametrize("with_replacement", [False, True])
def test_what_lies_outside_a_window_does_not_count(backend: str, with_replacement: bool) -> None:
    """The live rollouts are in slots 4, 5, 0; beside them all can be drawn, or none."""
    for live, elsewhere, drawn in ((math.nan, 0.0, 0), (0.0, math.nan, 3)):
        log_weight = torch.full((6,), elsewhere, dtype=torch.float64)
        log_weight[[4, 5, 0]] = live
        w = DrawWindow(log_weight, torch.arange(6), 4, 3)
        slots, _ = priority_draw(w, 3, seed=0, step=0, with_replacement=with_replacement, backend=backend)
        assert slots.numel() == drawn and set(slots.tolist()) <= {4, 5, 0}


def test_an_upper_bound_with_no_room_is_still_above_the_key() -> None:
    """The compiled draw rules a rollout out by a float32 bound of its key, which must be above it by a slack alone.

    With this uid and step 1 - u = 2^-24 + 2^-54, for which the bound is the key but for roundings, and the log-weight
    is one that rounding lowers most. Sixty others have keys a little smaller, and bounds that are well above theirs.
    """
    uid, step = torch.tensor([-8185996159643109153, *range(60)]), 1307607425
    gumbel = reference.draw_keys(torch.zeros(61, dtype=torch.float64), uid, seed=0, step=step)
    assert float(gumbel[0]) == pytest.approx(24 * math.log(2), abs=1e-7)
    lowered = 1 - 2**-20 - gumbel[0].float()
    first = float(lowered) + 0.49 * 2**-20  # the float32 numbers beside 15.6 are 2^-20 apart
    assert float(torch.tensor(first, dtype=torch.float32)) == float(lowered)
    log_weight = first + gumbel[0] - 2e-8 - gumbel
    log_weight[0] = first
    w = DrawWindow(log_weight, uid, 0, 61)
    for backend in BACKENDS:
        slots, keys = priority_draw(w, 1, seed=0, step=step, backend=backend)
        assert slots.tolist() == [0] and float(keys) < 1, backend


def test_rollouts_whose_upper_bounds_stand_on_the_edge_of_a_bin_are_drawn_once() -> None:
    """The compiled draw raises a weight of x by x 1e-6, which makes 2^30 of all of these, where a bin begins."""
    log_weight = 2.0**30 - 1073 + torch.linspace(-8, 8, 100, dtype=torch.float64)
    w = DrawWindow(log_weight, torch.arange(100), 0, 100)
    for n in (1, 50, 73, 100):
        ours, expected = (priority_draw(w, n, seed=0, step=0, backend=b) for b in ("cpp", "reference"))
        assert torch.equal(ours[0], expected[0]) and ours[0].unique().numel() == n


def test_bad_arguments_are_named() -> None:
    w = window([1.0, 1.0, 1.0])
    with pytest.raises(ValueError, match="n must be at least 0, got -1"):
        priority_draw(w, -1, seed=0, step=0)
    for step in (-1, 2**32):
        with pytest.raises(ValueError, match=rf"step must be in \[0, 2\^32\), got {step}"):
            priority_draw(w, 1, seed=0, step=step)
    with pytest.raises(ValueError, match=r"uid must be torch.int64 \[3\] on cpu, contiguous, got torch.int32 \[3\]"):
        DrawWindow(w.log_weight, w.uid.int(), 0, 3)
    with pytest.raises(ValueError, match=r"log_weight must be torch.float64 \[3\].*got torch.float32 \[3\]"):
        DrawWindow(w.log_weight.float(), w.uid, 0, 3)
    with pytest.raises(ValueError, match=r"uid must be torch.int64 \[3\].*got torch.int64 \[3\].*strides \(2,\)"):
        DrawWindow(w.log_weight, torch.arange(6)[::2], 0, 3)
    for head, size in ((0, 4), (3, 1), (-1, 2), (0, -1)):
        with pytest.raises(ValueError, match=f"size and head must be within the 3 slots, got {size} and {head}"):
            DrawWindow(w.log_weight, w.uid, head, size)
