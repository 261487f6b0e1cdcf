"""Every barrier and every atomic of the kernels is needed, and the emulator sees where one is missing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.cuda_emulation import draw_cases, ragged_cases
from tests.cuda_emulation.mutants import Mutant, mutants, unchanged
from tests.cuda_emulation.request import run_cases, write_request
from tests.cuda_emulation.toolchain import PLAIN, THREAD, Toolchain

pytestmark = pytest.mark.slow

SEEDS = {"plain": range(4), "thread": range(2)}
# what no test needs, as a mutant's str, and why it stays
REDUNDANT: dict[str, str] = {}


def how_it_is_seen(mutant: Mutant, toolchain: Toolchain, name: str, request: Path, right: bytes) -> str:
    """The mode and the seed that tell the mutant from the kernels, or "" where none does."""
    folder = mutant.write(toolchain.folder / name)
    for mode in (PLAIN, THREAD):
        program = toolchain.program("driver.cpp", mode, name=name, include=folder, fast=True)
        for seed in SEEDS[mode.name]:
            done, response = run_cases(program, mode, request, seed)
            if done.returncode != 0 or response != right:
                return f"{mode.name}, seed {seed}"
    return ""


def test_each_barrier_and_atomic_is_needed(
    toolchain: Toolchain, require: Callable[[str], None], tmp_path: Path
) -> None:
    require("thread")
    request = write_request([*draw_cases.few_cases(), *ragged_cases.few_cases()], tmp_path / "cases")
    done, right = run_cases(toolchain.program("driver.cpp", PLAIN), PLAIN, request, 0)
    assert done.returncode == 0, done.stderr
    # the first one shows that a mutant is seen for what it lacks, not for being one
    tried = [unchanged("priority_draw.cuh"), *mutants()]
    assert len(tried) > 8, [str(mutant) for mutant in tried]
    for mode in (PLAIN, THREAD):
        toolchain.emulator(mode)
    with ThreadPoolExecutor(2) as pool:
        names = [f"mutant-{i}" for i in range(len(tried))]
        seen = list(
            pool.map(lambda mutant, name: how_it_is_seen(mutant, toolchain, name, request, right), tried, names)
        )
    table = "\n".join(f"{mutant}: {by or 'not seen'}" for mutant, by in zip(tried, seen, strict=True))
    missed = [str(mutant) for mutant, by in zip(tried, seen, strict=True) if not by]
    assert missed == [str(tried[0]), *REDUNDANT], table


def test_an_atomic_without_a_plain_form_is_named(tmp_path: Path) -> None:
    (tmp_path / "new.cuh").write_text("if (lane == 0) atomicXor(&bits, 1u);\n")
    with pytest.raises(ValueError, match=r"^new\.cuh uses atomicXor, and there is no plain form"):
        list(mutants(tmp_path))
