"""WeightReceiver: one engine worker's end of a push. Knows nothing of the engine but how to load named tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
            load(_tensors(bucket, payloads, self.shape))
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


def _tensors(bucket: Bucket, payloads: dict[int, Tensor], shape: ModelShape) -> Iterable[tuple[str, Tensor]]:
    """The Hugging Face tensors of a bucket, in memory of their own: an engine may keep them longer than the bucket."""
    offsets = {s: bucket.offsets(s) for s in payloads}
    for entry in bucket.entries:
        dtype = getattr(torch, entry.dtype)
        shards = []
        for sender in entry.senders:
            at = offsets[sender][entry.name]
            shards.append(payloads[sender][at : at + entry.shard_bytes].view(dtype).view(entry.shard_shape))
        whole = {payload.untyped_storage().data_ptr() for payload in payloads.values()}
        for name, tensor in to_hf(entry.name, shards, shape).items():
            borrowed = tensor.untyped_storage().data_ptr() in whole
            yield name, tensor.clone() if borrowed else tensor.contiguous()
