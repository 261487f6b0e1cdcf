"""EngineControl: what the sender asks of one engine, whatever carries the call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class EngineControl(Protocol):
    """One engine: a server behind HTTP, or a child process behind a pipe. A call that fails or is late raises."""

    @property
    def name(self) -> str:
        """For messages: a URL, or what the process is."""

    def world_size(self) -> int:
        """Workers that each take the whole push."""

    def pause(self) -> None:
        """Abort what is running; nothing is sampled until `resume`."""

    def init_weight_transfer(self, info: Mapping[str, Any]) -> None: ...
    def start_weight_update(self) -> None: ...
    def update_weights(self, info: Mapping[str, Any]) -> None:
        """Take a push, of info["version"]."""

    def finish_weight_update(self, version: int | None) -> None:
        """Close the update, and label what is sampled from now on; None: the update is given up."""

    def transfer_status(self) -> list[dict[str, Any]]:
        """For each worker, what its last call came to: open (an update is), problem (words or None), refused (the plan
        was). Workers do not raise."""

    def weight_version(self) -> int | None: ...
    def reset_prefix_cache(self) -> bool:
        """Forget what was computed with other weights; False: refused."""

    def resume(self) -> None: ...
