"""What nvcc makes of csrc/*.cu with the flags of the build: registers, spills, stack, shared memory of each kernel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest

from tests.launch import ROOT

pytestmark = pytest.mark.slow

ARCHS = ("80", "90", "100")
SOURCES = sorted((ROOT / "csrc").glob("*.cu"))
REGISTERS = 65536  # of a multiprocessor, on all of ARCHS; a warp's are given out 8 a thread at a time
BLOCKS = 2  # that a multiprocessor must hold at a time
SHARED_BYTES = 48 * 1024  # what a launch gets without asking for more
KERNEL = re.compile(r"__global__ void(?: __launch_bounds__\((\w+)(?:, *\d+)?\))?\s+(\w+)\(")
ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)' for 'sm_(?P<arch>\w+)'\n.*\n"
    r"\s*(?P<stack>\d+) bytes stack frame, (?P<stored>\d+) bytes spill stores, (?P<loaded>\d+) bytes spill loads\n"
    r".*Used (?P<registers>\d+) registers(?P<rest>.*)"
)


@dataclass(frozen=True)
class Usage:
    """registers a thread; stack_bytes and spill_bytes a thread; shared_bytes and threads a block."""

    kernel: str
    arch: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    threads: int

    def over_budget(self) -> str:
        """What is too much, or ""."""
        allocated = -(-self.registers // 8) * 8 * self.threads * BLOCKS
        reasons = {
            f"{self.spill_bytes} bytes spilled": self.spill_bytes > 0,
            # an array that is not in registers: no kernel here has one that is indexed at run time
            f"{self.stack_bytes} bytes of stack": self.stack_bytes > 0,
            f"{allocated} registers for {BLOCKS} blocks": allocated > REGISTERS,
            f"{self.shared_bytes} bytes of shared memory": self.shared_bytes > SHARED_BYTES,
        }
        return ", ".join(reason for reason, too_much in reasons.items() if too_much)


def setup_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def launch_bounds() -> dict[str, int]:
    """Threads a block of every kernel in csrc."""
    headers = [path.read_text() for path in sorted((ROOT / "csrc").glob("*.cu*"))]
    sizes = {name: int(n) for text in headers for name, n in re.findall(r"constexpr int (k\w+) = (\d+);", text)}
    return {name: sizes[bound] for text in headers for bound, name in KERNEL.findall(text)}


def parsed(said: str, bounds: dict[str, int]) -> list[Usage]:
    """Of ptxas -v; one Usage an entry function and architecture."""
    entries = list(ENTRY.finditer(said))
    mangled = "\n".join(entry["name"] for entry in entries)
    filtered = subprocess.run(["c++filt", "-p"], input=mangled, capture_output=True, text=True, check=True).stdout
    usages = []
    for entry, name in zip(entries, filtered.split(), strict=True):
        kernel = name.rpartition("::")[2]
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        spilled = int(entry["stored"]) + int(entry["loaded"])
        numbers = (int(entry["registers"]), spilled, int(entry["stack"]), int(shared[1]) if shared else 0)
        usages.append(Usage(kernel, f"sm_{entry['arch']}", *numbers, bounds[kernel.partition("<")[0]]))
    return usages


def table(usages: list[Usage]) -> str:
    rows = [tuple(field.name for field in fields(Usage)), *(tuple(map(str, astuple(usage))) for usage in usages)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n" + "\n".join("  ".join(f"{x:{w}}" for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


@pytest.fixture(scope="module")
def usages(tmp_path_factory: pytest.TempPathFactory) -> list[Usage]:
    setup = setup_script()
    if (nvcc := setup.find_nvcc()) is None:
        pytest.skip("nvcc is not found, or MEGATRON_REPLAY_CUDA=0")
    folder = tmp_path_factory.mktemp("cubins")
    command = [*setup.cuda_command(nvcc, list(ARCHS)), "-Xptxas", "-v", "-Werror", "all-warnings"]

    def compiled(source: Path) -> str:
        whole = [*command, "-c", str(source), "-o", str(folder / f"{source.stem}.o")]
        done = subprocess.run(whole, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stderr

    with ThreadPoolExecutor(2) as pool:
        said = "".join(pool.map(compiled, SOURCES))
    return parsed(said, launch_bounds())


def test_every_kernel_is_compiled_for_every_architecture(usages: list[Usage]) -> None:
    found = {(usage.kernel.partition("<")[0], usage.arch) for usage in usages}
    assert found == {(kernel, f"sm_{arch}") for kernel in launch_bounds() for arch in ARCHS}, table(usages)


def test_kernels_stay_within_their_budgets(usages: list[Usage]) -> None:
    over = [f"{usage.kernel} on {usage.arch}: {usage.over_budget()}" for usage in usages if usage.over_budget()]
    assert not over, "\n".join(over) + table(usages)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"registers": 128}, ""),
        ({"registers": 129}, "69632 registers for 2 blocks"),
        ({"spill_bytes": 8, "stack_bytes": 16}, "8 bytes spilled, 16 bytes of stack"),
        ({"shared_bytes": SHARED_BYTES + 1}, "49153 bytes of shared memory"),
    ],
)
def test_what_is_too_much(change: dict[str, int], words: str) -> None:
    fine = {"registers": 32, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": SHARED_BYTES, "threads": 256}
    assert Usage("k", "sm_90", **(fine | change)).over_budget() == words


def test_the_words_of_ptxas_are_understood() -> None:
    name = "_ZN15megatron_replay9copy_rowsILb1EEEvNS_10RaggedRowsE"
    said = (
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90'\n"
        f"ptxas info    : Function properties for {name}\n"
        "    24 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads\n"
        "ptxas info    : Used 47 registers, used 1 barriers, 24 bytes cumulative stack size, 512 bytes smem\n"
    )
    assert parsed(said, {"copy_rows": 128}) == [Usage("copy_rows<true>", "sm_90", 47, 12, 24, 512, 128)]
