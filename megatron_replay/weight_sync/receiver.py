"""WeightReceiver: one engine worker's end of a push. Knows nothing of the engine but how to load named tensors."""

from __future__ import annotations

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
        arriving = self._ask(0)
        for index, bucket in enumerate(self.plan.buckets):
            messages = {sender: one.wait() for sender, one in arriving.items()}
            here, arriving = arriving, self._ask(index + 1)
            payloads = {s: open_sealed(message, version, index, s) for s, message in messages.items()}
            _hand_over(bucket, payloads, self.shape, load)
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


def _hand_over(bucket: Bucket, payloads: dict[int, Tensor], shape: ModelShape, load: Load) -> None:
    """Give `load` the Hugging Face tensors of a bucket, without a copy where they lie in a message as they are.

    A message's memory is written again by the next one but one. What is still referred to after `load`, such as the
    weight of a layer that the engine has not finished, is moved to memory of its own.
    """
    borrowed = {payload.untyped_storage().data_ptr() for payload in payloads.values()}
    tensors = [(name, t.contiguous()) for name, t in _tensors(bucket, payloads, shape)]
    lent = [weakref.ref(t) for _, t in tensors if t.untyped_storage().data_ptr() in borrowed]
    load(iter(tensors))
    del tensors
    for reference in lent:
        if (kept := reference()) is not None:
            kept.data = kept.clone()


def _tensors(bucket: Bucket, payloads: dict[int, Tensor], shape: ModelShape) -> Iterator[tuple[str, Tensor]]:
    offsets = {s: bucket.offsets(s) for s in payloads}
    for entry in bucket.entries:
        dtype = getattr(torch, entry.dtype)
        shards = []
        for sender in entry.senders:
            at = offsets[sender][entry.name]
            shards.append(payloads[sender][at : at + entry.shard_bytes].view(dtype).view(entry.shard_shape))
        yield from to_hf(entry.name, shards, shape).items()
