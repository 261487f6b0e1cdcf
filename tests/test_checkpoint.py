"""Checkpoints on one rank: what is written, what comes back, and what a damaged one says."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_replay.config import ReplayConfig
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import RolloutBatch
from megatron_replay.trainer import checkpoint
from megatron_replay.trainer.checkpoint import RunState
from megatron_replay.trainer.manifest import write_manifest
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.trainer.policy import MegatronPolicy
from tests.rollouts import batch
from tests.single_rank import policy, random_qwen3

FIXED = {"--seed": 1, "--grpo-group-size": 4}
LENGTHS = [(3, 4), (1, 1), (5, 2), (2, 6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_qwen3(tmp_path_factory.mktemp("qwen3"))


def new_buffer() -> RolloutReplayBuffer:
    return RolloutReplayBuffer(ReplayConfig(warmup_steps=0), seed=9, arena_tokens=512)


def trained(folder: Path, steps: int = 2) -> tuple[MegatronPolicy, RolloutReplayBuffer]:
    p, buffer = policy(folder), new_buffer()
    for step in range(steps):
        fresh = batch(LENGTHS, birth_step=step, first_counter=10 * step, seed=step)
        p.train(fresh, step)
        buffer.push(fresh)
    return p, buffer


def go_on(p: MegatronPolicy, buffer: RolloutReplayBuffer, start: int) -> list[float]:
    """Two more steps with replay; losses, norms and what was drawn."""
    out: list[float] = []
    for step in range(start, start + 2):
        fresh = batch(LENGTHS, birth_step=step, first_counter=10 * step, seed=step)
        buffer.evict(step)
        draw = buffer.draw(3, step)
        metrics = p.train(RolloutBatch.cat([fresh, draw.batch]), step)
        buffer.push(fresh)
        out += [metrics["loss"], metrics["grad_norm"], metrics["lr"], *map(float, draw.uids.tolist())]
    return out


def test_a_resumed_run_goes_on_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    p, buffer = trained(folder)
    checkpoint.save(tmp_path, p, buffer, RunState(2, 32, FIXED, {"updates": 2.0}))
    expected = go_on(p, buffer, 2)
    again, empty = policy(folder), new_buffer()
    state = checkpoint.load(tmp_path, again, empty, FIXED)
    assert state == RunState(2, 32, FIXED, {"updates": 2.0})
    assert len(empty) == 2 * len(LENGTHS)
    assert go_on(again, empty, 2) == expected
    ours, theirs = (dict(unwrap(x.model).named_parameters()) for x in (again, p))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)


KINDS = [
    pytest.param({"use_distributed_optimizer": sharded}, dtype, id=f"{'sharded' if sharded else 'whole'}-{name}")
    for sharded in (False, True)
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
]


@pytest.mark.parametrize(("adam", "dtype"), KINDS)
@pytest.mark.parametrize("updates", [0, 1])
def test_every_kind_of_optimizer_goes_on_bit_for_bit(
    folder: Path, tmp_path: Path, adam: dict[str, Any], dtype: torch.dtype, updates: int
) -> None:
    """Also from a checkpoint before the first update, when Adam has made no state of its own, and through a second
    one that the resumed run writes at once."""

    def begin() -> MegatronPolicy:
        return policy(folder, adam=adam, dtype=dtype)

    whole, p = begin(), begin()
    for each in (whole, p):
        for step in range(2):
            each.train(batch(LENGTHS, seed=step) if step < updates else RolloutBatch.empty(), step)
    for name in ("first", "second"):
        checkpoint.save(tmp_path / name, p, new_buffer(), RunState(2, 32, FIXED))
        p = begin()
        checkpoint.load(tmp_path / name, p, new_buffer(), FIXED)
    expected, got = ([each.train(batch(LENGTHS, seed=step), step) for step in (2, 3)] for each in (whole, p))
    assert got == expected and expected[0]["grad_norm"] > 0
    ours, theirs = (dict(unwrap(x.model).named_parameters()) for x in (p, whole))
    assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    assert counts(p) == counts(whole) == {updates + 2.0}


def counts(p: MegatronPolicy) -> set[float]:
    """Updates that Adam has counted, over all parameters."""
    return {float(state["step"]) for state in p.optimizer.chained_optimizers[0].optimizer.state.values()}


def test_a_save_before_the_first_update_does_not_change_the_run(folder: Path, tmp_path: Path) -> None:
    quiet, saving = policy(folder), policy(folder)
    checkpoint.save(tmp_path, saving, new_buffer(), RunState(0, 0, FIXED))
    assert go_on(saving, new_buffer(), 0) == go_on(quiet, new_buffer(), 0)


@pytest.mark.parametrize(("adam", "dtype"), KINDS)
def test_the_flags_of_the_run_that_resumes_hold(
    folder: Path, tmp_path: Path, adam: dict[str, Any], dtype: torch.dtype
) -> None:
    """Rates, betas, epsilon and weight decay; moments and count are those that were saved."""
    first = policy(folder, adam=adam, dtype=dtype)
    first.train(batch(LENGTHS), 0)
    checkpoint.save(tmp_path, first, new_buffer(), RunState(1, 16, FIXED))
    new = {"adam_beta1": 0.5, "adam_beta2": 0.9, "adam_eps": 1e-4, "weight_decay": 0.25, "min_lr": 1e-4}
    p = policy(folder, adam=adam | new, dtype=dtype, lr=5e-4)
    checkpoint.load(tmp_path, p, new_buffer(), FIXED)
    p.train(batch(LENGTHS, seed=1), 1)
    rate = 1e-4 + (5e-4 - 1e-4) * 0.98
    decays = set()
    for group in p.optimizer.param_groups:
        assert (group["betas"], group["eps"]) == ((0.5, 0.9), 1e-4)
        assert group["lr"] == pytest.approx(rate), "the second of 100 updates"
        decays.add(group["weight_decay"])
    assert max(decays) == 0.25 and counts(p) == {2.0}


def test_the_same_iteration_can_be_written_again(folder: Path, tmp_path: Path) -> None:
    p, buffer = trained(folder)
    for cursor in (32, 33):
        checkpoint.save(tmp_path, p, buffer, RunState(2, cursor, FIXED))
    assert checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED).cursor == 33
    assert sorted(x.name for x in tmp_path.iterdir()) == ["iter_0000002", checkpoint.LATEST]


def test_a_run_killed_while_saving_leaves_the_last_good_one(folder: Path, tmp_path: Path) -> None:
    p, buffer = trained(folder)
    checkpoint.save(tmp_path, p, buffer, RunState(2, 32, FIXED))
    (tmp_path / "iter_0000003.partial" / "weights").mkdir(parents=True)
    assert checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED).step == 2
    checkpoint.save(tmp_path, p, buffer, RunState(3, 48, FIXED))
    assert checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED).step == 3


@pytest.fixture(scope="module")
def saved(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    p, buffer = trained(folder)
    checkpoint.save(root, p, buffer, RunState(2, 32, FIXED))
    return root


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def parts(root: Path) -> dict[str, Path]:
    folder = root / "iter_0000002"
    return {
        "buffer": next(folder.glob("replay_buffer_*")),
        "run": folder / "run.json",
        "weights": next((folder / "weights").glob("*.distcp")),
        "manifest": folder / "manifest.json",
    }


@pytest.mark.parametrize("part", ["buffer", "run", "weights", "manifest"])
def test_a_missing_part_is_named(folder: Path, copy: Path, part: str) -> None:
    path = parts(copy)[part]
    path.unlink()
    with pytest.raises(ValueError, match=f"incomplete: .*{path.name} is missing"):
        checkpoint.load(copy, policy(folder), new_buffer(), FIXED)


def test_a_missing_buffer_can_be_accepted_by_flag(folder: Path, copy: Path) -> None:
    parts(copy)["buffer"].unlink()
    with pytest.raises(ValueError, match="--rl-replay-allow-empty-buffer"):
        checkpoint.load(copy, policy(folder), new_buffer(), FIXED)
    buffer = new_buffer()
    assert checkpoint.load(copy, policy(folder), buffer, FIXED, allow_empty_buffer=True).step == 2
    assert len(buffer) == 0


@pytest.mark.parametrize("part", ["buffer", "run", "weights"])
def test_one_flipped_byte_is_named(folder: Path, copy: Path, part: str) -> None:
    path = parts(copy)[part]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"damaged: the checksum of .*{path.name} differs"):
        checkpoint.load(copy, policy(folder), new_buffer(), FIXED)


def test_a_cut_off_weight_file_is_named(folder: Path, copy: Path) -> None:
    path = parts(copy)["weights"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"damaged: weights/{path.name} has \d+ bytes"):
        checkpoint.load(copy, policy(folder), new_buffer(), FIXED)


def test_no_checkpoint_is_never_a_fresh_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--load must name a folder with a checkpoint, got .*without latest"):
        checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED)
    (tmp_path / checkpoint.LATEST).write_text("7")
    with pytest.raises(ValueError, match="names iteration 7, and .*iter_0000007 is missing"):
        checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED)
    (tmp_path / checkpoint.LATEST).write_text("soon")
    with pytest.raises(ValueError, match="must hold an iteration number, got 'soon'"):
        checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED)


@pytest.mark.parametrize("name", ["--seed", "--grpo-group-size"])
def test_a_setting_that_must_not_change_is_refused(folder: Path, saved: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"was written with {name} {FIXED[name]}, got 99"):
        checkpoint.load(saved, policy(folder), new_buffer(), FIXED | {name: 99})


def test_a_checkpoint_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    other = random_qwen3(tmp_path, hidden_size=64)
    with pytest.raises(ValueError, match="--load .* is of another model: hidden_size 48, .* 64"):
        checkpoint.load(saved, policy(other), new_buffer(), FIXED)


@pytest.mark.parametrize(
    ("version", "words"), [(99, r"99 \(a newer megatron_replay wrote it\)"), (1, "1$"), ("2", "'2'")]
)
def test_another_format_is_refused(folder: Path, copy: Path, version: object, words: str) -> None:
    run = parts(copy)["run"]
    run.write_text(json.dumps(json.loads(run.read_text()) | {"format_version": version}))
    write_manifest(copy / "iter_0000002")
    with pytest.raises(ValueError, match=f"format_version must be 2, got {words}"):
        checkpoint.load(copy, policy(folder), new_buffer(), FIXED)


def test_only_the_last_are_kept_on_request(folder: Path, tmp_path: Path) -> None:
    p, buffer = trained(folder)
    for step in (2, 4, 6, 8):
        checkpoint.save(tmp_path, p, buffer, RunState(step, 0, FIXED))
    (tmp_path / "iter_0000009.partial").mkdir()
    (tmp_path / "notes").mkdir()
    checkpoint.save(tmp_path, p, buffer, RunState(10, 0, FIXED), keep_last=3)
    kept = {x.name for x in tmp_path.iterdir()}
    assert {"iter_0000006", "iter_0000008", "iter_0000010", "notes"} <= kept and "iter_0000004" not in kept
    checkpoint.save(tmp_path, p, buffer, RunState(12, 0, FIXED), keep_last=1)
    assert [x.name for x in tmp_path.glob("iter_???????")] == ["iter_0000012"]
    assert not list(tmp_path.glob("*.removed"))
    assert checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED).step == 12


def test_a_full_disk_keeps_the_last_good_one(folder: Path, tmp_path: Path) -> None:
    p, buffer = trained(folder)
    checkpoint.save(tmp_path, p, buffer, RunState(2, 32, FIXED))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # what the kernel says of a file that may not grow is what it says of a full disk, but for the number
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        with pytest.raises(RuntimeError, match=rf"--save {tmp_path}: iteration 4 could not be written, .* GB are free"):
            checkpoint.save(tmp_path, p, buffer, RunState(4, 64, FIXED), keep_last=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED).step == 2
    checkpoint.save(tmp_path, p, buffer, RunState(4, 64, FIXED), keep_last=1)
    assert checkpoint.load(tmp_path, policy(folder), new_buffer(), FIXED).cursor == 64
    assert {x.name for x in tmp_path.iterdir()} == {"iter_0000004", checkpoint.LATEST}
