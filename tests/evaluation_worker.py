"""tools/evaluate.py in worlds of several sizes, forked from a process that has imported everything.

    python tests/evaluation_worker.py FOLDER CASES.json

FOLDER/trained gets checkpoints of two steps of training and the Hugging Face folder saved after the first. Each case is
{"name", "world", "args"} and writes to FOLDER/NAME; with "kill_at" its one process is killed when samples.jsonl has so
many lines, and FOLDER/NAME.lines says how many it had.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.launch import ROOT

sys.path.insert(0, str(ROOT / "tools"))

import evaluate
from megatron.core import parallel_state

from megatron_replay.config import ReplayConfig
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.trainer import checkpoint
from megatron_replay.trainer.hf_checkpoint import save_hf
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.parallel.forked import run_world
from tests.preloaded import LATER
from tests.rollouts import batch
from tests.single_rank import groups, policy

MODEL = ROOT / "examples" / "quickstart" / "model"


def rank(args: list[str]) -> None:
    # the world ends its process groups itself
    evaluate.shutdown = parallel_state.destroy_model_parallel
    code = evaluate.main(args)
    assert code == 0


def train(folder: Path) -> None:
    shape, trained = ModelShape.from_folder(MODEL), policy(MODEL, lr=3e-3)
    buffer = RolloutReplayBuffer(ReplayConfig(warmup_steps=0), seed=9, arena_tokens=512)
    for step in (0, 1):
        fresh = batch([(6, 6)] * 8, birth_step=step, first_counter=10 * step, seed=step)
        fresh = fresh.replace(tokens=fresh.tokens % shape.vocab_size)
        trained.train(fresh, step)
        buffer.push(fresh)
        checkpoint.save(folder / "checkpoints", trained, buffer, checkpoint.RunState(step + 1, 0, {}))
        if step == 0:
            save_hf(folder / "hf", unwrap(trained.model), shape, groups(), base=MODEL)


def start(body: Callable[..., None], *args: Any) -> multiprocessing.Process:
    process = multiprocessing.get_context("fork").Process(target=body, args=args)
    process.start()
    return process  # type: ignore[return-value]


def kill_at(lines: int, out: Path, args: list[str]) -> int:
    """Lines of samples.jsonl when the process was killed."""
    process = start(rank, args)
    samples = out / "samples.jsonl"
    while not samples.is_file() or samples.read_bytes().count(b"\n") < lines:
        assert process.is_alive(), f"it ended before {lines} lines were there"
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return samples.read_bytes().count(b"\n")


def main(folder: Path, cases: list[dict[str, Any]]) -> None:
    for name in LATER:
        __import__(name)
    process = start(train, folder / "trained")
    process.join()
    assert process.exitcode == 0
    for number, case in enumerate(cases):
        out = folder / case["name"]
        args = [*case["args"], "--out", str(out)]
        if "kill_at" in case:
            (folder / f"{out.name}.lines").write_text(str(kill_at(case["kill_at"], out, args)))
        else:
            run_world(case["world"], folder / f"store.{number}", rank, args)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
