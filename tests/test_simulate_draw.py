"""tools/simulate_draw.py: every form finds the winners of one machine, and its bytes are those of a count by hand."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_replay.global_draw import first_round
from megatron_replay.ops.priority_draw_reference import draw_keys
from tests.launch import ROOT
from tools.simulation.exchange import (
    Collective,
    Exchange,
    SimulatedGroup,
    capped,
    capped_then_rest,
    fallback_probability,
    forms,
)
from tools.simulation.measure import Draw, balance
from tools.simulation.network import ALGORITHMS, Algorithm, Link, cost, total
from tools.simulation.stored import LAYOUTS, LengthLaw, Stored, owners, shards

LINK = Link(alpha=1.0, bandwidth=8.0)
LAW = LengthLaw(median=100.0, sigma=1.0, longest=1000)


def held(keys: list[float], owner: list[int], ranks: int, uid: list[int] | None = None) -> list[Tensor]:
    ids = torch.arange(len(keys)) if uid is None else torch.tensor(uid, dtype=torch.int64)
    rank = torch.tensor(owner, dtype=torch.int64)
    return shards(torch.tensor(keys, dtype=torch.float64), ids, torch.ones_like(ids), rank, ranks)


def best(keys: list[float], uid: list[int], n: int) -> list[int]:
    """The definition: finite keys, the largest first, the smaller uid first among equal ones."""
    live = sorted((-k, u) for k, u in zip(keys, uid, strict=True) if math.isfinite(k))
    return [u for _, u in live[:n]]


@contextmanager
def first_cap(k: int) -> Iterator[None]:
    """k rows in the first round, in the product and in the simulated form."""

    def fixed(n: int, ranks: int) -> int:
        return min(n, k)

    with patch("megatron_replay.global_draw.first_round", fixed), patch("tools.simulation.exchange.first_round", fixed):
        yield


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[float], list[int], list[int], int, int]:
    """(keys, uid, owner, ranks, n): few or no rollouts, empty shards, equal keys, weights that cannot be used."""
    ranks, count = draw(st.integers(1, 6)), draw(st.integers(0, 40))
    uid = draw(st.lists(st.integers(0, 2**40), min_size=count, max_size=count, unique=True))
    owner = draw(st.lists(st.integers(0, ranks - 1), min_size=count, max_size=count))
    if draw(st.booleans()):
        # equal keys everywhere, which real ones never are
        keys = draw(st.lists(st.sampled_from([-math.inf, -1.0, 0.5, 2.0]), min_size=count, max_size=count))
    else:
        log_weight = st.one_of(st.floats(-20, 20), st.sampled_from([-math.inf, math.nan, math.inf]))
        drawn = draw(st.lists(log_weight, min_size=count, max_size=count))
        tensors = torch.tensor(drawn, dtype=torch.float64), torch.tensor(uid, dtype=torch.int64)
        keys = draw_keys(*tensors, seed=draw(st.integers(0, 9)), step=3).tolist()
    return keys, uid, owner, ranks, draw(st.integers(1, 50))


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(1, 4), st.integers(1, 9))
def test_every_form_finds_the_winners_of_one_machine(problem: tuple[Any, ...], k: int, bins: int) -> None:
    keys, uid, owner, ranks, n = problem
    parts, expected = held(keys, owner, ranks, uid), best(keys, uid, n)
    found = {name: form(parts, n) for name, form in forms(bins).items()}
    with first_cap(k):
        found |= {"small cap": capped(parts, n), "small cap, then rest": capped_then_rest(parts, n)}
    for name, exchange in found.items():
        assert exchange.uids.tolist() == expected, name
    assert found["small cap, then rest"].rounds <= 2
    assert found["small cap"].rounds <= 1 + math.ceil(math.log2(n / min(n, k)))
    assert (ranks == 1) == (not found["full"].collectives)


def test_an_equal_key_with_a_smaller_uid_is_not_lost() -> None:
    """Rank 0 sends uid 0 and holds uid 1 back; uid 9 of rank 1 has the same key and must not take its place."""
    parts = held([1.0, 1.0, 1.0], [0, 0, 1], 2, uid=[0, 1, 9])
    for form in (capped, capped_then_rest):
        with first_cap(1):
            exchange = form(parts, 2)
        assert exchange.uids.tolist() == [0, 1] and exchange.rounds == 2


def test_a_message_that_a_shard_would_not_give_is_refused() -> None:
    """The other ranks' messages are built here: they must be what the product sends."""
    group = SimulatedGroup(held([4.0, 3.0], [0, 1], 2), 2, Exchange(2))
    message = group.gather(1)[0]
    assert group.all_gather(message).shape == (2, 2, 3)
    message[0, 2] = 1
    with pytest.raises(RuntimeError, match=r"^the product's message is not a header \(candidates, 0, 0\) and rows"):
        group.all_gather(message)


def test_a_second_round_comes_where_a_rank_won_with_all_it_sent() -> None:
    with first_cap(2):
        one = capped(held([4.0, 1.0, 0.9, 3.0, 2.0, 0.5], [0, 0, 0, 1, 1, 1], 2), 2)
        two = capped(held([4.0, 3.5, 3.0, 1.0, 0.5, 0.1], [0, 0, 0, 1, 1, 1], 2), 3)
    assert (one.rounds, one.uids.tolist()) == (1, [0, 3])
    assert (two.rounds, two.uids.tolist()) == (2, [0, 1, 2])


def test_the_rounds_of_the_cap_are_taken_when_one_rank_holds_all_winners() -> None:
    stored = Stored.sample(2000, 0.5, 0.5, LAW, np.random.default_rng(0))
    keys, n, ranks = stored.keys(seed=0, step=0), 512, 32
    rounds = {}
    for layout in LAYOUTS:
        owner = owners(stored, keys, n, ranks, layout)
        exchanges = {name: f(shards(keys, stored.uid, stored.length, owner, ranks), n) for name, f in forms().items()}
        rounds[layout] = exchanges["capped"].rounds
        assert exchanges["capped, then rest"].rounds == min(2, rounds[layout])
    # k: 16 + 16 + 8 = 40, 80, 160, 320, 512
    assert first_round(n, ranks) == 40
    assert rounds["even"] == rounds["groups"] == 1 and rounds["one-rank"] == 5


def test_bytes_by_hand() -> None:
    """Three ranks, two drawn; rank 0 holds keys 4, 3, 2, rank 1 holds 1, rank 2 nothing. At first one row each."""
    parts = held([4.0, 3.0, 2.0, 1.0], [0, 0, 0, 1], 3)
    with first_cap(1):
        found = {name: form(parts, 2) for name, form in forms(bins=3).items()}
    costs = {name: total(x.collectives, 3, "ring", LINK) for name, x in found.items()}
    blocks = {name: [c.blocks.tolist() for c in x.collectives] for name, x in found.items()}
    moved = {name: (c.sent.tolist(), c.received.tolist()) for name, c in costs.items()}
    # a header and two rows of 24 bytes from each rank
    assert (blocks["full"], moved["full"]) == ([[72] * 3], ([144] * 3, [144] * 3))
    # a header and one row, then a header and two
    assert (blocks["capped"], moved["capped"]) == ([[48] * 3, [72] * 3], ([240] * 3, [240] * 3))
    # a header and one row; the counts; rank 0 has one more row above 1, the second largest key received
    assert blocks["capped, then rest"] == [[48] * 3, [8] * 3, [24, 0, 0]]
    assert moved["capped, then rest"] == ([112 + 24, 112 + 24, 112], [112, 112 + 24, 112 + 24])
    # range, three bins [1, 2), [2, 3), [3, 4] of which the last holds two keys, counts, two rows of rank 0;
    # of the all-reduces a rank passes four messages of ceil(16 / 3) and of 24 / 3 bytes
    assert blocks["histogram"] == [[16] * 3, [24] * 3, [8] * 3, [48, 0, 0]]
    before = 4 * 6 + 4 * 8 + 16
    assert moved["histogram"] == ([before + 48, before + 48, before], [before, before + 48, before + 48])
    assert {name: (x.rounds, x.candidates) for name, x in found.items()} == {
        "full": (1, 3),
        "capped": (2, 2 + 3),
        "histogram": (1, 2),
        "capped, then rest": (2, 2 + 1),
    }


def move_blocks(blocks: list[int], algorithm: Algorithm) -> tuple[list[int], list[int], float]:
    """An all-gather message by message: (bytes sent, received, seconds but for the ring's, whose links overlap)."""
    ranks = len(blocks)
    has = [{r} for r in range(ranks)]
    sent, received, seconds = [0] * ranks, [0] * ranks, 0.0
    near = [2**s for s in range(math.ceil(math.log2(ranks)))]
    if algorithm == "ring":
        steps = [[(r, (r + 1) % ranks, {(r - s) % ranks}) for r in range(ranks)] for s in range(ranks - 1)]
    elif algorithm == "doubling":
        steps = [
            [(r, (r - d) % ranks, {(r + i) % ranks for i in range(min(d, ranks - d))}) for r in range(ranks)]
            for d in near
        ]
    else:
        up = [[(r, r - d, set(range(r, min(r + d, ranks)))) for r in range(d, ranks, 2 * d)] for d in near]
        steps = up + [[(r - d, r, set(range(ranks))) for r in range(d, ranks, 2 * d)] for d in reversed(near)]
    for step in steps:
        sizes = []
        for source, target, what in step:
            assert what <= has[source], "a rank sends what it has"
            sizes.append(sum(blocks[i] for i in what))
            sent[source] += sizes[-1]
            received[target] += sizes[-1]
        for _, target, what in step:
            has[target] = has[target] | what
        seconds += LINK.alpha + max(sizes) / LINK.bandwidth
    assert all(x == set(range(ranks)) for x in has)
    return sent, received, seconds


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 13])
def test_an_all_gather_costs_what_its_messages_cost(algorithm: Algorithm, ranks: int) -> None:
    for blocks in ([24] * ranks, [8 * (i % 3) * i for i in range(ranks)]):
        found = cost(Collective("all-gather", np.array(blocks)), algorithm, LINK)
        sent, received, seconds = move_blocks(blocks, algorithm)
        assert (found.sent.tolist(), found.received.tolist()) == (sent, received)
        # a ring of equal blocks has nothing to overlap
        if algorithm != "ring" or len(set(blocks)) == 1:
            assert found.seconds == pytest.approx(seconds)
        else:
            assert found.seconds == pytest.approx(ranks - 1 + max(sent) / LINK.bandwidth)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "steps", "moved"),
    [
        # 4 messages of ceil(64 / 3)
        ("ring", 3, 4, [88] * 3),
        # rank 0 has three children, 1, 2 and 4; the leaf 1 has a parent alone
        ("tree", 5, 6, [192, 64, 128, 64, 64]),
        ("doubling", 4, 2, [128] * 4),
        # rank 4 hands its vector to rank 0 and gets the sum back
        ("doubling", 5, 4, [192, 128, 128, 128, 64]),
    ],
)
def test_an_all_reduce_by_hand(algorithm: Algorithm, ranks: int, steps: int, moved: list[int]) -> None:
    found = cost(Collective("all-reduce", np.full(ranks, 64)), algorithm, LINK)
    message = 22 if algorithm == "ring" else 64
    assert (found.steps, found.sent.tolist(), found.received.tolist()) == (steps, moved, moved)
    assert found.seconds == pytest.approx(steps * (1.0 + message / 8))


def test_how_often_the_first_round_falls_short() -> None:
    # two coins of four throws, three or four of a kind: 2 x 5 / 16
    assert fallback_probability(4, 2, 3) == pytest.approx(0.625)
    assert fallback_probability(4, 2, 4) == 0.0


def test_layouts() -> None:
    stored = Stored.sample(64, 0.5, 0.5, LAW, np.random.default_rng(0))
    keys = stored.keys(seed=1, step=0)
    owner = {layout: owners(stored, keys, 10, 4, layout) for layout in LAYOUTS}
    assert torch.equal(owner["even"], stored.uid % 4)
    assert all(len(set(x.tolist())) == 1 for x in owner["groups"].view(8, 8))
    heaviest = stored.log_weight[owner["skewed"] == 0]
    assert len(heaviest) == 16 and heaviest.min() >= stored.log_weight[owner["skewed"] > 0].max()
    assert bool((owner["one-rank"][keys.argsort(descending=True)[:10]] == 0).all())
    with pytest.raises(ValueError, match=r"owner must be in \[0, 4\), got 0 to 4"):
        shards(keys, stored.uid, stored.length, owner["even"] * 4 // 3, 4)


def test_lengths_have_the_median_and_the_bounds() -> None:
    lengths = LAW.sample(40001, np.random.default_rng(0))
    assert len(lengths) == 40001 and int(lengths.min()) >= 1 and int(lengths.max()) == 1000
    assert float(lengths.double().median()) == pytest.approx(100, rel=0.03)
    z = lengths[lengths < 1000].double().log()
    assert float(z.std()) == pytest.approx(1.0, rel=0.05)


def test_the_balance_and_its_bytes_by_hand() -> None:
    """Loads 10, 0, 0, winners of 6, 4, 2 on rank 0, which is full: 6 goes to rank 1, 4 and 2 to rank 2."""
    lengths, owner, fresh = torch.tensor([2, 6, 4]), torch.zeros(3, dtype=torch.int64), torch.tensor([10, 0, 0])
    stored = Stored(torch.zeros(3), torch.arange(3), lengths)
    rows = balance(Draw(stored, owner, torch.arange(3), {}), fresh, 3)
    assert rows["none"]["max_over_mean"] == pytest.approx(22 / (22 / 3)) and rows["none"]["moved_bytes"] == 0
    moved = rows["owner first"]
    assert moved["max_over_mean"] == moved["bound"] == pytest.approx(10 / (22 / 3))
    # id, mask and log-prob are 9 bytes a token; four floats and four integers are 48 bytes a rollout
    assert (moved["moved_rollouts"], moved["moved_bytes"]) == (3, 12 * 9 + 3 * 48)
    assert (moved["sent_bytes"], moved["received_bytes"]) == (12 * 9 + 3 * 48, 6 * 9 + 2 * 48)
    level = balance(Draw(stored, owner, torch.arange(3), {}), torch.tensor([0, 9, 9]), 3)["owner first"]
    assert (level["bound"], level["max_over_mean"]) == (1.0, 11 / 10)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as python starts it: its own folder comes first."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("simulate_draw")


SMALL = ("--ranks", "1", "5", "--rollouts", "300", "--drawn", "40", "--seeds", "2", "--shards", *LAYOUTS)


def test_a_run_writes_its_table_its_numbers_and_its_picture(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = tmp_path / "draw.json", tmp_path / "draw.png"
    assert tool.main([*SMALL, "--json", str(files[0]), "--picture", str(files[1])]) == 0
    data = json.loads(files[0].read_text())
    assert len(data["exchange"]) == 2 * 4 * len(LAYOUTS) and len(data["balance"]) == 2 * 2 * len(LAYOUTS)
    assert data["flags"]["latency_us"] == tool.ALPHA_US
    row = next(r for r in data["exchange"] if (r["ranks"], r["shards"], r["form"]) == (5, "even", "full"))
    assert row["ring_received_bytes"] == 4 * 41 * 24 and row["rounds"] == {"1": 2}
    assert files[1].read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "ranks 5, rollouts 300, drawn 40, shards one-rank: all forms find the winners of one machine" in out
    assert "capped, then rest" in out and "owner first" in out


def test_a_form_that_finds_other_winners_is_named(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = importlib.import_module("simulation.measure")
    right = module.forms

    def wrong(bins: int) -> dict[str, Any]:
        return right(bins) | {"capped": lambda parts, n: right(bins)["full"](parts, n - 1)}

    monkeypatch.setattr(module, "forms", wrong)
    assert tool.main(["--ranks", "2", "--rollouts", "50", "--drawn", "7", "--seeds", "1"]) == 1
    error = capsys.readouterr().err
    assert error == (
        "simulate_draw.py: capped finds other winners than one machine: ranks 2, rollouts 50, drawn 7, shards even, "
        "seed 0\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "4", "0"], "--ranks must be at least 1, got 0"),
        (["--rollouts", "-1"], "--rollouts must be at least 1, got -1"),
        (["--drawn", "0"], "--drawn must be at least 1, got 0"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--bins", "0"], "--bins must be at least 1, got 0"),
        (["--length-max", "0"], "--length-max must be at least 1, got 0"),
        (["--length-median", "nan"], "--length-median must be above 0 and finite, got nan"),
        (["--length-sigma", "-1"], "--length-sigma must be at least 0 and finite, got -1.0"),
        (["--replay-ratio", "0"], "--replay-ratio must be above 0 and finite, got 0.0"),
        (["--gbit-per-s", "0"], "--gbit-per-s must be above 0 and finite, got 0.0"),
        (["--latency-us", "inf"], "--latency-us must be at least 0 and finite, got inf"),
        (["--alpha", "-0.5"], "--alpha must be at least 0 and finite, got -0.5"),
        (["--informative", "1.5"], "--informative must be in (0, 1], got 1.5"),
        (["--json", "/no/x"], "--json must be a file in a folder that exists, got /no/x"),
        (["--picture", "/"], "--picture must be a file in a folder that exists, got /"),
        (["--shards", "odd"], "argument --shards: invalid choice: 'odd'"),
        (["--ranks", "x"], "argument --ranks: invalid int value: 'x'"),
    ],
)
def test_a_bad_flag_is_one_line_and_exit_code_2(
    tool: ModuleType, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        tool.main(arguments)
    out, error = capsys.readouterr()
    assert (stop.value.code, out) == (2, "")
    assert error.startswith(f"simulate_draw.py: {message}") and error.count("\n") == 1
