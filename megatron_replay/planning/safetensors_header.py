"""What a safetensors file says of its tensors, read without the tensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path

LENGTH_BYTES = 8  # of the header's length, in front of it
LARGEST_HEADER = 100_000_000  # bytes, by the format


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a file.

    Raises ValueError that begins with the path for a file that is missing, no safetensors, or of another size than its
    header says, as one is whose download was cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(LENGTH_BYTES))
            if length > min(LARGEST_HEADER, size - LENGTH_BYTES):
                raise ValueError(f"its header would have {length} bytes of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        shapes = {name: tuple(entry["shape"]) for name, entry in header.items()}
        end = LENGTH_BYTES + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is no safetensors file: {error or type(error).__name__}") from error
    if size != end:
        raise ValueError(f"{path} must have {end} bytes by its header, got {size}")
    return shapes
