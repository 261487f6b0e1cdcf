from __future__ import annotations

import math

import pytest
import torch

from megatron_replay.advantage import group_advantages, informative, with_group_advantages
from tests.rollouts import batch


def test_closed_form_of_one_correct_in_eight() -> None:
    found = group_advantages(torch.tensor([1.0] + [0.0] * 7), torch.zeros(8, dtype=torch.int64))
    assert found.advantage[0].item() == pytest.approx(2.6458, abs=1e-4)
    assert found.advantage[1:].tolist() == pytest.approx([-0.3780] * 7, abs=1e-4)
    assert abs(found.advantage[0] / found.advantage[1]).item() == pytest.approx(7.0, rel=1e-6)


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_vectorised_equals_a_loop_over_uneven_interleaved_groups(std: str) -> None:
    g = torch.Generator().manual_seed(0)
    ids = torch.tensor([7, 3, 7, 9, 3, 3, 7, 11, 9, 3])
    reward = torch.rand(10, generator=g)
    found = group_advantages(reward, ids, std=std)
    for i, group in enumerate(ids.tolist()):
        r = [x for x, k in zip(reward.double().tolist(), ids.tolist(), strict=True) if k == group]
        mean = sum(r) / len(r)
        squares = sum((x - mean) ** 2 for x in r)
        if len(r) == 1:
            assert found.advantage[i] == 0 and not found.keep[i]
            continue
        scale = math.sqrt(squares / (len(r) - 1 if std == "sample" else len(r)))
        expected = (reward[i].item() - mean) / (1.0 if std == "none" else scale + 1e-6)
        assert found.advantage[i].item() == pytest.approx(expected, rel=1e-5)
        assert found.group_std[i].item() == pytest.approx(scale, rel=1e-5) and found.keep[i]


@pytest.mark.parametrize("std", ["population", "sample", "none"])
@pytest.mark.parametrize(
    "reward", [[0.1] * 8, [0.35] * 7, [1.0, 1.0, 1.0, 1 + 1e-7], [1e6, 1e6 + 0.06, 1e6], [0.0] * 4, [-3.3] * 3]
)
def test_float_residue_is_zero_variance(reward: list[float], std: str) -> None:
    found = group_advantages(torch.tensor(reward), torch.zeros(len(reward), dtype=torch.int64), std=std)
    assert not found.keep.any() and not found.advantage.any() and not found.group_std.any()


def test_a_small_but_real_difference_is_kept() -> None:
    found = group_advantages(torch.tensor([0.5, 0.5, 0.5001]), torch.zeros(3, dtype=torch.int64))
    assert found.keep.all() and found.advantage[2].item() == pytest.approx(math.sqrt(2), rel=0.05)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_named(bad: float) -> None:
    with pytest.raises(ValueError, match=f"reward must be finite, got {bad} at position 2"):
        group_advantages(torch.tensor([0.0, 1.0, bad]), torch.zeros(3, dtype=torch.int64))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="std must be one of population, sample, none, got 'batch'"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), std="batch")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="eps must be at least 0, got -1.0"):
        group_advantages(torch.zeros(2), torch.zeros(2, dtype=torch.int64), eps=-1.0)
    with pytest.raises(ValueError, match=r"reward must be \[N\] like group_ids \[3\], got \[2\]"):
        group_advantages(torch.zeros(2), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("std", ["population", "sample", "none"])
def test_informative_drops_whole_groups_in_every_mode(std: str) -> None:
    source = batch([(2, 3)] * 6).replace(
        reward=torch.tensor([0.0, 1.0, 0.35, 0.35, 1.0, 1.0]), group_ids=torch.tensor([4, 4, 5, 5, 6, 6])
    )
    kept = informative(with_group_advantages(source, std=std))
    assert kept.group_ids.tolist() == [4, 4]
    assert kept.advantage.tolist() == pytest.approx([-kept.advantage[1].item(), kept.advantage[1].item()])


def test_no_rollouts() -> None:
    found = group_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert found.advantage.shape == found.keep.shape == (0,)
