"""Hardware: what a GPU and its wires can do, by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from megatron_replay.ops.checks import require
from megatron_replay.planning.layout import Wire

GB = 10**9
# H100 SXM, dense: bfloat16 on the tensor cores (half of the 1,979 with sparsity), float32 outside of them
PEAK_TFLOPS = {torch.bfloat16: 989.0, torch.float32: 67.0}


@dataclass(frozen=True)
class Hardware:
    """Data-sheet numbers, by default of an H100 SXM node with a 400 Gb/s port a GPU; GB are 10^9 bytes.

    `peak_tflops` None: that of the dtype. NVLink is one direction of the 900 GB/s of both. `headroom_gb` is no
    data-sheet number but an assumption: what CUDA, NCCL and a fragmented allocator take beside the tensors.
    """

    gpu_memory_gb: float = 80.0
    peak_tflops: float | None = None
    hbm_gb_per_s: float = 3350.0
    nvlink_gb_per_s: float = 450.0
    network_gb_per_s: float = 50.0
    headroom_gb: float = 4.0

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            least = 0.0 if f.name == "headroom_gb" else None
            if value is not None:
                require(
                    0 < value < float("inf") or value == least,
                    f.name,
                    value,
                    "must be positive" if least is None else "must be at least 0",
                )

    @property
    def memory_bytes(self) -> int:
        return int(self.gpu_memory_gb * GB)

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - int(self.headroom_gb * GB)

    def flops(self, dtype: torch.dtype) -> float:
        return (self.peak_tflops or PEAK_TFLOPS[dtype]) * 1e12

    @property
    def hbm(self) -> float:
        return self.hbm_gb_per_s * GB

    def wire(self, wire: Wire) -> float:
        """Bytes a second that a GPU sends over it."""
        return (self.nvlink_gb_per_s if wire == "nvlink" else self.network_gb_per_s) * GB
