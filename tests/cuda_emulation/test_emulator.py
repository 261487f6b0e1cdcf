"""The emulator itself: each deliberate fault of self_test/ is seen by the mode that is there for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda_emulation.toolchain import MODES, Toolchain, run

pytestmark = pytest.mark.slow

WRONG = "wrong: "
RACE = "ThreadSanitizer: data race"
# fault: what each mode that sees it says
FAULTS = {
    "missing_barrier": {"plain": WRONG, "thread": RACE},
    "missing_second_barrier": {"plain": WRONG, "thread": RACE},
    "missing_syncwarp": {"plain": WRONG, "thread": RACE},
    "half_a_barrier": {"plain": "__syncthreads reached by 32 of 64 threads: thread 0 waits .* thread 32 has exited"},
    "barrier_behind_exit": {"address": "__syncthreads reached by 40 of 64 threads: .* thread 40 has exited"},
    "barriers_of_two_branches": {"thread": "one __syncthreads on two lines: thread 0 waits at .*, thread 32 waits at"},
    "lanes_that_do_not_come": {"plain": "deadlock: thread 0 waits at __shfl_down_sync .* 0xffffffff, and thread 16"},
    "lanes_that_have_exited": {"plain": "deadlock: thread 0 waits at __syncwarp .* and thread 7 has exited"},
    "lane_outside_its_mask": {"plain": "calls __syncwarp .* its lane is not in the mask 0x0000ffff"},
    "read_outside_the_mask": {"plain": r"reads lane \d+ at __shfl_xor_sync .* not in the mask 0x0000ffff"},
    "lanes_that_are_not_there": {"plain": "mask 0xffffffff names lanes that a block of 20 threads lacks"},
    "uninitialised_shared/plain": {"plain": WRONG, "thread": WRONG},
    "uninitialised_shared/template": {"plain": WRONG, "thread": WRONG},
    "beyond_shared/plain": {"address": "AddressSanitizer: global-buffer-overflow"},
    "beyond_shared/template": {"address": r"index 63 out of bounds for type 'int \[63\]'"},
    "beyond_global": {"address": "AddressSanitizer: heap-buffer-overflow"},
    "before_global": {"address": "AddressSanitizer: heap-buffer-overflow"},
    "misaligned": {"address": "misaligned address .* 'struct int4', which requires 16 byte alignment"},
    "signed_overflow": {"address": "signed integer overflow"},
    "plain_increment": {"thread": RACE},
    "blocks_that_meet": {"thread": RACE},
    "blocks_in_order": {"plain": WRONG},
    "empty_grid": {"plain": "kernel atomic_increment: a grid of 0 blocks of 64 threads cannot be launched"},
}
Require = Callable[[str], None]
CASES = [(fault, mode, words) for fault, modes in FAULTS.items() for mode, words in modes.items()]


@pytest.fixture(scope="module")
def programs(toolchain: Toolchain) -> dict[str, Path]:
    return toolchain.programs("self_test/main.cpp")


@pytest.mark.parametrize("mode", MODES)
def test_right_kernels_are_clean(programs: dict[str, Path], require: Require, mode: str) -> None:
    require(mode)
    for seed in range(3):
        done = run(programs[mode], MODES[mode], ("right/", seed))
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok: 11\n", ""), f"seed {seed}: {done}"


@pytest.mark.parametrize(("fault", "mode", "words"), CASES)
def test_faults_are_seen(programs: dict[str, Path], require: Require, fault: str, mode: str, words: str) -> None:
    require(mode)
    # by the first seed or by one of a few: an order of threads may happen to do no harm
    said = [run(programs[mode], MODES[mode], (fault, seed)) for seed in range(1 if words != WRONG else 4)]
    assert any(done.returncode != 0 and re.search(words, done.stdout + done.stderr) for done in said), said


def test_a_run_is_a_function_of_its_seed(programs: dict[str, Path]) -> None:
    said = [run(programs["plain"], MODES["plain"], ("missing_second_barrier", seed)).stdout for seed in (0, 0, 1, 2, 3)]
    assert said[0] == said[1] and len(set(said)) > 1


@pytest.mark.parametrize("fault", ["blocks_that_meet", "plain_increment"])
def test_what_only_a_race_detector_sees(programs: dict[str, Path], fault: str) -> None:
    """Without it these give the right answers: blocks run one after another, a thread until it must wait."""
    assert run(programs["plain"], MODES["plain"], (fault, 0)).returncode == 0
