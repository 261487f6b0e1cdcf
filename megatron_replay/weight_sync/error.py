"""What is raised when an engine does not hold the weights that it should."""

from __future__ import annotations

from collections.abc import Sequence


class WeightSyncError(RuntimeError):
    """A push of weights that did not complete. The engine holds a mixture and must not sample until a whole push
    has succeeded. `engines` are the names of those at which it failed first, where that is known."""

    def __init__(self, words: str, engines: Sequence[str] = ()) -> None:
        super().__init__(words)
        self.engines = tuple(engines)


class PlanRefusedError(WeightSyncError):
    """The engine cannot take this trainer's weights: it serves another model, or has another NCCL. Trying again does
    not help; no weight was touched."""
