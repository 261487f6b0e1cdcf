"""One run at a time in a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_replay.run.lock import LOCK_FILE, RunLock
from megatron_replay.telemetry import RunLog
from tests.launch import ROOT

HOLD = """
import sys, time
from megatron_replay.run.lock import RunLock
lock = RunLock()
lock.take(sys.argv[1], "--run-dir")
print("held", flush=True)
time.sleep(60)
"""


def test_a_folder_in_use_is_refused_and_a_killed_run_leaves_it_free(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    lock = RunLock()
    try:
        with pytest.raises(RuntimeError, match=rf"--save {tmp_path} is in use by another run, process {other.pid} on "):
            lock.take(tmp_path, "--save")
        with pytest.raises(RuntimeError, match=r"--run-dir .* is in use"):
            RunLog(tmp_path, start_step=0, total_steps=1)
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    lock.take(tmp_path, "--save")
    assert (tmp_path / LOCK_FILE).read_text().startswith(f"process {os.getpid()} on ")
    lock.release()
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_sets_an_earlier_one_aside_holds_the_new_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    log = RunLog(folder, start_step=0, total_steps=1)
    assert (tmp_path / "run.1" / "metrics.jsonl").exists()
    with pytest.raises(RuntimeError, match=r"--run-dir .*run is in use by another run"):
        RunLock().take(folder, "--run-dir")
    RunLock().take(tmp_path / "run.1", "--run-dir")
    log.close()
    RunLock().take(folder, "--run-dir")


def test_a_run_may_save_in_its_own_folder(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run", start_step=0, total_steps=1)
    (tmp_path / "link").symlink_to("run")
    for same in (tmp_path / "run", tmp_path / "link", tmp_path / "x" / ".." / "run"):
        log.hold(same, "--save")
    with pytest.raises(RuntimeError, match=r"--save .*run is in use by another run"):
        RunLock().take(tmp_path / "run", "--save")
    log.close()
    assert not (tmp_path / "run" / LOCK_FILE).exists()
