"""Checks of values, in the one form that all errors have: the name, what it needs, what it got."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def require(condition: bool, name: str, value: Any, needs: str) -> None:
    """Raise `ValueError("<name> <needs>, got <value>")` unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} {needs}, got {value!r}")


def require_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    require(value in choices, name, value, f"must be one of {', '.join(map(str, choices))}")


def require_vector(name: str, x: Tensor, dtype: torch.dtype, size: int, device: torch.device) -> None:
    """Raise `ValueError` unless a kernel can be handed x by its address: dtype, [size], device, contiguous."""
    if x.dtype != dtype or x.shape != (size,) or x.device != device or not x.is_contiguous():
        raise ValueError(
            f"{name} must be {dtype} [{size}] on {device}, contiguous, "
            f"got {x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}"
        )
