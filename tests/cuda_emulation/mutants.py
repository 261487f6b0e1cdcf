"""The kernels with one barrier less, or with one atomic taken apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cuda_emulation.toolchain import CSRC

BARRIER = re.compile(r"__sync(?:threads|warp)\w*\([^;]*\);")
ATOMIC = re.compile(r"\batomic([A-Z]\w*)\(")
# an atomic's function, and the same in three steps that another thread may come between
PLAIN = {
    "Add": """
template <class T>
__device__ T plainAdd(T* at, T value) {
    const T before = *at;
    *at = before + value;
    return before;
}
""",
}


@dataclass(frozen=True)
class Mutant:
    header: str
    line: int
    removed: str
    text: str

    def __str__(self) -> str:
        return f"{self.header}:{self.line} without {self.removed}"

    def write(self, folder: Path) -> Path:
        """The folder, with the header that stands in for csrc's."""
        folder.mkdir()
        (folder / self.header).write_text(self.text)
        return folder


def mutants(folder: Path = CSRC) -> Iterator[Mutant]:
    """One for each barrier and each atomic of the kernels' headers. ValueError for an atomic without a plain form."""
    for path in sorted(folder.glob("*.cuh")):
        source = path.read_text()
        for site in BARRIER.finditer(source):
            yield _without(path.name, source, site, "", ";")
        for site in ATOMIC.finditer(source):
            if site[1] not in PLAIN:
                raise ValueError(f"{path.name} uses atomic{site[1]}, and there is no plain form of it to test it with")
            yield _without(path.name, source, site, PLAIN[site[1]], f"plain{site[1]}(")


def unchanged(header: str) -> Mutant:
    """The kernels as they are, in the place of a mutant."""
    return Mutant(header, 0, "a change", (CSRC / header).read_text())


def _without(header: str, source: str, site: re.Match[str], prelude: str, instead: str) -> Mutant:
    line = source.count("\n", 0, site.start()) + 1
    changed = source[: site.start()] + instead + source[site.end() :]
    return Mutant(header, line, site[0].rstrip("(;"), prelude + changed)
