"""A Triton kernel compiled for a GPU that need not be there: resources from ptxas and the cubin, SASS counted.

Counts are of instructions in the machine code, not of executions.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+)")
# "/*0260*/  @!P0 LDG.E.128 R16, [R2.64] ;": the operation and its modifiers, after an optional predicate
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\w+)([.\w]*)", re.MULTILINE)
# global memory is also reached by generic addresses, and asynchronously into or out of shared memory
LOADS = ("LDG", "LD", "LDGSTS", "UBLKCP")
STORES = ("STG", "ST", "UBLKRED")


class TargetDriver:
    """What Triton's JIT asks of the active driver when it compiles and does not launch."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        # the JIT keeps what it compiled by device
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@dataclass(frozen=True)
class Binary:
    kernel: Any  # triton's CompiledKernel
    log: str  # of ptxas; empty where the JIT had this binary already


@contextmanager
def fresh_cache() -> Iterator[None]:
    """Compile everything anew inside the block: a binary from the cache would come without the log of ptxas."""
    before = {name: os.environ.get(name) for name in ("TRITON_CACHE_DIR", "TRITON_DUMP_PTXAS_LOG")}
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": folder, "TRITON_DUMP_PTXAS_LOG": "1"}
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def compile_launch(capability: int, kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> Binary:
    """What `kernel[grid](*args, **kwargs)` would run on a device of that capability; the tensors may be on the CPU."""
    driver.set_active(TargetDriver(capability))
    with contextlib.redirect_stdout(io.StringIO()) as log:
        compiled = kernel.warmup(*args, grid=grid, **kwargs)
    return Binary(compiled, log.getvalue())


def check_tools() -> None:
    """Raises RuntimeError unless the disassemblers that come with Triton are there."""
    for tool in (knobs.nvidia.cuobjdump, knobs.nvidia.nvdisasm):
        assert tool.path


def machine_code(binary: Binary) -> dict[str, Any]:
    """arch of the code, registers per thread, bytes of spills, stack and shared memory, counts of instructions.

    spill_bytes is ptxas' own sum of spill stores and loads; local_loads and local_stores count the instructions that
    reach local memory, which spills and arrays on the stack share. shared_bytes is what the launch asks for and what
    the cubin declares. Raises ValueError for a log or cubin that is not of exactly one kernel.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.kernel.asm["cubin"])
        file.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        listing = _output(knobs.nvidia.nvdisasm.path, "-c", file.name)
    resources = _only("cuobjdump -res-usage", USAGE, usage)
    spills = _only("the log of ptxas", SPILLS, binary.log)
    return {
        "arch": _only("the PTX", re.compile(r"^\.target (\w+)", re.MULTILINE), binary.kernel.asm["ptx"])[1],
        "registers": int(resources["registers"]),
        "spill_bytes": int(spills[2]) + int(spills[3]),
        "stack_bytes": int(resources["stack"]),
        "shared_bytes": binary.kernel.metadata.shared + int(resources["shared"]),
        **instruction_counts(listing),
    }


def instruction_counts(listing: str) -> dict[str, int]:
    """Counts of the instructions in nvdisasm's listing that matter to a kernel bound by memory."""
    found = Counter(INSTRUCTION.findall(listing))

    def count(operations: tuple[str, ...], modifier: str = "") -> int:
        return sum(n for (name, rest), n in found.items() if name in operations and modifier in f"{rest}.")

    return {
        "loads_128": count(LOADS, ".128."),
        "loads_256": count(LOADS, ".256."),
        "loads_total": count(LOADS),
        "stores_128": count(STORES, ".128."),
        "stores_256": count(STORES, ".256."),
        "stores_total": count(STORES),
        "local_loads": count(("LDL",)),
        "local_stores": count(("STL",)),
        "barriers": count(("BAR",)),
        "shuffles": count(("SHFL",)),
        "ex2": count(("MUFU",), ".EX2."),
        # the code is padded with NOP
        "instructions": sum(n for (name, _), n in found.items() if name != "NOP"),
    }


def _only(source: str, pattern: re.Pattern[str], text: str) -> re.Match[str]:
    matches = list(pattern.finditer(text))
    if len(matches) != 1:
        raise ValueError(f"{source} must be of one kernel, got {len(matches)}: {text!r}")
    return matches[0]


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
