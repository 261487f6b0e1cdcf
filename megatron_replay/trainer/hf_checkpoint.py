"""Hugging Face checkpoints: read into the sharded model, and written back from it under any TP x PP x DP."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from megatron_replay.trainer.model import global_parameters
from megatron_replay.trainer.parallel import ParallelGroups
from megatron_replay.weight_sync.hf_mapping import (
    find_rule,
    hf_shapes,
    megatron_names,
    megatron_shape,
    plain_name,
    to_hf,
    to_megatron,
    unshard,
)
from megatron_replay.weight_sync.model_shape import ModelShape

T = TypeVar("T")

INDEX = "model.safetensors.index.json"
# what a folder needs beside weights and config.json to be served and to be trained from again
COMPANIONS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "chat_template.*",
    "*.tiktoken",
)


@torch.no_grad()
def load_hf_weights(model: GPTModel, folder: str | Path, shape: ModelShape, groups: ParallelGroups) -> None:
    """Fill this rank's shard from FOLDER's safetensors, tensor by tensor.

    Raises ValueError when the folder's names or shapes are not those of config.json: nothing is left random.
    """
    with ExitStack() as stack:
        where = {}
        for path in safetensors_files(folder):
            file = stack.enter_context(safe_open(path, framework="pt"))
            where.update(dict.fromkeys(file.keys(), file))
        expected = hf_shapes(shape)
        extra = set(where) - set(expected) - ({"lm_head.weight"} if shape.tied_embeddings else set())
        if missing := set(expected) - set(where):
            raise ValueError(f"--load-hf {str(folder)!r} lacks {len(missing)} tensors, the first is {min(missing)}")
        if extra:
            raise ValueError(f"--load-hf {str(folder)!r} has {len(extra)} unknown tensors, the first is {min(extra)}")
        for name, size in expected.items():
            found = where[name].get_slice(name).get_shape()
            if tuple(found) != size:
                raise ValueError(
                    f"--load-hf {str(folder)!r} does not fit its config.json: {name} must be {list(size)}, got {found}"
                )
        for name, parameter in global_parameters(model):
            value = to_megatron(
                name,
                lambda x: where[x].get_tensor(x),
                shape,
                padded_vocab=model.vocab_size,
                tensor_rank=groups.tensor_rank,
                tensor_size=groups.tensor_size,
            )
            parameter.copy_(value)


def checkpoint_identity(folder: str | Path) -> str:
    """sha256 over the bytes of a Hugging Face checkpoint's weight files: what a reference model is."""
    digest = hashlib.sha256()
    for path in safetensors_files(folder):
        with open(path, "rb") as file:
            while block := file.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()


def safetensors_files(folder: str | Path) -> list[Path]:
    """The weight files that FOLDER's index names, or all there are. Raises ValueError when there is none."""
    index = Path(folder) / INDEX
    if index.is_file():
        return sorted({index.parent / x for x in json.loads(index.read_text())["weight_map"].values()})
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise ValueError(f"--load-hf must name a folder with safetensors weights, got {str(folder)!r}")
    return files


@torch.no_grad()
def export_hf(model: GPTModel, shape: ModelShape, groups: ParallelGroups) -> Iterator[tuple[str, Tensor]]:
    """Every full Hugging Face tensor on the CPU of rank 0, each once, in the order of `hf_shapes`.

    Every rank makes the iterator and drives it to its end; other ranks than 0 get nothing from it. One parameter
    travels at a time, stage by stage, from the shards of data-parallel rank 0, so a rank holds few copies of one
    parameter beside its shard and what the caller keeps. A tensor may share memory with the model: copy what is to
    outlive the next update. Raises ValueError on all ranks where one rank's parameters are not those of `shape`.
    """
    held = _together(lambda: _checked_parameters(model, shape, groups))
    owners = _together(lambda: _owners(held, shape, groups))
    if groups.data_rank > 0:
        return
    for name, owner in owners.items():
        tensors = _to_first_rank(name, held.get(name), owner, model, shape, groups)
        # no name is kept on what was handed out: it would be alive while the next parameter is gathered
        for hf in list(tensors):
            yield hf, tensors.pop(hf).cpu()


def save_hf(
    folder: str | Path,
    model: GPTModel,
    shape: ModelShape,
    groups: ParallelGroups,
    *,
    base: str | Path,
    max_file_bytes: int = 2 << 30,
) -> None:
    """Write a Hugging Face folder: weights of the model, everything else of `base`. Every rank calls it.

    It is written beside its place and renamed at the end. Rank 0 holds one file of weights (`max_file_bytes`, or one
    larger tensor) in memory. An error of one rank is raised on all: ValueError for bad input, else RuntimeError.
    """
    target = Path(folder)
    partial = target.with_name(target.name + ".partial")
    first = dist.get_rank() == 0

    def write() -> None:
        tensors = export_hf(model, shape, groups)
        try:
            if first:
                _write_weights(partial, tensors, shape, model.config.params_dtype, max_file_bytes)
        finally:
            # the other ranks wait until rank 0 has taken every tensor, also where it cannot write them
            for _ in tensors:
                pass

    _together(lambda: _prepare(target, partial, Path(base), shape, max_file_bytes) if first else None)
    try:
        _together(write)
        _together(lambda: _finish(target, partial, Path(base), model.config.params_dtype) if first else None)
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)


def _checked_parameters(model: GPTModel, shape: ModelShape, groups: ParallelGroups) -> dict[str, Tensor]:
    """This rank's parameters under the names of the mapping, each of the shape and dtype that others expect."""
    held = {}
    for name, parameter in global_parameters(model):
        try:
            rule, _ = find_rule(name, shape)
        except KeyError as error:
            raise ValueError(error.args[0]) from None
        expected = list(megatron_shape(name, shape, model.vocab_size))
        if rule.shard_dim is not None:
            expected[rule.shard_dim] //= groups.tensor_size
        if list(parameter.shape) != expected or parameter.dtype != model.config.params_dtype:
            raise ValueError(
                f"{name} must be {expected} {model.config.params_dtype}, got {list(parameter.shape)} {parameter.dtype}"
            )
        held[plain_name(name)] = parameter.detach()
    return held


def _owners(held: dict[str, Tensor], shape: ModelShape, groups: ParallelGroups) -> dict[str, int]:
    """The pipeline stage that sends each parameter; the copy of a tied embedding on the last stage is left out."""
    stages: list[list[str]] = [[] for _ in range(groups.pipeline_size)]
    dist.all_gather_object(stages, list(held), group=groups.pipeline)
    where = {name: stage for stage, names in enumerate(stages) for name in names}
    names = megatron_names(shape)
    if missing := [name for name in names if name not in where]:
        raise ValueError(f"no pipeline stage has {missing[0]}, and {len(missing) - 1} more are missing")
    return {name: where[name] for name in names}


def _to_first_rank(
    name: str, shard: Tensor | None, owner: int, model: GPTModel, shape: ModelShape, groups: ParallelGroups
) -> dict[str, Tensor]:
    """One parameter's Hugging Face tensors on rank 0, nothing on the others; the stage `owner` holds its shards."""
    rule, _ = find_rule(name, shape)
    shards: list[Tensor] = []
    if groups.pipeline_rank == owner:
        assert shard is not None
        shards = [shard]
        if rule.shard_dim is not None and groups.tensor_size > 1:
            shards = [torch.empty_like(shard) for _ in range(groups.tensor_size)] if groups.tensor_rank == 0 else []
            dist.gather(shard, shards or None, dist.get_global_rank(groups.tensor, 0), group=groups.tensor)
    if groups.tensor_rank > 0:
        return {}
    if groups.pipeline_rank == owner > 0:
        full = unshard(rule, shards).contiguous()
        dist.send(full, dist.get_global_rank(groups.pipeline, 0), group=groups.pipeline)
        if full.is_cuda:
            # NCCL returns before rank 0 has it; without this a stage would run ahead, one buffer for each parameter
            torch.cuda.current_stream().synchronize()
    if groups.pipeline_rank > 0:
        return {}
    if owner > 0:
        size = megatron_shape(name, shape, model.vocab_size)
        shards = [torch.empty(size, dtype=model.config.params_dtype, device=groups.device)]
        dist.recv(shards[0], dist.get_global_rank(groups.pipeline, owner), group=groups.pipeline)
    return to_hf(name, shards, shape)


def _prepare(target: Path, partial: Path, base: Path, shape: ModelShape, max_file_bytes: int) -> None:
    """Refuse before anything is gathered, then make the folder that is written to."""
    if target.exists():
        raise ValueError(f"--save-hf must name a folder that does not exist, got {str(target)!r}")
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes must be at least 1, got {max_file_bytes}")
    if (other := ModelShape.from_folder(base)) != shape:
        raise ValueError(f"--load-hf {str(base)!r} is of another model: {other}, got {shape}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ValueError(f"--save-hf must name a folder that can be made, got {str(target)!r}: {error}") from None


def _write_weights(
    folder: Path, tensors: Iterator[tuple[str, Tensor]], shape: ModelShape, dtype: torch.dtype, max_file_bytes: int
) -> None:
    """Safetensors files of at most max_file_bytes (a larger tensor goes alone), and the index of more than one."""
    sizes = {name: math.prod(size) * dtype.itemsize for name, size in hf_shapes(shape).items()}
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > max_file_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        held = dict(next(tensors) for _ in names)
        save_file({n: held.pop(n).contiguous() for n in names}, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, name)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _finish(target: Path, partial: Path, base: Path, dtype: torch.dtype) -> None:
    """Config and tokenizer; all on disk before the folder gets its name."""
    config = json.loads((base / "config.json").read_text())
    # transformers 5 writes dtype, before that it was torch_dtype, which all read
    for name in [x for x in ("dtype", "torch_dtype") if x in config] or ["torch_dtype"]:
        config[name] = str(dtype).removeprefix("torch.")
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for path in {x for pattern in COMPANIONS for x in base.glob(pattern) if x.is_file()}:
        shutil.copyfile(path, partial / path.name)
    for path in [*partial.iterdir(), partial]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    # another run may have made it meanwhile: rename replaces an empty folder alone, and says so where it is not empty
    partial.rename(target)


def _together(act: Callable[[], T]) -> T:
    """act() on every rank; where it fails on one, all raise: no rank goes on to wait for one that is gone."""
    result, failure = None, None
    try:
        result = act()
    except Exception as error:
        failure = error
    reports: list[tuple[bool, str] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, failure and (isinstance(failure, ValueError), f"{failure}"))
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            is_input, text = report
            raise ValueError(text) if is_input else RuntimeError(f"rank {rank}: {text}")
    return result  # type: ignore[return-value]
