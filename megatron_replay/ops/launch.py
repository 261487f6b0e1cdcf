"""Launch configurations of the Triton kernels: a small table for each architecture, and ways to override a row.

In one step a thread reads `per_thread` vectors of 128 bits of a row, or `per_thread` tokens in the kernel on tokens.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from megatron_replay.ops.checks import require

KERNELS = ("token_logprob_forward", "token_logprob_backward", "grpo_loss")
OVERRIDE = "MEGATRON_REPLAY_LAUNCH"  # environment variable: "KERNEL=PER_THREADxNUM_WARPS,..."


@dataclass(frozen=True)
class LaunchConfig:
    """Raises ValueError for a size that is no power of two in its range."""

    per_thread: int
    num_warps: int

    def __post_init__(self) -> None:
        for name, most in (("per_thread", 32), ("num_warps", 32)):
            value = getattr(self, name)
            power_of_two = value > 0 and value & (value - 1) == 0
            require(power_of_two and value <= most, name, value, f"must be a power of two, at most {most}")

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


# by compute capability; a device takes the newest row that is not newer than itself. The rows are chosen by registers,
# bytes in flight and the absence of spills (tools/kernel_report.py); no GPU has timed them yet
TABLE: dict[int, dict[str, LaunchConfig]] = {
    80: {
        "token_logprob_forward": LaunchConfig(4, 8),
        "token_logprob_backward": LaunchConfig(2, 8),
        "grpo_loss": LaunchConfig(2, 4),
    },
    90: {
        "token_logprob_forward": LaunchConfig(4, 8),
        "token_logprob_backward": LaunchConfig(2, 8),
        "grpo_loss": LaunchConfig(2, 4),
    },
    100: {
        "token_logprob_forward": LaunchConfig(4, 8),
        "token_logprob_backward": LaunchConfig(2, 8),
        "grpo_loss": LaunchConfig(2, 4),
    },
}
_overrides: dict[str, LaunchConfig] = {}


def launch_config(kernel: str, device: torch.device) -> LaunchConfig:
    """The configuration of a kernel on a device: an override, else the table's. A CPU (the interpreter) takes sm_80's.

    Raises ValueError for a malformed override, RuntimeError for a device older than the table.
    """
    if kernel in _overrides:
        return _overrides[kernel]
    if (text := os.environ.get(OVERRIDE)) and (config := parse_overrides(text).get(kernel)):
        return config
    capability = 80
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        capability = 10 * major + minor
    return table_row(capability)[kernel]


def table_row(capability: int) -> dict[str, LaunchConfig]:
    """The configurations for a compute capability, given as 10 x major + minor."""
    usable = [c for c in TABLE if c <= capability]
    if not usable:
        raise RuntimeError(f"backend triton needs compute capability {min(TABLE)} or later, got {capability}")
    return TABLE[max(usable)]


def parse_overrides(text: str) -> dict[str, LaunchConfig]:
    """ "token_logprob_forward=4x8,grpo_loss=2x4" -> configurations by kernel."""
    found = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*(\w+)=(\d+)x(\d+)\s*", item)
        require(match is not None, OVERRIDE, text, "must be KERNEL=PER_THREADxNUM_WARPS, comma-separated")
        assert match is not None
        kernel, per_thread, num_warps = match.groups()
        require(kernel in KERNELS, OVERRIDE, text, f"must name one of {', '.join(KERNELS)}")
        found[kernel] = LaunchConfig(int(per_thread), int(num_warps))
    return found


@contextmanager
def overridden(kernel: str, config: LaunchConfig) -> Iterator[None]:
    """Launch `kernel` with `config` inside the block, whatever the table says."""
    require(kernel in KERNELS, "kernel", kernel, f"must be one of {', '.join(KERNELS)}")
    before = dict(_overrides)
    _overrides[kernel] = config
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)
