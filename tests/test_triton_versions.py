"""The kernels on the oldest Triton that they support; every other test runs on the newest."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.launch import ROOT, environment

OLDEST = ROOT / ".venv" / "triton-3.6.0"
FILES = ("test_triton_interpreter", "test_token_logprob_triton", "test_grpo_loss_triton", "test_kernel_report")


@pytest.mark.slow
def test_the_kernels_on_the_oldest_triton() -> None:
    if not (OLDEST / ".installed").exists():
        pytest.skip(f"there is no Triton in {OLDEST.relative_to(ROOT)}: `make test` puts it there where it installs")
    env = environment() | {"PYTHONPATH": os.pathsep.join([str(OLDEST), str(ROOT)])}
    version = [sys.executable, "-c", "import triton; print(triton.__version__)"]
    found = subprocess.run(version, env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert found == OLDEST.name.removeprefix("triton-")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/{name}.py" for name in FILES)],
        env=env,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
