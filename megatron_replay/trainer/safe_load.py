"""Loading of checkpoints that others wrote: nothing in them is run.

torch.distributed.checkpoint reads its index, `.metadata`, by pickle, and objects in the shards by torch.load without
`weights_only`. Both would call whatever a file names.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_replay.environment_variable import environment_variable

# all that an index of tensors is made of
ALLOWED: dict[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        (
            "Metadata",
            "TensorStorageMetadata",
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    "torch.distributed.checkpoint.planner": frozenset(("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")),
    "torch.distributed.checkpoint.filesystem": frozenset(("_StorageInfo",)),
    "torch.serialization": frozenset(("_get_layout",)),
    "torch": frozenset(("Size", *(name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)))),
}
WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


class _IndexReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


@contextmanager
def nothing_is_run(folder: Path) -> Iterator[None]:
    """While the weights of `folder` are loaded: torch.load takes tensors and plain values alone.

    Raises ValueError for an index that is damaged or holds anything but an index.
    """
    index = folder / ".metadata"
    try:
        with open(index, "rb") as file:
            _IndexReader(file).load()
    except Exception as error:
        # a damaged pickle may raise anything
        raise ValueError(f"--load {index} is no index of tensors: {type(error).__name__}: {error}") from error
    with environment_variable(WEIGHTS_ONLY, "1"):
        yield
