"""NonfiniteUpdates: an update whose loss or gradient is NaN or infinite is skipped; too many in a row end the run."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_replay.rollout import RolloutBatch
from megatron_replay.trainer.parallel import ParallelGroups

SHARDS = "batch_{:05d}_of_{:05d}.safetensors"
STEP_FILE = "step.json"


class NonfiniteUpdatesError(RuntimeError):
    """`limit` updates in a row had a NaN or an infinity in loss or gradient."""


class NonfiniteUpdates:
    """Counts them. The one that makes `limit` in a row leaves FOLDER/step_0000012 behind, enough to see it again:
    the batch as every data-parallel rank had it, and by `save_model(FOLDER/step_0000012/model)` the weights.

    All ranks call `observe` together and raise together.
    """

    def __init__(self, limit: int, folder: str | Path, save_model: Callable[[Path], None]) -> None:
        self.limit, self.folder, self.save_model = limit, Path(folder), save_model
        self.in_a_row = 0

    def observe(self, finite: bool, batch: RolloutBatch, step: int, groups: ParallelGroups) -> None:
        """Raises NonfiniteUpdatesError, with the name of the folder, where this is the last that is borne."""
        self.in_a_row = 0 if finite else self.in_a_row + 1
        if self.in_a_row < self.limit:
            return
        left = self.folder / f"step_{step:07d}"
        # beside its place: save_model may read what an earlier run left there
        partial = left.with_suffix(".partial")
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            (partial / STEP_FILE).write_text(json.dumps({"step": step, "data_parallel": groups.data_size}))
        dist.barrier()
        if groups.writes_shard:
            save_file(_tensors(batch), partial / SHARDS.format(groups.data_rank, groups.data_size))
        self.save_model(partial / "model")
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(left, ignore_errors=True)
            partial.rename(left)
        dist.barrier()
        raise NonfiniteUpdatesError(
            f"{self.limit} updates in a row (--rl-max-nonfinite-updates) had a NaN or an infinity in loss or gradient, "
            f"the last in step {step}. None was applied. See it again with --load-hf {left / 'model'} "
            f"--rl-train-batch {left}"
        )


def gradients_are_finite(model: DistributedDataParallel, loss: Tensor | None) -> bool:
    """Whether this update's loss and gradients have no NaN or infinity on any rank; the same answer on all.

    `loss` is this rank's, where it has one. Looks at each gradient once, without memory of its own.
    """
    buffers = [buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers)]
    device = buffers[0].device
    # the largest magnitude, NaN where there is one; above 1.8e19 their norm would overflow
    largest = [torch.linalg.vector_norm(b, float("inf")).to(torch.float32) for b in buffers]
    if loss is not None:
        largest.append(loss.detach().to(device, torch.float32).abs().reshape(()))
    bad = (~torch.isfinite(torch.stack(largest).square())).any().to(torch.float32)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return not bool(bad)


def load_batch(folder: str | Path, groups: ParallelGroups) -> tuple[RolloutBatch, int]:
    """This data-parallel rank's part of a batch that was left behind, and its step. Any number of ranks will do:
    rollouts are dealt out in their order. Raises ValueError for a folder that is none or lacks a shard."""
    folder = Path(folder)
    if not (folder / STEP_FILE).is_file():
        raise ValueError(f"--rl-train-batch must name a folder that a run left behind, got {str(folder)!r}")
    said = json.loads((folder / STEP_FILE).read_text())
    parts = []
    for rank in range(said["data_parallel"]):
        shard = folder / SHARDS.format(rank, said["data_parallel"])
        if not shard.is_file():
            raise ValueError(f"--rl-train-batch {folder} is incomplete: {shard.name} is missing")
        parts.append(RolloutBatch(**load_file(shard)))
    whole = RolloutBatch.cat(parts)
    mine = torch.arange(groups.data_rank, len(whole), groups.data_size)
    return whole.select(mine), said["step"]


def _tensors(batch: RolloutBatch) -> dict[str, Tensor]:
    return {f.name: getattr(batch, f.name).cpu().contiguous() for f in dataclasses.fields(batch)}
