"""TransferStatus: how a trainer learns what a vLLM worker met in a push."""

from __future__ import annotations

from typing import Any


class TransferStatus:
    """Mixed into vLLM's worker (its `worker_extension_cls`): what the last call to the transfer engine came to."""

    weight_transfer_engine: Any  # the worker's
    _weight_update_active: bool

    def transfer_status(self) -> dict[str, Any]:
        """open: an update was started and not finished; problem: words, or None; refused: it is one of the plan."""
        engine = self.weight_transfer_engine
        return {"open": self._weight_update_active, "problem": engine.problem, "refused": engine.refused}
