"""ParallelGroups: this rank's place in the TP x PP x DP grid, and the start of the process groups.

Functions of the trainer take a ParallelGroups; nobody below the entry script looks groups up in a global.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.weight_sync.transports.nccl import survive_failed_groups

T = TypeVar("T")


@dataclass(frozen=True)
class ParallelGroups:
    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    replica: dist.ProcessGroup  # the ranks that hold the model once: stage by stage, in tensor-parallel order
    device: torch.device

    @property
    def tensor_rank(self) -> int:
        return dist.get_rank(self.tensor)

    @property
    def tensor_size(self) -> int:
        return dist.get_world_size(self.tensor)

    @property
    def pipeline_rank(self) -> int:
        return dist.get_rank(self.pipeline)

    @property
    def pipeline_size(self) -> int:
        return dist.get_world_size(self.pipeline)

    @property
    def data_rank(self) -> int:
        return dist.get_rank(self.data)

    @property
    def data_size(self) -> int:
        return dist.get_world_size(self.data)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def writes_shard(self) -> bool:
        """True on the one rank that writes what all model-parallel ranks of a data-parallel rank share."""
        return self.tensor_rank == 0 and self.pipeline_rank == 0

    def data_parallel(self) -> DataParallelGroup:
        return DataParallelGroup(self.data if self.data_size > 1 else None, device=self.device)

    def from_last_stage(self, tensor: Tensor) -> Tensor:
        """The last pipeline stage's tensor on every stage; other stages pass one of the same shape and dtype."""
        if self.pipeline_size > 1:
            source = dist.get_global_rank(self.pipeline, self.pipeline_size - 1)
            dist.broadcast(tensor, source, group=self.pipeline)
        return tensor


def initialize(
    tensor_size: int, pipeline_size: int, *, seed: int, timeout_minutes: float = 10.0, backend: str | None = None
) -> ParallelGroups:
    """Start torch.distributed, if it is not (torchrun's variables, or one process), and the model-parallel groups."""
    # NVIDIA's images turn TF32 on for all float32 products (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1): with 10 bits of
    # mantissa float32 weights, and --rl-fp32-lm-head, would be float32 in name alone
    torch.set_float32_matmul_precision("highest")
    if not dist.is_initialized():
        _start_distributed(backend, timedelta(minutes=timeout_minutes))
    world = dist.get_world_size()
    model_parallel = tensor_size * pipeline_size
    if world % model_parallel:
        raise ValueError(
            f"--tensor-model-parallel-size {tensor_size} times --pipeline-model-parallel-size {pipeline_size} "
            f"must divide the number of processes, got {world} (torchrun --nproc-per-node)"
        )
    parallel_state.initialize_model_parallel(tensor_size, pipeline_size, distributed_timeout_minutes=timeout_minutes)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ParallelGroups(
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        replica=parallel_state.get_model_parallel_group(),
        device=torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu"),
    )


def _start_distributed(backend: str | None, timeout: timedelta) -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        local_rank, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= gpus:
            needed = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
            raise ValueError(
                f"--nproc-per-node {needed} needs {needed} GPUs, got {gpus}; CUDA_VISIBLE_DEVICES= runs on CPUs"
            )
        torch.cuda.set_device(local_rank)
        # the group that carries weights to engines may fail, and the run goes on
        survive_failed_groups()
    backend = backend or ("nccl" if cuda else "gloo")
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)


def from_first_rank(make: Callable[[], T]) -> T:
    """make() of rank 0 on every rank: work that one rank does for all, such as reading a whole checkpoint."""
    held = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held, src=0)
    return held[0]  # type: ignore[return-value]


def shutdown() -> None:
    """Leave the process groups; call once all ranks are done."""
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
