"""The interpreter that the kernel tests run in computes as a GPU would."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is a GPU: no kernel is interpreted", allow_module_level=True)

import triton
import triton.language as tl

from tests.triton_interpreter import only_programs, traffic


@triton.jit
def _copy(x, y, N: tl.constexpr, CAST: tl.constexpr):
    at = tl.arange(0, N)
    value = tl.load(x + at)
    tl.store(y + at, value.to(y.dtype.element_ty) if CAST else value)


@triton.jit
def _multiply_add(x, y, z, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(z + at, tl.load(x + at) * tl.load(y + at) + tl.load(x + at))


@triton.jit
def _largest(x, z, N: tl.constexpr):
    tl.store(z, tl.max(tl.load(x + tl.arange(0, N)), axis=0).to(tl.float32))


@triton.jit
def _load_at(x, y, n):
    tl.store(y, tl.load(x + n))


@triton.jit
def _write_id(y):
    tl.store(y + tl.program_id(0), tl.program_id(0).to(tl.float32))


@pytest.mark.parametrize("cast", [True, False])
def test_bfloat16_is_rounded_to_nearest_even(cast: bool) -> None:
    x, y = torch.randn(4096), torch.empty(4096, dtype=torch.bfloat16)
    x[:3] = torch.tensor([float("nan"), float("inf"), 1.00390625])  # the last lies halfway between two bf16
    _copy[(1,)](x, y, N=4096, CAST=cast)
    assert torch.equal(y[1:], x[1:].bfloat16()) and torch.isnan(y[0])


def test_bfloat16_arithmetic() -> None:
    x, y = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    z, top = torch.empty_like(x), torch.zeros(1)
    _multiply_add[(1,)](x, y, z, N=256)
    assert torch.equal(z, x * y + x)
    _largest[(1,)](x, top, N=256)
    assert top.item() == x.max().item()


@pytest.mark.parametrize("offset", [4, 1000, -1])
def test_a_load_outside_the_tensors_is_an_error(offset: int) -> None:
    x, y = torch.arange(4.0), torch.zeros(1)
    _load_at[(1,)](x, y, 3)
    assert y.item() == 3.0
    with pytest.raises(Exception, match="out-of-bounds load"):
        _load_at[(1,)](x, y, offset)


def test_bytes_are_counted() -> None:
    traffic.loaded = traffic.stored = 0
    _copy[(1,)](torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16), N=64, CAST=True)
    assert (traffic.loaded, traffic.stored) == (256, 128)


def test_only_the_chosen_programs_run() -> None:
    y = torch.full((9,), -1.0)
    with only_programs(2, 7):
        _write_id[(9,)](y)
    assert y.tolist() == [-1, -1, 2, -1, -1, -1, -1, 7, -1]
    _write_id[(9,)](y)
    assert y.tolist() == list(range(9))
