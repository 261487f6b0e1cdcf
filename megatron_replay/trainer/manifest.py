"""manifest.json of a checkpoint: the size and the sha256 of every file. Ranks share the reading."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

MANIFEST = "manifest.json"


def write_manifest(folder: Path) -> None:
    """Every rank calls it once all files are there; the first rank writes."""
    mine: dict[str, dict[str, Any]] = {}
    for path in _share(sorted(x for x in folder.rglob("*") if x.is_file() and x.name != MANIFEST)):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        mine[str(path.relative_to(folder))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    files = {name: entry for part in _exchange(mine) for name, entry in part.items()}
    if dist.get_rank() == 0:
        write_atomically(folder / MANIFEST, json.dumps(dict(sorted(files.items())), indent=1))


def check_manifest(folder: Path, allow_empty_buffer: bool) -> None:
    """Raises ValueError, on every rank, that names the first file which is missing or not as it was written."""
    found = [words for words in _exchange(_problem(folder, allow_empty_buffer)) if words]
    if found:
        raise ValueError(f"--load {folder} is {found[0]}")


def _problem(folder: Path, allow_empty_buffer: bool) -> str:
    path = folder / MANIFEST
    if not path.is_file():
        return f"incomplete: {MANIFEST} is missing"
    try:
        entries = {name: (entry["bytes"], entry["sha256"]) for name, entry in json.loads(path.read_text()).items()}
    except (ValueError, AttributeError, TypeError, KeyError, UnicodeDecodeError) as error:
        return f"damaged: {MANIFEST} is none ({type(error).__name__}: {error})"
    for name, (size, _) in entries.items():
        part = folder / name
        buffer = name.startswith("replay_buffer_")
        if not part.is_file() and not (allow_empty_buffer and buffer):
            hint = " (--rl-replay-allow-empty-buffer goes on without it)" if buffer else ""
            return f"incomplete: {name} is missing{hint}"
        if part.is_file() and part.stat().st_size != size:
            return f"damaged: {name} has {part.stat().st_size} bytes, {size} were written"
    for name in _share(sorted(entries)):
        part = folder / name
        if part.is_file() and _sha256(part) != entries[name][1]:
            return f"damaged: the checksum of {name} differs"
    return ""


def write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def _share(items: list[Any]) -> list[Any]:
    """This rank's part of what all have in the same order; a program without process groups has it all."""
    return items[dist.get_rank() :: dist.get_world_size()] if dist.is_initialized() else items


def _exchange(value: Any) -> list[Any]:
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
