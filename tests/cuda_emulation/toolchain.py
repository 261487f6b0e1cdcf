"""g++ for the emulator's programs, in three modes, and how they are run."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.launch import ROOT

HERE = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
FLAGS = ("-std=c++17", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-g1", "-pthread")


@dataclass(frozen=True)
class Mode:
    """program: flags of what is under test. The emulator itself is never instrumented, but told of the sanitizer."""

    name: str
    program: tuple[str, ...]
    emulator: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)


PLAIN = Mode("plain", ("-O2",))
ADDRESS = Mode(
    "address",
    ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    ("-DSIMT_ASAN",),
    {"ASAN_OPTIONS": "detect_leaks=0:exitcode=66", "UBSAN_OPTIONS": "print_stacktrace=0"},
)
THREAD = Mode(
    "thread",
    ("-O1", "-fsanitize=thread"),
    ("-DSIMT_TSAN",),
    {"TSAN_OPTIONS": "halt_on_error=1:exitcode=66:report_thread_leaks=0"},
)
MODES = {mode.name: mode for mode in (PLAIN, ADDRESS, THREAD)}


def obstacle() -> str | None:
    """Why nothing can be built here, or None."""
    if platform.machine() != "x86_64":
        return f"the emulator switches stacks on x86-64 only, this is {platform.machine()}"
    return None if shutil.which("g++") else "g++ is not in PATH"


class Toolchain:
    """Builds into one folder, each thing once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._emulators: dict[str, Path] = {}
        self._obstacles: dict[str, str | None] = {}

    def obstacle(self, mode: Mode) -> str | None:
        """Why an empty program does not build and run in this mode, or None."""
        if mode.name not in self._obstacles:
            target = self.folder / f"empty-{mode.name}"
            try:
                _compile([*mode.program, "-x", "c++", "-", "-o", str(target)], "int main() {}\n")
                done = run(target, mode, ())
                why = None if done.returncode == 0 else f"it ends with {done.returncode}: {done.stderr.strip()[-200:]}"
            except RuntimeError as error:
                why = str(error)[-200:]
            self._obstacles[mode.name] = why and f"no program runs with {' '.join(mode.program)} here: {why}"
        return self._obstacles[mode.name]

    def emulator(self, mode: Mode) -> Path:
        """The emulator's object file. One translation unit: six of them take twice the time."""
        if mode.name not in self._emulators:
            target = self.folder / f"emulator-{mode.name}.o"
            parts = "".join(f'#include "{path}"\n' for path in sorted((HERE / "simt").glob("*.cpp")))
            _compile(["-O2", *mode.emulator, f"-I{HERE / 'simt'}", "-x", "c++", "-", "-c", "-o", str(target)], parts)
            self._emulators[mode.name] = target
        return self._emulators[mode.name]

    def program(
        self, source: str, mode: Mode, *, name: str = "", include: Path | None = None, fast: bool = False
    ) -> Path:
        """`source` built in a mode. include: headers that stand in for csrc's; fast: for the compiler, not the program.

        Raises RuntimeError with g++'s words.
        """
        target = self.folder / f"{name or source.replace('/', '-')}-{mode.name}"
        if not target.exists():
            folders = [f"-I{folder}" for folder in (include, HERE, CSRC) if folder is not None]
            optimise = ["-O1"] if fast else []
            arguments = [*mode.program, *optimise, *folders, str(HERE / source), str(self.emulator(mode))]
            _compile([*arguments, "-o", str(target)])
        return target

    def programs(self, source: str) -> dict[str, Path]:
        """`source` in every mode that works here, two compilers at a time."""
        modes = [mode for mode in MODES.values() if self.obstacle(mode) is None]
        with ThreadPoolExecutor(2) as pool:
            built = list(pool.map(lambda mode: self.program(source, mode), modes))
        return {mode.name: program for mode, program in zip(modes, built, strict=True)}


def run(program: Path, mode: Mode, arguments: Sequence[object], timeout: float = 120) -> subprocess.CompletedProcess:
    command = [str(program), *map(str, arguments)]
    environment = os.environ | mode.environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


def _compile(arguments: list[str], source: str = "") -> None:
    done = subprocess.run(["g++", *FLAGS, *arguments], input=source, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"g++ {' '.join(arguments)} ended with {done.returncode}\n{done.stderr[-4000:]}")
