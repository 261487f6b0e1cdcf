"""The entry script from outside: what it writes, kill -9 and resume, other layouts, bad input, epochs."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_replay import arguments
from megatron_replay.telemetry import read_metrics
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.launch import EXAMPLE, ROOT, command, environment, torchrun
from tests.preloaded import preloaded, preloaded_failure
from tests.rollouts import batch

from tests.single_rank import groups  # isort: skip - before the trainer, which it prepares for a CPU

from megatron_replay.run.parts import build_policy  # isort: skip
from megatron_replay.trainer.nonfinite import NonfiniteUpdates, NonfiniteUpdatesError  # isort: skip

pytestmark = pytest.mark.slow
FLAGS = ROOT / "examples" / "quickstart" / "flags.txt"
STEPS = 8
SHORT = (
    f"--train-iters {STEPS} --grpo-prompts-per-step 8 --grpo-group-size 4 --rl-replay-warmup-steps 1 "
    "--rl-replay-tau-max 3 --save-interval 3 --eval-prompts 16 --eval-samples 1 --micro-batch-size 20"
).split()


def flags(run_dir: Path, *more: object) -> list[str]:
    return [f"@{FLAGS}", *SHORT, "--run-dir", str(run_dir), *map(str, more)]


def comparable(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All but wall-clock numbers."""
    return [{k: v for k, v in row.items() if not k.startswith("time/") and k != "tokens_per_second"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on two ranks."""
    run_dir = tmp_path_factory.mktemp("whole")
    torchrun(2, EXAMPLE, *flags(run_dir))
    return run_dir


def test_the_run_folder_holds_what_the_readme_says(whole: Path) -> None:
    rows = read_metrics(whole)
    assert [r["step"] for r in rows] == list(range(STEPS))
    contract = (
        "loss grad_norm reward_mean replay/draw_size replay/age_mean replay/draw_hash time/generate time/reward "
        "time/draw time/train time/sync train_rollout_logprob_abs_diff replay/size replay/priority_mean lr "
        "replay/degenerate_step replay/fraction consumed_train_samples tokens_per_second truncated_fraction"
    )
    assert all(set(contract.split()) <= row.keys() for row in rows)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary.keys() == {
        "accuracy_before", "accuracy_after", "seconds", "updates", "tensor_parallel", "pipeline_parallel",
        "data_parallel", "fresh_rollouts", "replayed_rollouts",
    }  # fmt: skip
    assert (summary["tensor_parallel"], summary["pipeline_parallel"], summary["data_parallel"]) == (2, 1, 1)
    assert summary["updates"] + sum(r["update_skipped"] for r in rows) == STEPS
    assert summary["fresh_rollouts"] == STEPS * 32 == rows[-1]["consumed_train_samples"], "replayed rows do not count"
    assert summary["replayed_rollouts"] == sum(r["replay/draw_size"] for r in rows) > 0
    assert (whole / "curves.png").stat().st_size > 10_000
    assert list((whole / "tensorboard").iterdir())
    # behavior log-probs are those of the weights that are trained: on-policy rows have ratio 1
    assert all(r["train_rollout_logprob_abs_diff"] < 1e-4 for r in rows)
    assert any(abs(r["replay/ratio_mean"] - 1) > 1e-4 for r in rows[2:])


def test_both_tokenizers_give_the_same_run(whole: Path, tmp_path: Path) -> None:
    twin = ("--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", FLAGS.parent / "model")
    preloaded(2, *flags(tmp_path, *twin))
    assert comparable(read_metrics(tmp_path)) == comparable(read_metrics(whole))


def start(run_dir: Path, *more: object) -> subprocess.Popen[str]:
    """A run on two ranks in a session of its own; its output is in RUN_DIR.txt."""
    with run_dir.with_suffix(".txt").open("w") as output:
        return subprocess.Popen(
            command(2, EXAMPLE, *flags(run_dir, *more)),
            env=environment(),
            cwd=ROOT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )


def wait_for_rows(run_dir: Path, process: subprocess.Popen[str], rows: int) -> None:
    deadline = time.monotonic() + 200
    while len(read_metrics(run_dir)) < rows:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "stopped"
    process = start(run_dir)
    wait_for_rows(run_dir, process, 2)
    process.terminate()
    process.wait(60)
    said = run_dir.with_suffix(".txt").read_text()
    done = len(read_metrics(run_dir))
    assert f"stopped by signal SIGTERM after step {done} of {STEPS} and saved; go on with --load" in said
    assert 2 <= done < STEPS and not (run_dir / "summary.json").exists() and not (run_dir / ".lock").exists()
    assert (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == str(done)
    preloaded(2, *flags(run_dir, "--load", run_dir / "checkpoints"))
    assert comparable(read_metrics(run_dir)) == comparable(read_metrics(whole))


def first_ends(process: subprocess.Popen[str]) -> None:
    """Wait for the first of two ranks to end, as one that has failed does."""
    ranks = [c for c in psutil.Process(process.pid).children() if c.environ().get("RANK") == "0"]
    assert len(ranks) == 1 and psutil.wait_procs(ranks, timeout=60)[1] == []


def test_a_rank_that_stands_still_ends_the_run_and_is_named(tmp_path: Path) -> None:
    run_dir = tmp_path / "hung"
    process = start(run_dir, "--distributed-timeout-minutes", 0.2)
    try:
        wait_for_rows(run_dir, process, 2)
        second = next(
            child
            for child in psutil.Process(process.pid).children(recursive=True)
            if "pretrain_replay_grpo.py" in " ".join(child.cmdline()) and child.environ().get("RANK") == "1"
        )
        second.suspend()
        first_ends(process)
        # torchrun would give it half a minute
        second.kill()
        assert process.wait(60) != 0
    finally:
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    said = run_dir.with_suffix(".txt").read_text()
    assert re.search(r"rank 0 is in phase \w+ of step \d; rank 1 has ended or stands still, in phase \w+ of step", said)
    assert psutil.wait_procs([second], timeout=5)[1] == []


def test_kill_between_steps_and_resume_gives_the_same_metrics(whole: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "killed"
    process = start(run_dir)
    wait_for_rows(run_dir, process, 4)  # past the checkpoint of step 3
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    seen = len(read_metrics(run_dir))
    assert 4 <= seen < STEPS and read_metrics(whole)[3]["replay/size"] > 0
    preloaded(2, *flags(run_dir, "--load", run_dir / "checkpoints"))
    assert comparable(read_metrics(run_dir)) == comparable(read_metrics(whole))
    ours, theirs = (json.loads((d / "summary.json").read_text()) for d in (run_dir, whole))
    assert {**ours, "seconds": 0} == {**theirs, "seconds": 0}


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (1, "--tensor-model-parallel-size 1"),
        (2, "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"),
        (2, "--tensor-model-parallel-size 1"),  # data parallel 2
    ],
    ids=["tp1", "pp2", "dp2"],
)
def test_resume_on_another_layout_draws_the_same_rollouts(whole: Path, tmp_path: Path, world: int, layout: str) -> None:
    """From the checkpoint of step 6: two more steps; the first update has the loss, norm and rate of the whole run."""
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "iter_0000006").symlink_to(whole / "checkpoints" / "iter_0000006")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("6")
    preloaded(world, *flags(tmp_path, "--load", checkpoints, "--save", tmp_path / "new", *layout.split()))
    assert_same_steps(read_metrics(tmp_path), read_metrics(whole)[6:])


def assert_same_steps(rows: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Two steps each: the same draws and samples, and losses and gradients but for the order of sums."""
    assert len(rows) == 2
    for got, want in zip(rows, expected, strict=True):
        assert got["step"] == want["step"]
        assert got["replay/draw_hash"] == want["replay/draw_hash"] and want["replay/draw_size"] > 0
        assert got["replay/size"] == want["replay/size"] and got["reward_mean"] == want["reward_mean"]
        assert got["loss"] == pytest.approx(want["loss"], abs=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], abs=1e-4)
        assert got["lr"] == want["lr"]


def test_a_data_parallel_run_reshards_and_loses_nothing(tmp_path: Path) -> None:
    """DP2 x TP2, distributed optimizer: two shards with different rollouts, from which one rank goes on, and four."""
    more = ("--train-iters", 6, "--save-interval", 4, "--use-distributed-optimizer")
    preloaded(4, *flags(tmp_path / "dp2", *more))
    checkpoints = tmp_path / "dp2" / "checkpoints"
    shards = sorted((checkpoints / "iter_0000004").glob("replay_buffer_*"))
    assert [x.name for x in shards] == [f"replay_buffer_0000{i}_of_00002.safetensors" for i in range(2)]
    from safetensors.torch import load_file

    states = [load_file(x) for x in shards]
    uids = [set(x["uid"].tolist()) for x in states]
    assert uids[0] and uids[1] and not uids[0] & uids[1]
    alive = sum(int((4 - x["birth_step"] <= 3).sum()) for x in states)  # at step 4, the age limit being 3
    assert 0 < alive < len(uids[0] | uids[1])

    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    for ranks in (1, 4):
        on_other = ("--load", checkpoints, "--save", tmp_path / f"new{ranks}", "--tensor-model-parallel-size", 1)
        preloaded(ranks, *flags(tmp_path / f"dp{ranks}", *more, *on_other))
        rows = read_metrics(tmp_path / f"dp{ranks}")
        assert rows[0]["replay/size"] == alive
        assert_same_steps(rows, read_metrics(tmp_path / "dp2")[4:])
    saved = sorted((tmp_path / "new4" / "iter_0000006").glob("replay_buffer_*"))
    uids = [set(load_file(x)["uid"].tolist()) for x in saved]
    assert len(uids) == 4 and all(uids) and len(set.union(*uids)) == sum(map(len, uids))


def test_a_checkpoint_at_the_end_of_an_epoch_resumes_in_the_next(tmp_path: Path) -> None:
    """A data set of 16 prompts, 8 a step: step 2 is the first of epoch 1, with another order."""
    data = tmp_path / "data.jsonl"
    lines = [{"prompt": f"{n:05d}=", "answer": "".join(sorted(f"{n:05d}"))} for n in range(70_000, 70_160, 10)]
    data.write_text("\n".join(map(json.dumps, lines)))
    task = ("--rl-task", "jsonl", "--data-path", data, "--eval-prompts", 0, "--tensor-model-parallel-size", 1)
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    preloaded(1, *flags(whole, *task, "--train-iters", 4, "--save-interval", 2))
    (whole / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("2")
    preloaded(1, *flags(resumed, *task, "--train-iters", 4, "--load", whole / "checkpoints"))
    assert comparable(read_metrics(resumed)) == comparable(read_metrics(whole)[2:])
    summary = json.loads((resumed / "summary.json").read_text())
    assert summary["accuracy_before"] is None and summary["fresh_rollouts"] == 4 * 32


@pytest.mark.parametrize(("first", "then"), [(0, 16), (16, 0)])
def test_a_run_may_be_evaluated_at_one_of_its_ends_alone(tmp_path: Path, first: int, then: int) -> None:
    """Started without an evaluation and resumed with one, and the other way round."""
    alone = ("--tensor-model-parallel-size", 1, "--eval-prompts")
    run_dir = tmp_path / "run"
    preloaded(1, *flags(run_dir, *alone, first, "--train-iters", 2))
    more = ("--train-iters", 3, "--load", run_dir / "checkpoints", "--save-hf", tmp_path / "hf")
    said = preloaded(1, *flags(run_dir, *alone, then, *more))
    summary = json.loads((run_dir / "summary.json").read_text())
    known = {name for name in ("accuracy_before", "accuracy_after") if summary[name] is not None}
    assert known == ({"accuracy_after"} if then else {"accuracy_before"})
    assert re.search(
        r"held-out accuracy: " + (r"none before, 0\.\d+ after" if then else r"0\.\d+ before, none after"), said
    )
    assert (run_dir / "curves.png").stat().st_size > 10_000 and (tmp_path / "hf" / "config.json").exists()


def test_an_update_that_is_repeated_leaves_its_folder_as_it_is(tmp_path: Path) -> None:
    """Also where one such update ends a run."""
    good = batch([(3, 4), (2, 6)])
    # the model of the quickstart has fewer tokens
    bad = good.replace(tokens=good.tokens % 8, advantage=good.advantage * float("nan"))
    dump = NonfiniteUpdates(1, tmp_path / "nonfinite", lambda to: shutil.copytree(FLAGS.parent / "model", to))
    with pytest.raises(NonfiniteUpdatesError):
        dump.observe(False, bad, 3, groups())
    left = tmp_path / "nonfinite" / "step_0000003"
    before = files(left)
    again = ("--load-hf", left / "model", "--rl-train-batch", left, "--rl-max-nonfinite-updates", 1)
    said = preloaded(1, *flags(tmp_path, "--tensor-model-parallel-size", 1, *again))
    assert "update_nonfinite 1\n" in said
    assert files(left) == before


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    return {x: (x.stat().st_ino, x.stat().st_mtime_ns) for x in folder.rglob("*")}


def test_the_policy_has_a_bucket_for_every_age_that_is_drawn(tmp_path: Path) -> None:
    """0 .. tau_max where ages are named, and otherwise one for fresh and one for replayed rollouts."""
    args = arguments.parse_args(flags(tmp_path, "--tensor-model-parallel-size", 1))
    config, shape = arguments.grpo_config(args), ModelShape.from_folder(args.load_hf)
    for named, buckets in ((False, 2), (True, config.replay.tau_max + 1)):
        replay = dataclasses.replace(config.replay, age_metrics=named)
        policy = build_policy(args, dataclasses.replace(config, replay=replay), shape, groups())
        assert (policy.head.age_buckets, policy.age_metrics) == (buckets, named)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--tokenizer-type", "BertTokenizer"), "--tokenizer-type"),
        (("--seq-length", 11), "--seq-length"),
        (("--seq-length", 128), "--seq-length must be at most the model's 64 positions, got 128"),
        (("--load", "nowhere"), "--load must name a folder with a checkpoint, got 'nowhere'"),
        (("--load-hf", "nowhere"), "--load-hf must name a folder with a config.json, got 'nowhere'"),
        (("--rl-task", "chess"), "--rl-task"),
        (("--tensor-model-parallel-size", 3), "must divide the number of processes, got 1"),
    ],
)
def test_bad_input_ends_with_an_error_that_names_the_flag(tmp_path: Path, more: tuple[object, ...], words: str) -> None:
    said = preloaded_failure(1, *flags(tmp_path, "--tensor-model-parallel-size", 1, *more))
    assert words in said, said[-2000:]
