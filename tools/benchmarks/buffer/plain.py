"""torch.multinomial without replacement: a draw and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .implementation import Call, Implementation, Sampled, Subject
from .stock import Stock

MOST_CATEGORIES = 2**24


class Multinomial(Subject):
    def __init__(self, stock: Stock, dtype: torch.dtype) -> None:
        self._weights = stock.weights(stock.all_uids()).to(dtype)
        self._drawn = stock.size.drawn

    def draw(self, turn: int) -> Call:
        return lambda: torch.multinomial(self._weights, self._drawn)

    def sampled(self, n: int) -> Sampled:
        uids: Tensor = torch.multinomial(self._weights, n)
        return Sampled(uids, None)


def _multinomial(dtype: torch.dtype) -> Callable[[Stock], Subject]:
    return lambda stock: Multinomial(stock, dtype)


PLAIN = tuple(
    Implementation(
        f"torch.multinomial {str(dtype).removeprefix('torch.')}",
        "without replacement",
        "nothing",
        ("cpu", "cuda"),
        _multinomial(dtype),
        ("draw",),
        note=f"takes at most 2^24 = {MOST_CATEGORIES:,} rollouts",
    )
    for dtype in (torch.float64, torch.float32)
)
