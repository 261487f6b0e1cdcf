"""Updates with a NaN or an infinity: skipped, counted, and after too many the run ends and leaves what shows why."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_replay.rollout import RolloutBatch
from megatron_replay.trainer.hf_checkpoint import save_hf
from megatron_replay.trainer.nonfinite import NonfiniteUpdates, NonfiniteUpdatesError, load_batch
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.trainer.policy import MegatronPolicy
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.rollouts import batch
from tests.single_rank import groups, policy, random_qwen3

LENGTHS = [(3, 4), (1, 1), (5, 2), (2, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_qwen3(tmp_path_factory.mktemp("qwen3"))


def spoiled(value: float, seed: int = 0) -> RolloutBatch:
    """One rollout of four has this advantage."""
    good = batch(LENGTHS, seed=seed)
    advantage = good.advantage.clone()
    advantage[2] = value
    return good.replace(advantage=advantage)


def state(p: MegatronPolicy) -> list[Tensor]:
    """Weights, and Adam's moments."""
    kept = [x.detach().clone() for x in unwrap(p.model).parameters()]
    for part in p.optimizer.chained_optimizers:
        for moments in part.optimizer.state.values():
            kept += [x.clone() for x in moments.values() if torch.is_tensor(x)]
    return kept


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_such_an_update_leaves_weights_and_optimizer_and_the_next_one_is_as_without_it(
    folder: Path, value: float
) -> None:
    """1e30 is finite itself; the norm of its gradient is not."""
    p, untouched = policy(folder), policy(folder)
    for each in (p, untouched):
        each.train(batch(LENGTHS, seed=1), 0)
    before = state(p)
    metrics = p.train(spoiled(value), 1)
    assert metrics["update_skipped"] == 1.0 == metrics["update_nonfinite"]
    assert all(torch.equal(a, b) for a, b in zip(before, state(p), strict=True))
    # the schedule counts steps, not updates
    untouched.scheduler.step(1)
    good = [each.train(batch(LENGTHS, seed=2), 2) for each in (p, untouched)]
    assert good[0] == good[1] and good[0]["update_nonfinite"] == 0.0 and good[0]["grad_norm"] > 0
    assert all(torch.equal(a, b) for a, b in zip(state(p), state(untouched), strict=True))


def test_a_nan_in_a_weight_is_seen_too(folder: Path) -> None:
    p = policy(folder)
    with torch.no_grad():
        next(unwrap(p.model).parameters())[5, 0] = float("nan")
    good = batch(LENGTHS)
    tokens = torch.where(good.tokens == 5, 6, good.tokens)
    tokens[0] = 5
    assert p.train(good.replace(tokens=tokens), 0)["update_nonfinite"] == 1.0


def test_the_last_that_is_borne_leaves_what_shows_it_again(folder: Path, tmp_path: Path) -> None:
    p, shape = policy(folder), ModelShape.from_folder(folder)
    p.nonfinite = NonfiniteUpdates(3, tmp_path, lambda at: save_hf(at, unwrap(p.model), shape, groups(), base=folder))
    nan = float("nan")
    for step, value in enumerate((nan, nan, 1.0, nan, nan)):
        assert p.train(spoiled(value, seed=step), step)["update_nonfinite"] == float(value != value)
    p.train(batch(LENGTHS, seed=7), 5)
    for step in (6, 7):
        p.train(spoiled(nan, seed=step), step)
    with pytest.raises(NonfiniteUpdatesError, match=r"3 updates in a row .* the last in step 8\. .*step_0000008") as e:
        p.train(spoiled(nan, seed=8), 8)
    assert f"--load-hf {tmp_path}/step_0000008/model --rl-train-batch {tmp_path}/step_0000008" in str(e.value)
    found, step = load_batch(tmp_path / "step_0000008", groups())
    assert step == 8 and same(found, spoiled(nan, seed=8))
    again = policy(tmp_path / "step_0000008" / "model")
    here, there = (list(unwrap(x.model).parameters()) for x in (p, again))
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))
    assert again.train(found, step)["update_nonfinite"] == 1.0


def test_a_folder_that_is_written_again_may_hold_the_model_that_trains(folder: Path, tmp_path: Path) -> None:
    """As when the update in it is repeated with a limit of one."""
    shape, at = ModelShape.from_folder(folder), tmp_path / "step_0000007"

    def update(base: Path, seed: int) -> None:
        p = policy(base)
        p.nonfinite = NonfiniteUpdates(1, tmp_path, lambda to: save_hf(to, unwrap(p.model), shape, groups(), base=base))
        with pytest.raises(NonfiniteUpdatesError):
            p.train(spoiled(float("nan"), seed=seed), 7)

    update(folder, 1)
    kept = {x.relative_to(at): x.read_bytes() for x in at.rglob("*") if x.is_file() and "batch" not in x.name}
    (at / "left over").touch()
    update(at / "model", 2)
    assert {x.relative_to(at): x.read_bytes() for x in at.rglob("*") if x.is_file() and "batch" not in x.name} == kept
    assert same(load_batch(at, groups())[0], spoiled(float("nan"), seed=2)) and list(tmp_path.iterdir()) == [at]


def same(a: RolloutBatch, b: RolloutBatch) -> bool:
    return all(torch.equal(torch.nan_to_num(x), torch.nan_to_num(vars(b)[name])) for name, x in vars(a).items())


def test_a_batch_of_several_ranks_is_dealt_out_again(tmp_path: Path) -> None:
    class Rank:
        """What `observe` and `load_batch` look at."""

        def __init__(self, rank: int, size: int) -> None:
            self.data_rank, self.data_size, self.writes_shard = rank, size, True

    whole = [batch(LENGTHS, first_counter=10 * rank, seed=rank) for rank in range(3)]
    counter: Any = NonfiniteUpdates(1, tmp_path, lambda at: None)
    for rank in range(3):
        # the folder is made anew by each: this process is the first rank of all three
        kept = copy.copy(list((tmp_path / "step_0000004").glob("batch*")))
        kept = {x.name: x.read_bytes() for x in kept}
        with pytest.raises(NonfiniteUpdatesError):
            counter.observe(False, whole[rank], 4, Rank(rank, 3))
        for name, data in kept.items():
            (tmp_path / "step_0000004" / name).write_bytes(data)
    parts = [load_batch(tmp_path / "step_0000004", Rank(rank, 2))[0] for rank in range(2)]
    uids = sorted(int(u) for part in parts for u in part.uid)
    assert uids == sorted(int(u) for part in whole for u in part.uid) and abs(len(parts[0]) - len(parts[1])) <= 1
    (tmp_path / "step_0000004" / "batch_00001_of_00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"--rl-train-batch .* is incomplete: batch_00001_of_00003.* is missing"):
        load_batch(tmp_path / "step_0000004", Rank(0, 1))
    with pytest.raises(ValueError, match=r"--rl-train-batch must name a folder that a run left behind, got 'nowhere'"):
        load_batch("nowhere", Rank(0, 1))
