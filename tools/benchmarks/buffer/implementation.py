"""What an implementation is to this benchmark: how it is named, what it claims, and the calls that are timed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from torch import Tensor

from .stock import Rows, Stock

Operation = Literal["evict", "push", "draw", "gather", "sample"]
# in the order of a turn; sample is draw and gather, what a training step pays
OPERATIONS: tuple[Operation, ...] = get_args(Operation)
Draws = Literal["without replacement", "with replacement", "with replacement, stratified"]
Call = Callable[[], Any]


class Sampled(NamedTuple):
    """Which rollouts, and their rows where rows come with them."""

    uids: Tensor  # [n] int64
    rows: Rows | None


class Queued(NamedTuple):
    call: Call
    moved_bytes: int | None = None  # read and written, where the operation is one that moves memory


class Subject(ABC):
    """An implementation that holds a stock. The methods named as operations get a call ready, which alone is timed."""

    @abstractmethod
    def sampled(self, n: int) -> Sampled:
        """One sample of n, unlike that of any other call."""

    def drawn(self, n: int) -> Tensor:
        """The uids [n] of one draw: what is held to the claim. A subclass may leave the rows out."""
        return self.sampled(n).uids

    def ready(self, operation: Operation, turn: int) -> Call:
        """The next call of an operation; turns come one after another, turn 0 first, and operations in their order."""
        prepare: Callable[[int], Call] = getattr(self, operation)
        return prepare(turn)

    def queued(self, operation: Operation) -> Queued | None:
        """On CUDA: the operation as work for the device alone, which a graph captures; None where there is none."""
        return None

    def cross_check(self) -> None:  # noqa: B027
        """Raise ValueError where operations that are timed disagree; they cannot where there is but one."""


@dataclass(frozen=True)
class Implementation:
    name: str
    draws: Draws
    returns: str  # what its gather returns
    devices: tuple[str, ...]
    prepare: Callable[[Stock], Subject]
    operations: tuple[Operation, ...]
    backend: str | None = None  # this project's
    package: str | None = None  # another project's
    needs: str | None = None  # a module that may be missing
    note: str | None = None
