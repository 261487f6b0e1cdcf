"""tools/gpu_check.sh without a GPU: what it refuses, what it would run, and the runner of its steps.

The steps themselves need a GPU; nothing here stands in for one.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.conftest import asks_for_gpus
from tests.launch import ROOT
from tools.run_steps import Step, parse

SCRIPT = ROOT / "tools" / "gpu_check.sh"
LIMIT = 600  # seconds
# what a bare machine does not have
ABSENT = (
    *("megatron", "transformers", "reasoning_gym", "safetensors", "sentencepiece", "tensorboard", "psutil", "tqdm"),
    *("xdist", "scipy"),
)

pytestmark = pytest.mark.slow

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine could run the check")


def check(*arguments: object, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | env
    command = ["bash", str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60)


def steps(*arguments: str) -> list[Step]:
    done = check("--dry-run", *arguments)
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def run_steps(folder: Path, text: str) -> tuple[int, dict]:
    out = folder / "out.json"
    command = [sys.executable, str(ROOT / "tools" / "run_steps.py"), str(out)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert [p.name for p in folder.glob(".out*")] == []
    return done.returncode, json.loads(out.read_text())


@pytest.mark.parametrize(
    ("expression", "expected"),
    [("gpu", True), ("gpu and not slow", True), ("not slow and gpu", True), ("", False), ("not slow", False),
     ("not gpu", False), ("slow and not gpu", False)],
)  # fmt: skip
def test_a_gpu_is_seen_by_those_who_ask_for_it(pytestconfig: pytest.Config, expression: str, expected: bool) -> None:
    assert asks_for_gpus(expression) is expected
    if not asks_for_gpus(pytestconfig.option.markexpr):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "" and not torch.cuda.is_available()


def test_it_is_valid_bash_and_executable() -> None:
    assert subprocess.run(["bash", "-n", str(SCRIPT)]).returncode == 0
    assert os.access(SCRIPT, os.X_OK)


@without_gpu
def test_without_a_gpu_it_refuses_before_it_does_anything(tmp_path: Path) -> None:
    extensions = {p: p.stat().st_mtime_ns for p in (ROOT / "megatron_replay").glob("_C*")}
    done = check(tmp_path / "out.json", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu_check.sh: no CUDA device: torch finds none\n"
    assert list(tmp_path.iterdir()) == []
    assert extensions == {p: p.stat().st_mtime_ns for p in (ROOT / "megatron_replay").glob("_C*")}


@pytest.mark.parametrize(
    ("argument", "env", "message"),
    [
        ("--fast", {}, "must be --full, --dry-run or OUT.json, got --fast"),
        ("nowhere/out.json", {}, "OUT.json must be in a folder that exists, got nowhere/out.json"),
        ("out.json", {"PYTHON": "no-such-python"}, "PYTHON must be an interpreter, got no-such-python"),
        ("out.json", {"PYTHON": "true"}, "PYTHON must have torch, got /"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, argument: str, env: dict, message: str) -> None:
    # an interpreter without torch
    if env.get("PYTHON") == "true":
        bare = tmp_path / "python"
        bare.write_text("#!/bin/sh\necho 'No module named torch' >&2\nexit 1\n")
        bare.chmod(0o755)
        env = {"PYTHON": str(bare)}
    done = check(argument, cwd=tmp_path, **env)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and done.stderr.startswith(f"gpu_check.sh: {message}")


def test_a_relative_interpreter_is_found_from_the_callers_folder(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    done = check("--dry-run", cwd=tmp_path, PYTHON="./python")
    assert f'"{tmp_path}/python"' in done.stdout


def test_its_limits_end_it_within_ten_minutes_and_its_scripts_exist() -> None:
    found = steps()
    benchmarks = ["benchmark_loss", "benchmark_buffer"]
    assert [s.name for s in found] == ["environment", "build", "gpu_tests", "kernel_report", *benchmarks]
    assert sum(s.timeout for s in found) < LIMIT
    for step in found:
        for script in re.findall(r"\S+\.py\b", step.command):
            assert list(ROOT.glob(script)), script
    loss, buffer = found[-2:]
    assert "--quick" in loss.command and "--tune" not in loss.command
    assert "--quick" in buffer.command and "--device cuda" in buffer.command
    full = {s.name: s.command for s in steps("--full")}
    assert "--tune" in full["benchmark_loss"] and full["benchmark_buffer"] == buffer.command


def files_of_the_check() -> set[Path]:
    (step,) = (s for s in steps() if s.name == "gpu_tests")
    patterns = re.findall(r"tests/\S+", step.command)
    found = {pattern: set(ROOT.glob(pattern)) for pattern in patterns}
    assert all(found.values()), found
    return set().union(*found.values())


def test_every_gpu_test_is_in_the_check() -> None:
    for path in set((ROOT / "tests").glob("test_*.py")) - files_of_the_check():
        text = path.read_text()
        assert not re.search(r"^@pytest\.mark\.gpu", text, re.MULTILINE), path
        assert not re.search(r"^def test_\w+\([^)]*\bdevice\b", text, re.MULTILINE), path


def test_its_tests_need_nothing_that_a_bare_machine_lacks() -> None:
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({ABSENT}))\n"  # None there makes an import fail
        "import pytest; sys.exit(pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    )
    command = [sys.executable, "-c", code, *map(str, sorted(files_of_the_check()))]
    # pytest would load the plugin of a package that is only hidden
    env = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]


def test_steps_that_pass(tmp_path: Path) -> None:
    text = """
        # a comment
        first 9 echo hello; echo '{"x": [1, 2]}' > "$RESULT"
        second 9 pwd
    """
    code, data = run_steps(tmp_path, text)
    assert code == 0
    assert (data["passed"], data["complete"]) == (True, True)
    assert next(iter(data)) == "passed"
    assert data["summary"] == {"first": "passed", "second": "passed"}
    first, second = data["steps"]
    assert (first["exit_code"], first["log_tail"], first["result"]) == (0, "hello\n", {"x": [1, 2]})
    assert (second["log_tail"], second["result"]) == (f"{ROOT}\n", None)
    assert data["seconds"] >= first["seconds"] >= 0


def test_a_failed_step_fails_the_check_and_keeps_no_other_from_running(tmp_path: Path) -> None:
    text = 'bad 9 echo "to stderr" >&2; exit 7\nodd 9 echo "{" > "$RESULT"\ngood 9 true\n'
    code, data = run_steps(tmp_path, text)
    assert code == 1
    assert (data["passed"], data["complete"]) == (False, True)
    assert data["summary"] == {"bad": "failed", "odd": "failed", "good": "passed"}
    bad, odd, _ = data["steps"]
    assert (bad["exit_code"], bad["log_tail"]) == (7, "to stderr\n")
    assert odd["exit_code"] == 0 and "$RESULT is no JSON" in odd["log_tail"]


def test_a_step_past_its_limit_ends_with_all_its_processes(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    text = f"slow 1 (sleep 3; touch {alive}) & echo begun; echo 1 > $RESULT; wait\nnext 9 true\n"
    code, data = run_steps(tmp_path, text)
    assert code == 1
    slow, following = data["steps"]
    assert slow["exit_code"] is None and not slow["passed"] and following["passed"]
    assert slow["log_tail"] == "begun\n[ended after its limit of 1 s]\n"
    assert slow["result"] == 1, "what it had written is kept"
    time.sleep(3)
    assert not alive.exists()


def test_what_a_step_leaves_running_ends_with_it(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    code, _ = run_steps(tmp_path, f"quick 9 (sleep 1; touch {alive}) & true\n")
    assert code == 0
    time.sleep(1.5)
    assert not alive.exists()


def test_each_step_is_written_when_it_is_done(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    code, data = run_steps(tmp_path, f"one 9 true\ntwo 9 cat {out}\n")
    assert code == 0
    seen = json.loads(data["steps"][1]["log_tail"])
    assert (seen["passed"], seen["complete"], seen["summary"]) == (False, False, {"one": "passed"})


def test_a_log_keeps_its_end(tmp_path: Path) -> None:
    _, data = run_steps(tmp_path, "long 9 seq 1 100000\n")
    tail = data["steps"][0]["log_tail"]
    assert tail.endswith("\n100000\n") and len(tail) < 20_000


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the list of steps must not be empty, got no line"),
        ("a 5\n", "line 1 must be NAME SECONDS COMMAND, got 'a 5'"),
        ("\na five true\n", "line 2 must be NAME SECONDS COMMAND, got 'a five true'"),
        ("a 0 true\n", "line 1 must be NAME SECONDS COMMAND, got 'a 0 true'"),
        ("a 5 true\na 5 true\n", "line 2 must have a name of its own, got 'a' again"),
        ("a/b 5 true\n", "line 1 must be NAME SECONDS COMMAND, got 'a/b 5 true'"),
    ],
)
def test_a_list_that_is_none_is_refused(tmp_path: Path, text: str, message: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "run_steps.py"), str(tmp_path / "out.json")]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"run_steps.py: {message}\n")
    assert list(tmp_path.iterdir()) == []
