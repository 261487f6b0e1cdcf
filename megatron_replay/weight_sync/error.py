"""What is raised when an engine does not hold the weights that it should."""

from __future__ import annotations


class WeightSyncError(RuntimeError):
    """A push of weights that did not complete. The engine holds a mixture and must not sample until a whole push
    has succeeded."""


class PlanRefusedError(WeightSyncError):
    """The engine serves another model than the trainer trains. Trying again does not help; no weight was touched."""
