"""The model of every rank without its memory, held against a checkpoint's headers: the trainer's part of a dry run.

Each tensor- and pipeline-parallel position is built in turn on the meta device, in one process, over groups that
exchange nothing. Data-parallel ranks hold the same parameters, so one of them stands for all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch.overrides import TorchFunctionMode

from megatron_replay.config import ModelOptions
from megatron_replay.planning.parameters import shard_shape
from megatron_replay.planning.safetensors_header import tensor_shapes
from megatron_replay.trainer.hf_checkpoint import safetensors_files
from megatron_replay.trainer.model import build_model, global_parameters
from megatron_replay.trainer.parallel import ParallelGroups
from megatron_replay.weight_sync.hf_mapping import find_rule, hf_shapes
from megatron_replay.weight_sync.model_shape import ModelShape

META = torch.device("meta")
Shapes = Mapping[str, tuple[int, ...]]


def checkpoint_problems(folder: str | Path, shape: ModelShape) -> list[str]:
    """Why `load_hf_weights` would refuse this folder, from the headers of its files alone."""
    flag = f"--load-hf {str(folder)!r}"
    try:
        files = safetensors_files(folder)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error) if str(error).startswith("--load-hf") else f"{flag}: no usable index of its weights: {error}"
        return [said]
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for path in files:
        try:
            found |= tensor_shapes(path)
        except ValueError as error:
            problems.append(f"{flag}: {error}")
    if problems:
        # what the unreadable files hold is not known
        return problems
    expected = hf_shapes(shape)
    extra = set(found) - set(expected) - ({"lm_head.weight"} if shape.tied_embeddings else set())
    if missing := set(expected) - set(found):
        problems.append(f"{flag} lacks {len(missing)} tensors, the first is {min(missing)}")
    if extra:
        problems.append(f"{flag} has {len(extra)} unknown tensors, the first is {min(extra)}")
    for name, size in expected.items():
        if name in found and found[name] != size:
            problems.append(
                f"{flag} does not fit its config.json: {name} must be {list(size)}, got {list(found[name])}"
            )
    return problems


def model_problems(
    shape: ModelShape, options: ModelOptions, tensor: int, pipeline: int, max_sequence_length: int
) -> list[str]:
    """What of the model of some position has no counterpart in a checkpoint, and what of a checkpoint no rank takes."""
    problems = []
    taken: set[str] = set()
    for tensor_rank, stage, model in every_position(shape, options, tensor, pipeline, max_sequence_length):
        where = f"--load-hf: tensor-parallel rank {tensor_rank} of stage {stage}"
        for name, parameter in global_parameters(model):
            try:
                _, sources = find_rule(name, shape)
            except KeyError as error:
                problems.append(f"{where}: {error.args[0]}")
                continue
            taken.update(sources)
            expected = shard_shape(name, shape, model.vocab_size, tensor)
            if tuple(parameter.shape) != expected or parameter.dtype != options.dtype:
                problems.append(
                    f"{where}: {name} must be {list(expected)} {options.dtype}, "
                    f"got {list(parameter.shape)} {parameter.dtype}"
                )
    if left := set(hf_shapes(shape)) - taken:
        problems.append(f"--load-hf: no rank takes {len(left)} tensors of the checkpoint, the first is {min(left)}")
    return problems


def every_position(
    shape: ModelShape, options: ModelOptions, tensor: int, pipeline: int, max_sequence_length: int
) -> Iterator[tuple[int, int, GPTModel]]:
    """(tensor-parallel rank, stage, model without memory) of each; its groups last until the next.

    Raises RuntimeError where torch.distributed runs already, ValueError as `build_model` does.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run needs a process without process groups: start it without torchrun")
    # Transformer Engine's layers hold the same parameters, and cannot be built without a GPU
    options = dataclasses.replace(options, transformer_impl="local")
    for rank in range(tensor * pipeline):
        with _groups(rank, tensor, pipeline) as groups:
            with META, _EverythingOnMeta():
                model = build_model(shape, options, groups, max_sequence_length)
            yield rank % tensor, rank // tensor, model


@contextmanager
def _groups(rank: int, tensor: int, pipeline: int) -> Iterator[ParallelGroups]:
    """The groups that this rank would have, none of which sends anything."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=tensor * pipeline, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(tensor, pipeline, create_gloo_process_groups=False)
        yield ParallelGroups(
            tensor=parallel_state.get_tensor_model_parallel_group(),
            pipeline=parallel_state.get_pipeline_model_parallel_group(),
            data=parallel_state.get_data_parallel_group(),
            replica=parallel_state.get_model_parallel_group(),
            device=META,
        )
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


class _EverythingOnMeta(TorchFunctionMode):
    """Also where megatron-core writes out another device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = META
        return func(*args, **kwargs)
