"""Checks of values, in the one form that all errors have: the name, what it needs, what it got."""

from __future__ import annotations

from typing import Any


def require(condition: bool, name: str, value: Any, needs: str) -> None:
    """Raise `ValueError("<name> <needs>, got <value>")` unless the condition holds."""
    if not condition:
        raise ValueError(f"{name} {needs}, got {value!r}")


def require_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    require(value in choices, name, value, f"must be one of {', '.join(map(str, choices))}")
