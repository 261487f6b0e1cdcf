"""Damaged and foreign input, at random: checkpoints, data files, flags. Each works, or is an error of ours that names
what is wrong, and changes nothing."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_replay.arguments import build_parser, parse_args
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.tasks.jsonl import JsonlTask
from tests.rollouts import batch
from tests.single_rank import policy, random_qwen3

from megatron_replay.config import ReplayConfig  # isort: skip
from megatron_replay.trainer import checkpoint  # isort: skip
from megatron_replay.trainer.checkpoint import RunState  # isort: skip
from megatron_replay.trainer.manifest import write_manifest  # isort: skip
from megatron_replay.trainer.optimizer import unwrap  # isort: skip
from megatron_replay.trainer.policy import MegatronPolicy  # isort: skip

LENGTHS = [(3, 4), (1, 1), (5, 2), (2, 6)]
FIXED = {"--seed": 1}
NOTHING = object()


def new_buffer() -> RolloutReplayBuffer:
    return RolloutReplayBuffer(ReplayConfig(warmup_steps=0), seed=9, arena_tokens=512)


@pytest.fixture(scope="module")
def p(tmp_path_factory: pytest.TempPathFactory) -> MegatronPolicy:
    return policy(random_qwen3(tmp_path_factory.mktemp("qwen3")))


@pytest.fixture(scope="module")
def saved(p: MegatronPolicy, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, buffer = tmp_path_factory.mktemp("saved"), new_buffer()
    fresh = batch(LENGTHS)
    p.train(fresh, 0)
    buffer.push(fresh)
    checkpoint.save(root, p, buffer, RunState(1, 4, FIXED, {"updates": 1.0}))
    return root


def damaged(path: Path, r: random.Random) -> str:
    """Damage one file; says how."""
    data, kind = path.read_bytes(), r.choice(("flip", "cut", "empty", "remove", "append", "zeros"))
    at = r.randrange(max(1, len(data)))
    if kind == "remove" or not data:
        path.unlink()
    elif kind == "flip":
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << r.randrange(8))]) + data[at + 1 :])
    elif kind == "zeros":
        path.write_bytes(data[:at] + bytes(len(data) - at))
    else:
        path.write_bytes({"cut": data[:at], "empty": b"", "append": data + b"\0"}[kind])
    return kind


def weights(p: MegatronPolicy) -> list[torch.Tensor]:
    return [x.detach().clone() for x in unwrap(p.model).parameters()]


def test_no_damage_to_a_checkpoint_goes_unnoticed(p: MegatronPolicy, saved: Path, tmp_path: Path) -> None:
    before, r = weights(p), random.Random(1)
    files = [x.relative_to(saved) for x in sorted(saved.rglob("*")) if x.is_file()]
    for number in range(80):
        name = files[number % len(files)]
        copy = tmp_path / "copy"
        shutil.copytree(saved, copy)
        intact = (copy / name).read_bytes()
        how = damaged(copy / name, r)
        changed = not (copy / name).is_file() or (copy / name).read_bytes().strip(b" \0\n") != intact
        if changed:
            with pytest.raises(ValueError, match=r"^--load ") as raised:
                checkpoint.load(copy, p, new_buffer(), FIXED)
            assert str(copy) in str(raised.value), (name, how)
        shutil.rmtree(copy)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(p), strict=True))
    assert checkpoint.load(saved, p, new_buffer(), FIXED).cursor == 4


RUN_CHANGES: list[tuple[str, Any]] = [
    (name, value)
    for name in ("step", "cursor", "fixed", "counters", "model", "scheduler", "data_parallel", "distributed_optimizer")
    for value in (NOTHING, None, "7", -1, 1.5, [], {}, True)
    if (name, value) not in (("counters", {}), ("distributed_optimizer", True))
]


@pytest.mark.parametrize("name", sorted({name for name, _ in RUN_CHANGES}))
def test_a_checkpoint_whose_checksums_are_right_and_content_is_not(
    p: MegatronPolicy, saved: Path, tmp_path: Path, name: str
) -> None:
    for number, value in enumerate(v for n, v in RUN_CHANGES if n == name):
        copy = tmp_path / str(number)
        shutil.copytree(saved, copy)
        path = copy / "iter_0000001" / "run.json"
        run = json.loads(path.read_text())
        run.pop(name)
        path.write_text(json.dumps(run if value is NOTHING else run | {name: value}))
        write_manifest(path.parent)
        with pytest.raises(ValueError, match=r"^--load "):
            checkpoint.load(copy, p, new_buffer(), FIXED)


@pytest.mark.parametrize(
    "part", ["run.json", "replay_buffer_*", "weights/.metadata", "weights/*.distcp", "weights/metadata.json"]
)
@pytest.mark.parametrize("how", ["empty", "half", "garbage"])
def test_files_that_are_whole_and_something_else(
    p: MegatronPolicy, saved: Path, tmp_path: Path, part: str, how: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    (path,) = (copy / "iter_0000001").glob(part)
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "half": data[: len(data) // 2], "garbage": bytes(range(256)) * 4}[how])
    write_manifest(copy / "iter_0000001")
    with pytest.raises(ValueError, match=r"^--load "):
        checkpoint.load(copy, p, new_buffer(), FIXED)


LINES = b"\n".join(
    json.dumps({"prompt": f"{a} + {b} =", "answer": str(a + b)}).encode() for a in range(3) for b in range(3)
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, len(LINES)), gone=st.integers(0, 40), put=st.binary(max_size=12))
@example(at=0, gone=0, put=b"\xef\xbb\xbf")
@example(at=0, gone=len(LINES), put=b"")
def test_a_damaged_data_file_works_or_is_named_with_its_line(tmp_path: Path, at: int, gone: int, put: bytes) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINES[:at] + put + LINES[at + gone :])
    try:
        task = JsonlTask(str(path))
    except ValueError as error:
        assert str(path) in str(error)
        return
    assert task.size >= 1
    for index in range(task.size):
        problem = task.problem(index)
        assert problem.prompt.strip() and problem.answer.strip()


GOOD: list[object] = ["--run-dir", "r", "--train-iters", 5, "--load-hf", "m", "--seq-length", 64, "--lr", 1e-3]
GOOD += ["--rl-max-response-length", 8, "--grpo-prompts-per-step", 4, "--grpo-group-size", 4]
VALUED = sorted(a.option_strings[0] for a in build_parser()._actions if a.nargs is None and a.option_strings)
VALUES = st.one_of(
    st.sampled_from(
        ["", "0", "-1", "nan", "inf", "-inf", "1e400", "0x10", "1_000", "true", "None", "٣", "-0.0", "2**31"]
    ),
    st.integers(-(2**70), 2**70).map(str),
    st.floats().map(str),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flag=st.sampled_from(VALUED), value=VALUES)
def test_any_value_of_any_flag_works_or_is_refused_by_name(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    try:
        parse_args([*map(str, GOOD), f"{flag}={value}"])
    except SystemExit as ended:
        said = capsys.readouterr().err
        assert ended.code == 2 and "error: " in said and "Traceback" not in said
        assert "--" in said, said
