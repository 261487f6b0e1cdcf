"""The launch sequences of csrc/*.cuh in the CPU emulator, against the definitions in torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cuda_emulation import draw_cases, ragged_cases
from tests.cuda_emulation.request import check_cases, write_request
from tests.cuda_emulation.toolchain import MODES, PLAIN, Toolchain

pytestmark = pytest.mark.slow

SEEDS = {"plain": range(4), "address": range(4, 6), "thread": range(6, 8)}


@pytest.fixture(scope="module")
def drivers(toolchain: Toolchain) -> dict[str, Path]:
    return toolchain.programs("driver.cpp")


@pytest.mark.parametrize("mode", MODES)
def test_kernels_agree_with_the_definition(
    drivers: dict[str, Path], require: Callable[[str], None], mode: str, tmp_path: Path
) -> None:
    require(mode)
    if mode == "thread":
        # what is ordered does not depend on the values, and every order of a thread takes its time
        cases = [*draw_cases.few_cases(), *ragged_cases.few_cases()]
    else:
        cases = [*draw_cases.draw_cases(), *draw_cases.few_cases(), *ragged_cases.ragged_cases()]
    cases += draw_cases.log_weight_cases()
    request = write_request(cases, tmp_path / "cases")
    for seed in SEEDS[mode]:
        check_cases(drivers[mode], MODES[mode], cases, request, seed)


def test_large_windows_and_rings_agree_with_the_definition(drivers: dict[str, Path], tmp_path: Path) -> None:
    cases = [*draw_cases.large_cases(), *ragged_cases.large_cases()]
    check_cases(drivers["plain"], PLAIN, cases, write_request(cases, tmp_path / "cases"), 0)
