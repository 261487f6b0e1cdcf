"""WeightReceiver: one engine worker's end of a push. Knows nothing of the engine but how to load named tensors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.hf_mapping import to_hf
from megatron_replay.weight_sync.message import message_bytes, open_sealed
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.transfer_plan import Bucket, TransferPlan
from megatron_replay.weight_sync.transports import Received, open_receiver

ALIGNMENT = 64  # bytes
Load = Callable[[Iterable[tuple[str, Tensor]]], object]


class WeightReceiver:
    """Channels from every sender of the trainer, and the plan of what comes through them, which has been checked."""

    def __init__(
        self,
        plan: TransferPlan,
        addresses: Sequence[dict[str, Any]],
        *,
        shape: ModelShape,
        worker: int,
        device: torch.device,
        timeout: float,
    ) -> None:
        if len(addresses) != plan.senders:
            raise WeightSyncError(f"the plan has {plan.senders} senders, got {len(addresses)} addresses")
        self.plan, self.shape = plan, shape
        self._channels = []
        try:
            for address in addresses:
                self._channels.append(open_receiver(address, worker=worker, device=device, timeout=timeout))
        except BaseException:
            self.close()
            raise

    def receive(self, version: int, load: Load) -> None:
        """Take one whole push and hand it bucket by bucket to `load`. Raises WeightSyncError on anything else.

        The next bucket is under way while one is loaded.
        """
        workspace = Workspace()
        arriving = self._ask(0)
        for index, bucket in enumerate(self.plan.buckets):
            messages = {sender: one.wait() for sender, one in arriving.items()}
            here, arriving = arriving, self._ask(index + 1)
            payloads = {s: open_sealed(message, version, index, s) for s, message in messages.items()}
            _hand_over(bucket, payloads, self.shape, workspace, load)
            for one in here.values():
                one.release()

    def close(self) -> None:
        """Leave the channels; a sender that waits on one raises."""
        for channel in self._channels:
            channel.close()
        self._channels = []

    def _ask(self, index: int) -> dict[int, Received]:
        if index == len(self.plan.buckets):
            return {}
        bucket = self.plan.buckets[index]
        return {s: self._channels[s].receive(message_bytes(bucket, s)) for s in bucket.senders}


class Workspace:
    """Memory for the tensors of one bucket that are put together from shards. Each bucket takes it again: on a CPU new
    memory costs a page fault for every 4 KiB, more than the copy into it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def new(self, like: Tensor, shape: Sequence[int]) -> Tensor:
        """Uninitialized memory with the dtype and on the device of `like`, until the next `reset`."""
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = start + math.prod(shape) * like.element_size()
        if self._used > self._memory.numel() or self._memory.device != like.device:
            # this bucket is the largest so far: the next `reset` makes room
            return like.new_empty(tuple(shape))
        return self._memory[start : self._used].view(like.dtype).view(tuple(shape))

    def reset(self, device: torch.device) -> None:
        if self._used > self._memory.numel():
            self._memory = torch.empty(self._used, dtype=torch.uint8, device=device)
        self._used = 0

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()


def _hand_over(
    bucket: Bucket, payloads: dict[int, Tensor], shape: ModelShape, workspace: Workspace, load: Load
) -> None:
    """Give `load` the Hugging Face tensors of a bucket, without a copy where they lie in a message as they are.

    A message's memory is written again by the next one but one, the workspace by the next bucket. What is still
    referred to after `load`, such as the weight of a layer that the engine has not finished, is moved to memory of its
    own.
    """
    borrowed = {payload.untyped_storage().data_ptr() for payload in payloads.values()}
    tensors = [(name, t.contiguous()) for name, t in _tensors(bucket, payloads, shape, workspace)]
    lent = [weakref.ref(t) for _, t in tensors if t.untyped_storage().data_ptr() in borrowed or workspace.holds(t)]
    load(iter(tensors))
    del tensors
    for reference in lent:
        if (kept := reference()) is not None:
            kept.data = kept.clone()
    workspace.reset(next(iter(payloads.values())).device)


def _tensors(
    bucket: Bucket, payloads: dict[int, Tensor], shape: ModelShape, workspace: Workspace
) -> Iterator[tuple[str, Tensor]]:
    offsets = {s: bucket.offsets(s) for s in payloads}
    for entry in bucket.entries:
        dtype = getattr(torch, entry.dtype)
        shards = []
        for sender in entry.senders:
            at = offsets[sender][entry.name]
            shards.append(payloads[sender][at : at + entry.shard_bytes].view(dtype).view(entry.shard_shape))
        yield from to_hf(entry.name, shards, shape, workspace.new).items()
