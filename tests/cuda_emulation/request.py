"""Cases for the driver: a request of many, one run, the arrays that come back.

A launch sequence of csrc/ writes to memory of its own, so a case says what every array must hold afterwards, also
those that are only read: the rest of an output must be what it was before.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.cuda_emulation.toolchain import Mode, run

OPERATIONS = ("priority_draw", "repeated_draw", "ragged_gather", "ragged_scatter", "log_weights")


@dataclass(frozen=True)
class Array:
    """before: what the kernels find; after: what they must leave, bit for bit (nothing written if None).

    offset: the address modulo 16. check(got) is asked instead of a comparison, where there is one.
    """

    before: Tensor
    after: Tensor | None = None
    offset: int = 0
    check: Callable[[Tensor], None] | None = None


@dataclass(frozen=True)
class Case:
    label: str
    operation: str
    numbers: tuple[int, ...]
    arrays: tuple[Array, ...]

    def request(self) -> bytes:
        words = [OPERATIONS.index(self.operation), len(self.numbers), len(self.arrays), *self.numbers]
        parts = [_words(words)]
        for array in self.arrays:
            content = _bytes(array.before)
            parts += [_words([len(content), array.offset]), content]
        return b"".join(parts)

    def response_bytes(self) -> int:
        return sum(_size(array.before) for array in self.arrays)

    def check(self, response: bytes) -> None:
        at = 0
        for i, array in enumerate(self.arrays):
            content = response[at : at + _size(array.before)]
            at += len(content)
            got = torch.frombuffer(bytearray(content), dtype=array.before.dtype) if content else array.before
            if array.check is not None:
                array.check(got)
                continue
            expected = array.before if array.after is None else array.after
            if content != _bytes(expected):
                wrong = (got.view(torch.uint8) != expected.view(torch.uint8)).nonzero()
                where = int(wrong[0]) // got.element_size()
                raise AssertionError(
                    f"{self.label}: array {i} of {self.operation} differs in {len(wrong)} bytes, first at {where}: "
                    f"{got[where].item()} for {expected[where].item()}"
                )


def write_request(cases: Sequence[Case], path: Path) -> Path:
    path.write_bytes(b"".join(case.request() for case in cases))
    return path


def run_cases(program: Path, mode: Mode, request: Path, seed: int) -> tuple[subprocess.CompletedProcess, bytes]:
    """How the driver ended, and the arrays of the cases that it ended."""
    response = request.with_name(f"{program.name}-{seed}.response")
    done = run(program, mode, (request, response, seed))
    content = response.read_bytes()
    response.unlink()
    return done, content


def check_cases(program: Path, mode: Mode, cases: Sequence[Case], request: Path, seed: int) -> None:
    """Every case ends well, with the arrays that it must leave. An error names the first one that does not."""
    done, response = run_cases(program, mode, request, seed)
    at = 0
    for case in cases:
        content = response[at : at + case.response_bytes()]
        at += len(content)
        if len(content) < case.response_bytes():
            break
        case.check(content)
    else:
        if done.returncode == 0:
            return
    raise AssertionError(
        f"{case.label} of {case.operation}, {mode.name} mode, seed {seed}: exit status {done.returncode}\n"
        f"{done.stderr[:6000]}"
    )


def _words(values: Sequence[int]) -> bytes:
    return b"".join((value & (2**64 - 1)).to_bytes(8, "little") for value in values)


def _bytes(x: Tensor) -> bytes:
    return x.numpy().tobytes()


def _size(x: Tensor) -> int:
    return x.numel() * x.element_size()
