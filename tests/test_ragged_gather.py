"""Rows between rings and packed tensors: both implementations against a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_replay.ops.ragged_gather import PACKED_DTYPE, ragged_gather, ragged_scatter, take_records

BACKENDS = ("reference", "cpp")
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def rings(tokens: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, 2**31 - 1, (tokens,), generator=g, dtype=torch.int32)
    return [ids, torch.rand(tokens, generator=g) < 0.5, torch.randn(tokens, generator=g)]


def cu_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_like(source: list[Tensor], tokens: int) -> list[Tensor]:
    return [torch.zeros(tokens, dtype=PACKED_DTYPE[x.dtype]) for x in source]


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 70), st.data(), st.sampled_from(BACKENDS))
def test_gather_is_a_loop_over_tokens(tokens: int, data: st.DataObject, backend: str) -> None:
    rows = data.draw(st.lists(st.tuples(st.integers(0, tokens - 1), st.integers(0, tokens)), max_size=12))
    source, lengths = rings(tokens), [n for _, n in rows]
    out = packed_like(source, sum(lengths))
    ragged_gather(source, torch.tensor([s for s, _ in rows], dtype=torch.int64), cu_of(lengths), out, backend=backend)
    for ring, packed in zip(source, out, strict=True):
        assert packed.tolist() == [ring[(s + j) % tokens].item() for s, n in rows for j in range(n)]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=8), st.integers(0, 200), st.integers(0, 5), st.sampled_from(BACKENDS))
def test_scatter_is_the_inverse_and_writes_nothing_else(
    lengths: list[int], first: int, spare: int, backend: str
) -> None:
    total = sum(lengths)
    tokens = total + spare + 1
    cu = cu_of(lengths)
    start = (first + cu[:-1].long()) % tokens
    target = rings(tokens)
    before = [x.clone() for x in target]
    source = [x.to(PACKED_DTYPE[x.dtype]) for x in rings(total + 300)]
    source = [x[:total].contiguous() for x in source]
    ragged_scatter(target, start, cu, source, backend=backend)
    back = packed_like(target, total)
    ragged_gather(target, start, cu, back, backend=backend)
    untouched = [(first + i) % tokens for i in range(total, tokens)]
    for a, b, ring, old in zip(source, back, target, before, strict=True):
        assert torch.equal(a, b) and torch.equal(ring[untouched], old[untouched])


@each_backend
def test_it_writes_into_the_part_of_a_larger_tensor_that_it_is_given(backend: str) -> None:
    source = rings(40)
    for offset in range(9):  # every alignment of the target
        whole = [x.fill_(1) for x in packed_like(source, 60)]
        out = [x[offset : offset + 33] for x in whole]
        ragged_gather(source, torch.tensor([35, 2]), cu_of([16, 17]), out, backend=backend)
        at = [(35 + j) % 40 for j in range(16)] + list(range(2, 19))
        for ring, x in zip(source, whole, strict=True):
            assert torch.equal(x[offset : offset + 33], ring[at].to(x.dtype))
            assert bool((x[:offset] == 1).all()) and bool((x[offset + 33 :] == 1).all())


@each_backend
def test_records_of_slots_and_the_bounds_of_their_rows(backend: str) -> None:
    records = torch.tensor([[7, 5, 3], [8, 0, 0], [9, 9, 4], [6, 2, 2**31 - 8]])

    def taken(slots: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        return take_records(records, torch.tensor(slots, dtype=torch.int64), start=1, length=2, backend=backend)

    record, start, cu = taken([2, 1, 0, 2])
    assert torch.equal(record, records[[2, 1, 0, 2]])
    assert start.tolist() == [9, 0, 5, 9] and cu.tolist() == [0, 4, 4, 7, 11] and cu.dtype == torch.int32
    record, start, cu = taken([])
    assert record.shape == (0, 3) and start.numel() == 0 and cu.tolist() == [0]
    for bad in (4, -1):
        with pytest.raises(ValueError, match=rf"slots must be in \[0, 4\), got ({bad}|.* to {bad}|{bad} to .*)"):
            taken([0, bad])
    with pytest.raises(OverflowError, match="cu_seqlens: 2147483648 tokens do not fit int32"):
        taken([3, 2, 2])
    assert taken([3, 0, 1, 2, 1])[2].tolist()[-1] == 2**31 - 1, "which int32 holds"
    for bad in (torch.tensor([0]).int(), torch.arange(4)[::2]):
        with pytest.raises(ValueError, match=r"slots must be torch.int64 \[\d\] on cpu, contiguous"):
            take_records(records, bad, start=1, length=2, backend=backend)
    with pytest.raises(ValueError, match="length must be one of the 3 columns, got 3"):
        take_records(records, torch.tensor([0]), start=1, length=3, backend=backend)
    with pytest.raises(ValueError, match="records must be torch.int64"):
        take_records(records.float(), torch.tensor([0]), start=1, length=2, backend=backend)


@pytest.mark.parametrize("threads", [1, 3])
def test_many_rows_over_threads(threads: int) -> None:
    g = torch.Generator().manual_seed(0)
    source = rings(5000)
    lengths = torch.randint(0, 40, (2000,), generator=g).tolist()
    start = torch.randint(0, 5000, (2000,), generator=g)
    out, expected = packed_like(source, sum(lengths)), packed_like(source, sum(lengths))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        ragged_gather(source, start, cu_of(lengths), out, backend="cpp")
    finally:
        torch.set_num_threads(before)
    ragged_gather(source, start, cu_of(lengths), expected, backend="reference")
    assert all(torch.equal(a, b) for a, b in zip(out, expected, strict=True))


def call(backend: str, **change: Any) -> None:
    source = rings(10)
    arguments = {
        "rings": source,
        "start": torch.tensor([8, 0]),
        "cu_seqlens": cu_of([4, 3]),
        "packed": packed_like(source, 7),
    }
    ragged_gather(**(arguments | change), backend=backend)


@each_backend
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"start": torch.tensor([8])}, r"cu_seqlens must be torch.int32 \[2\]"),
        ({"start": torch.tensor([8, 0]).int()}, r"start must be torch.int64 \[2\] on cpu"),
        ({"start": torch.tensor([10, 0])}, r"start must be in \[0, 10\), got (0 to )?10"),
        ({"start": torch.tensor([-1, 0])}, r"start must be in \[0, 10\), got -1"),
        ({"cu_seqlens": cu_of([4, 3]).long()}, r"cu_seqlens must be torch.int32 \[3\]"),
        ({"cu_seqlens": cu_of([4, 2])}, "cu_seqlens must .* 7 packed tokens"),
        ({"cu_seqlens": cu_of([11, -4])}, "cu_seqlens must rise .* 10"),
        ({"cu_seqlens": cu_of([-1, 8])}, "cu_seqlens must rise"),
        (
            {"start": torch.tensor([0]), "cu_seqlens": cu_of([11]), "packed": packed_like(rings(10), 11)},
            "cu_seqlens must rise .* 10 .*11",
        ),
        ({"cu_seqlens": cu_of([4, 3]) + 1}, "cu_seqlens must .*, got 1"),
        ({"cu_seqlens": torch.tensor([1, 4, 7]).int()}, "cu_seqlens must .*, got 1"),
        (
            {"packed": packed_like(rings(10), 7)[:2]},
            "packed must have one tensor for each of 3 rings, at least 1, got 2",
        ),
        ({"packed": packed_like(rings(10), 7)[::-1]}, r"packed\[0\] must be torch.int64 \[7\]"),
        ({"packed": [x[::2] for x in packed_like(rings(10), 14)]}, r"packed\[0\] must be .*contiguous.*strides \(2,\)"),
        ({"rings": [rings(10)[0], rings(9)[1], rings(10)[2]]}, r"rings\[1\] must be torch.bool \[10\]"),
        ({"rings": [x.double() for x in rings(10)]}, "rings must be int32, bool or float32, got torch.float64 at 0"),
    ],
)
def test_bad_arguments_are_named(backend: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(backend, **change)
