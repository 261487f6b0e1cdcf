"""A tensor's CUDA memory, opened in another process on the same host."""

from __future__ import annotations

import base64
import json

import torch
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError


def refuse_expandable_segments(settings: str) -> None:
    """Raise ValueError where the allocator's settings make memory that no other process can open.

    `settings` is PYTORCH_ALLOC_CONF or its older name PYTORCH_CUDA_ALLOC_CONF.
    """
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        raise ValueError(
            f"PYTORCH_CUDA_ALLOC_CONF must not turn on expandable_segments where trainer and engine share GPU memory, "
            f"got {settings!r}"
        )


def export(memory: Tensor) -> bytes:
    """What `open_exported` needs to find this whole, contiguous uint8 tensor. It must outlive every opener."""
    _, *parts = memory.untyped_storage()._share_cuda_()
    plain = [base64.b64encode(p).decode() if isinstance(p, bytes) else p for p in parts]
    uuid = str(torch.cuda.get_device_properties(memory.device).uuid)
    return json.dumps({"uuid": uuid, "storage": plain}).encode()


def open_exported(handle: bytes) -> Tensor:
    """The exporter's memory [bytes] uint8, on the exporter's GPU as this process numbers it."""
    found = json.loads(handle)
    memory, size, offset, counter, counter_offset, event, event_sync = found["storage"]
    visible = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if found["uuid"] not in visible:
        raise WeightSyncError(f"transport cuda-ipc needs an engine that sees the trainer's GPU {found['uuid']}")
    torch.cuda._lazy_init()
    storage = torch.UntypedStorage._new_shared_cuda(
        visible[found["uuid"]],
        base64.b64decode(memory),
        size,
        offset,
        base64.b64decode(counter),
        counter_offset,
        base64.b64decode(event),
        event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
