"""Rows between rings and packed tensors for the emulated kernels, with the definition's answers.

Dims: A tokens of a ring, n rows, T tokens of the n rows together, C slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_replay.ops import ragged_gather_reference as reference
from tests.cuda_emulation.request import Array, Case

# (ring, packed) dtypes by the number of the element in csrc/ragged_copy.h; a bool is a byte
ELEMENTS = {0: (torch.uint8, torch.uint8), 1: (torch.float32, torch.float32), 2: (torch.int32, torch.int64)}
LENGTHS = (0, 1, 2, 3, 15, 16, 17, 33, 70)


def aligned_rows(ring_tokens: int) -> tuple[Tensor, Tensor]:
    """start [n], cu_seqlens [n+1] with every pair of start mod 16 and offset mod 16, in turn with filling rows."""
    start, length, total = [], [], 0
    for i in range(256):
        filling = (i // 16 - total) % 16
        start += [i * 7 % ring_tokens, (i % 16 + 16 * i) % (ring_tokens // 16 * 16)]
        length += [filling, LENGTHS[i % len(LENGTHS)]]
        total += sum(length[-2:])
    cu = _cumulative(length)
    pairs = set(zip((torch.tensor(start) % 16).tolist(), (cu[:-1] % 16).tolist(), strict=True))
    assert len(pairs) == 256
    return torch.tensor(start), cu


def gather(label: str, ring_tokens: int, start: Tensor, cu: Tensor, offsets: Sequence[int] = (0, 0, 0)) -> Case:
    arrays = [Array(start, offset=8), Array(cu, offset=4)]
    for element, (ring_dtype, packed_dtype) in ELEMENTS.items():
        ring, packed = _random(ring_tokens, ring_dtype), _random(int(cu[-1]), packed_dtype)
        after = packed.clone()
        reference.ragged_gather([ring], start, cu, [after])
        arrays += _pair(ring, packed, offsets[element], packed_after=after)
    return Case(label, "ragged_gather", (ring_tokens, len(start), *ELEMENTS), tuple(arrays))


def scatter(label: str, ring_tokens: int, start: Tensor, cu: Tensor, offsets: Sequence[int] = (0, 0, 0)) -> Case:
    arrays = [Array(start, offset=8), Array(cu, offset=4)]
    for element, (ring_dtype, packed_dtype) in ELEMENTS.items():
        ring, packed = _random(ring_tokens, ring_dtype), _random(int(cu[-1]), packed_dtype)
        after = ring.clone()
        reference.ragged_scatter([after], start, cu, [packed])
        arrays += _pair(ring, packed, offsets[element], ring_after=after)
    return Case(label, "ragged_scatter", (ring_tokens, len(start), *ELEMENTS), tuple(arrays))


def ragged_cases() -> Iterator[Case]:
    for offsets in ((0, 0, 0), (1, 4, 8), (15, 12, 8)):
        yield gather(f"all alignments from {offsets}", 1003, *aligned_rows(1003), offsets)
    for tokens in (1, 7, 16, 999):
        start = torch.tensor([tokens - 1, 0, tokens // 2])
        for lengths in ((tokens, tokens, tokens), (1, 0, 1), (0, 0, 0)):
            yield gather(f"rows of {lengths} in a ring of {tokens}", tokens, start, _cumulative(lengths))
    yield gather("no rows", 5, torch.empty(0, dtype=torch.int64), _cumulative([]))
    for tail in (0, 1, 13, 990, 1002):
        for turn in range(3):
            length = torch.tensor(LENGTHS).roll(turn).repeat(4)
            cu = _cumulative(length.tolist())
            start = (tail + cu[:-1].long()) % 1003
            yield scatter(f"rows from token {tail}, turn {turn}", 1003, start, cu, (3 * turn, 4 * turn, 8 * (turn % 2)))
    for tail in (0, 5):
        yield scatter(f"one row fills the ring from {tail}", 64, torch.tensor([tail]), _cumulative([64]))
    yield scatter("no rows", 5, torch.empty(0, dtype=torch.int64), _cumulative([]))


def few_cases() -> Iterator[Case]:
    start, cu = aligned_rows(1003)
    yield gather("64 rows of many alignments", 1003, start[:64], cu[:65])
    length = torch.tensor(LENGTHS)
    cu = _cumulative(length.tolist())
    yield scatter("rows around the ring's end", 203, (190 + cu[:-1].long()) % 203, cu)


def large_cases() -> Iterator[Case]:
    length = [*torch.randint(0, 60, (3000,)).tolist(), 20_000, 1, 30_001]
    cu = _cumulative(length)
    yield gather("3003 rows", 50_000, torch.randint(0, 50_000, (3003,)), cu)
    ring_tokens = int(cu[-1]) + 11
    yield scatter("3003 rows", ring_tokens, (cu[:-1].long() + 12_345) % ring_tokens, cu)


def _pair(
    ring: Tensor, packed: Tensor, offset: int, *, ring_after: Tensor | None = None, packed_after: Tensor | None = None
) -> list[Array]:
    """The two sides begin at different offsets, each a multiple of its element."""
    ring_offset = offset // ring.element_size() * ring.element_size()
    packed_offset = (16 - ring_offset) % 16 // packed.element_size() * packed.element_size()
    return [Array(ring, ring_after, ring_offset), Array(packed, packed_after, packed_offset)]


def _random(count: int, dtype: torch.dtype) -> Tensor:
    """Any bits, of NaN as well. 64-bit ids and those in an int32 ring are ids, which both hold."""
    if dtype == torch.int64:
        return torch.randint(0, 2**31, (count,))
    raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype)


def _cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()
