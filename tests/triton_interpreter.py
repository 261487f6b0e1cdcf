"""Triton's interpreter as a GPU would compute: bf16 arithmetic and rounding, bounds of memory, bytes counted.

The interpreter of Triton 3.6 to 3.9 keeps bf16 as bits in uint16: stores truncate, and arithmetic works on the bits.
Importing this module mends that. Every unmasked lane of a load or store must also fall inside the storage of a tensor
argument, and `traffic` counts the bytes that such lanes move. Needs TRITON_INTERPRET=1 before triton is imported.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Builder, Handle, BF16 = interpreter.InterpreterBuilder, interpreter.TensorHandle, tl.bfloat16
FLOATS = (tl.float16, tl.float32, tl.float64)


@dataclass
class Traffic:
    """Bytes moved by unmasked lanes since the last reset."""

    loaded: int = 0
    stored: int = 0


traffic = Traffic()
_storages: list[tuple[int, int]] = []  # first byte and the one past the last, of each argument


_chosen: set[int] | None = None


@contextmanager
def only_programs(*chosen: int) -> Iterator[None]:
    """Of a launch, run the programs with these indices along the first axis alone."""
    global _chosen
    _chosen = set(chosen)
    try:
        yield
    finally:
        _chosen = None


def _to_float(handle: Any) -> np.ndarray:
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _to_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> bf16 bits, to nearest, ties to even; every NaN becomes the quiet one."""
    x = np.asarray(x, np.float32)
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16).reshape(x.shape)


def _wrap(name: str, around: Callable[..., Any]) -> None:
    """Replace a method of the builder, where this version has it, by around(original, ...)."""
    original = getattr(Builder, name, None)
    if original is not None:
        setattr(Builder, name, lambda *args: around(original, *args))


def _convert(original: Any, self: Any, source: Any, to: Any, *rest: Any) -> Any:
    have, want = source.dtype.scalar, to.scalar
    if want == BF16 and have in FLOATS:
        return Handle(_to_bits(source.data), want)
    if have == BF16 and want in FLOATS:
        return Handle(_to_float(source).astype(interpreter._get_np_dtype(want)), want)
    return original(self, source, to, *rest)


def _binary(original: Any, self: Any, left: Any, right: Any, op: Any) -> Any:
    if left.dtype.scalar != BF16 or right.dtype.scalar != BF16:
        return original(self, left, right, op)
    out = op(_to_float(left), _to_float(right))
    return Handle(out, tl.int1) if out.dtype == bool else Handle(_to_bits(out), BF16)


def _unary(original: Any, self: Any, value: Any, op: Any) -> Any:
    if value.dtype.scalar != BF16:
        return original(self, value, op)
    return Handle(_to_bits(op(_to_float(value))), BF16)


def _dot(original: Any, self: Any, a: Any, b: Any, *rest: Any) -> Any:
    if a.dtype.scalar == BF16:
        a, b = Handle(_to_float(a), tl.float32), Handle(_to_float(b), tl.float32)
    return original(self, a, b, *rest)


def _bytes_in_bounds(pointers: Any, mask: Any, what: str) -> int:
    lanes = pointers.data
    lanes = lanes.ravel() if mask is None else lanes[np.broadcast_to(mask.data.astype(bool), lanes.shape)]
    width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    inside = np.zeros(lanes.shape, bool)
    for low, high in _storages:
        inside |= (lanes >= np.uint64(low)) & (lanes + np.uint64(width) <= np.uint64(high))
    if not inside.all():
        worst = int(lanes[~inside][0])
        offsets = [worst - low for low, _ in _storages]
        raise IndexError(f"out-of-bounds {what}: {int((~inside).sum())} lanes, the first {offsets} bytes from tensors")
    return lanes.size * width


def _load(original: Any, self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
    traffic.loaded += _bytes_in_bounds(pointers, mask, "load")
    return original(self, pointers, mask, *rest)


def _store(original: Any, self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
    traffic.stored += _bytes_in_bounds(pointers, mask, "store")
    return original(self, pointers, value, mask, *rest)


def _launch(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """The chosen programs, in silence: a GPU says nothing of an overflow or a NaN."""
    if _chosen is not None:
        self.fn = _of_chosen(self.fn)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return original(self, *args, **kwargs)


def _of_chosen(program: Any) -> Any:
    def run(**kwargs: Any) -> None:
        if interpreter.interpreter_builder.grid_idx[0] in _chosen:
            program(**kwargs)

    run.__signature__ = inspect.signature(program)
    return run


def _init_args(original: Any, self: Any, args: Any, kwargs: Any) -> Any:
    on_host = original(self, args, kwargs)
    _storages.clear()
    for x in (*on_host[0], *on_host[1].values()):
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            _storages.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return on_host


def _restore_args(original: Any, self: Any, args: Any, on_host: Any, kwargs: Any, kwargs_on_host: Any) -> None:
    """Copy back what was copied; a CPU tensor was not, and may be far larger than what the kernel touched."""
    if any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in (*args, *kwargs.values())):
        original(self, args, on_host, kwargs, kwargs_on_host)


def _patch_lang(original: Any, fn: Any) -> Any:
    """Patch the language once for a launch: calls from one jitted function to another need not do so again."""
    langs = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
    if any(tl.core.is_builtin(lang.load) for lang in langs):
        return original(fn)
    return interpreter._LangPatchScope()


interpreter._patch_lang = lambda fn, _original=interpreter._patch_lang: _patch_lang(_original, fn)
for _name in ("cast_impl", "create_fp_trunc", "create_fp_ext", "create_fp_to_fp"):
    _wrap(_name, _convert)
_wrap("binary_op", _binary)
_wrap("unary_op", _unary)
_wrap("create_dot", _dot)
_wrap("create_masked_load", _load)
_wrap("create_masked_store", _store)
for _name, _around in (("__call__", _launch), ("_init_args_hst", _init_args), ("_restore_args_dev", _restore_args)):
    _original = getattr(interpreter.GridExecutor, _name)
    setattr(
        interpreter.GridExecutor,
        _name,
        lambda *args, _original=_original, _around=_around, **kwargs: _around(_original, *args, **kwargs),
    )
