from __future__ import annotations

import pytest
import torch

from megatron_replay.ops import priority_draw
from megatron_replay.ops.priority_draw import draw_keys, draw_with_replacement, largest, replay_weights
from megatron_replay.ops.ragged_gather import ragged_gather, ragged_scatter


def test_weights_in_closed_form() -> None:
    advantage, std = torch.tensor([2.0, -0.5, 0.0]), torch.tensor([0.3, 0.0, 0.1])
    assert replay_weights(advantage, std, "abs-advantage", 1.0, 1e-6).tolist() == pytest.approx(
        [2 + 1e-6, 0.5 + 1e-6, 1e-6]
    )
    assert replay_weights(advantage, std, "abs-advantage", 0.0, 1e-6).tolist() == [1, 1, 1]
    assert replay_weights(advantage, std, "group-std", 0.5, 1e-6).tolist() == pytest.approx([0.3, 0, 0.1])
    assert replay_weights(advantage, std, "uniform", 0.5, 1e-6).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="priority must be one of .*, got 'rank'"):
        replay_weights(advantage, std, "rank", 0.5, 1e-6)


def test_a_key_depends_on_its_rollout_and_step_alone() -> None:
    uid = torch.arange(100)
    weight = torch.rand(100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    keys = draw_keys(weight, uid, seed=3, step=5)
    order = torch.randperm(100, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw_keys(weight[order], uid[order], seed=3, step=5), keys[order])
    for other in ({"seed": 4, "step": 5}, {"seed": 3, "step": 6}, {"seed": 3, "step": 5, "repeat": 1}):
        assert not bool((draw_keys(weight, uid, **other) == keys).any())
    # scaling all weights shifts all keys and draws the same
    assert torch.allclose(draw_keys(weight * 8, uid, seed=3, step=5) - keys, torch.full_like(keys, 8.0).log())


def test_unusable_weights_are_never_drawn() -> None:
    weight = torch.tensor([0.0, float("nan"), float("inf"), -1.0, 1e-300, 1.0], dtype=torch.float64)
    for step in range(50):
        keys = draw_keys(weight, torch.arange(6), seed=0, step=step)
        assert set(largest(keys, torch.arange(6), 6).tolist()) == {4, 5}
    positions, keys = draw_with_replacement(weight[:4], torch.arange(4), 3, seed=0, step=0)
    assert positions.numel() == keys.numel() == 0


def test_a_draw_with_replacement_is_the_argmax_of_each_repeat_in_any_block(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = torch.tensor([40, 3, 17, 8, 25])
    weight = torch.tensor([0.5, 2.0, 0.0, 1.0, 3.0], dtype=torch.float64)
    expected = [int(draw_keys(weight, uid, seed=1, step=4, repeat=j).argmax()) for j in range(23)]
    for block in (1, 15, 2**20):  # one draw, three draws, all at a time
        monkeypatch.setattr(priority_draw, "BLOCK", block)
        positions, keys = draw_with_replacement(weight, uid, 23, seed=1, step=4)
        assert positions.tolist() == expected
        best = [float(draw_keys(weight, uid, seed=1, step=4, repeat=j).max()) for j in range(23)]
        assert keys.tolist() == best


def test_ties_go_to_the_smaller_uid() -> None:
    keys, uid = torch.tensor([1.0, 2.0, 2.0, 1.0]), torch.tensor([9, 7, 4, 8])
    assert largest(keys, uid, 3).tolist() == [2, 1, 3]
    assert largest(keys, uid, 99).tolist() == [2, 1, 3, 0]


def test_bad_arguments_are_named() -> None:
    w, uid = torch.ones(3), torch.arange(3)
    with pytest.raises(ValueError, match=r"weight must be \[C\] like uid \[2\], got \[3\]"):
        draw_keys(w, uid[:2], seed=0, step=0)
    with pytest.raises(ValueError, match=r"uid must be int64, got torch.int32"):
        draw_keys(w, uid.int(), seed=0, step=0)
    with pytest.raises(ValueError, match=r"step must be in \[0, 2\^32\), got -1"):
        draw_keys(w, uid, seed=0, step=-1)
    with pytest.raises(ValueError, match=r"repeat must be in \[0, 2\^32\), got 4294967296"):
        draw_keys(w, uid, seed=0, step=0, repeat=2**32)


def test_ragged_rows_wrap_and_round_trip() -> None:
    arena = torch.zeros(10, dtype=torch.int64)
    cu = torch.tensor([0, 4, 4, 7], dtype=torch.int32)
    start, length = torch.tensor([8, 0, 3]), torch.tensor([4, 0, 3])
    packed = torch.arange(1, 8)
    ragged_scatter(arena, start, length, cu, packed)
    assert arena.tolist() == [3, 4, 0, 5, 6, 7, 0, 0, 1, 2]
    assert torch.equal(ragged_gather(arena, start, length, cu), packed)
    assert ragged_gather(arena, start[:0], length[:0], cu[:1]).numel() == 0
    with pytest.raises(ValueError, match="start must have one entry for each of 3 rows, got 2"):
        ragged_gather(arena, start[:2], length, cu)
    with pytest.raises(ValueError, match="length must have one entry for each of 3 rows, got 1"):
        ragged_gather(arena, start, length[:1], cu)
    with pytest.raises(ValueError, match="length must sum to the 7 tokens of cu_seqlens, got 8"):
        ragged_gather(arena, start, length + torch.tensor([0, 1, 0]), cu)
