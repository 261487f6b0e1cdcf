"""Checkpoints of a whole run: weights and optimizer (torch_dist, reshardable), buffer shards, and the run's state.

    SAVE/latest_checkpointed_iteration.txt
    SAVE/iter_0000050/weights/...                               megatron-core torch_dist
    SAVE/iter_0000050/replay_buffer_00000_of_00002.safetensors  one for each data-parallel rank
    SAVE/iter_0000050/run.json                                  step, prompt cursor, schedule, identity, counters
    SAVE/iter_0000050/manifest.json                             every file's size and sha256

A checkpoint is written beside its place, then renamed, then named by the latest-file: a run killed at any
moment leaves the last good one. Loading checks the manifest first; a missing or damaged part is an error that
names it. Every random number of the method is keyed by (seed, step, uid), so the seed and the counters are its
whole random state.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core import parallel_state as ps
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.api import CheckpointException

from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.trainer.adam_state import allocate_adam_state, parts_of, use_own_settings, write_count_of_zero
from megatron_replay.trainer.manifest import check_manifest, write_atomically, write_manifest
from megatron_replay.trainer.optimizer import unwrap
from megatron_replay.trainer.policy import MegatronPolicy
from megatron_replay.trainer.safe_load import nothing_is_run

FORMAT_VERSION = 2
RUN_FIELDS = {"step": int, "cursor": int, "data_parallel": int, "distributed_optimizer": bool} | dict.fromkeys(
    ("fixed", "counters", "model", "scheduler"), dict
)
LATEST = "latest_checkpointed_iteration.txt"


@dataclasses.dataclass
class RunState:
    """What continues a run beside weights, optimizer and buffer. `fixed` must be the same in the run that resumes."""

    step: int  # the next step to run
    cursor: int  # prompts taken so far
    fixed: dict[str, Any]
    counters: dict[str, Any] = dataclasses.field(default_factory=dict)


def save(
    folder: str | Path, policy: MegatronPolicy, buffer: RolloutReplayBuffer, state: RunState, *, keep_last: int = 0
) -> Path:
    """Write iteration `state.step` and make it the latest. Every rank calls it.

    With `keep_last` older iterations than that many are removed once the new one is in place; 0 keeps all. Raises
    RuntimeError, with the room that is left, where it cannot be written; the last good one then still is the latest.
    """
    root = Path(folder)
    final = root / f"iter_{state.step:07d}"
    partial = final.with_suffix(".partial")
    try:
        _write(partial, policy, buffer, state)
        if dist.get_rank() == 0:
            _make_latest(root, partial, final)
            if keep_last:
                _remove_old(root, keep_last)
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        free = shutil.disk_usage(root).free
        raise RuntimeError(
            f"--save {root}: iteration {state.step} could not be written, {free / 1e9:.2f} GB are free; the last good "
            f"one stays: {type(error).__name__}: {error}"
        ) from error
    dist.barrier()
    return final


def _write(partial: Path, policy: MegatronPolicy, buffer: RolloutReplayBuffer, state: RunState) -> None:
    groups = policy.groups
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "weights").mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(_sharded_state(policy, is_loading=False), str(partial / "weights"))
    if groups.writes_shard:
        name = f"replay_buffer_{groups.data_rank:05d}_of_{groups.data_size:05d}.safetensors"
        save_file(buffer.state_dict(), partial / name)
    dist.barrier()
    if dist.get_rank() == 0:
        run = {
            "format_version": FORMAT_VERSION,
            "scheduler": policy.scheduler.state_dict(),
            **dataclasses.asdict(state),
        }
        run["data_parallel"] = groups.data_size
        run["distributed_optimizer"] = _is_distributed(policy)
        run["model"] = _model_identity(policy)
        (partial / "run.json").write_text(json.dumps(run, indent=1))
    dist.barrier()
    write_manifest(partial)


def _make_latest(root: Path, partial: Path, final: Path) -> None:
    replaced = final.with_suffix(".replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():
        final.rename(replaced)
    partial.rename(final)
    write_atomically(root / LATEST, str(int(final.name.removeprefix("iter_"))))
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_old(root: Path, keep_last: int) -> None:
    newest = latest(root).name
    older = sorted(x for x in root.glob("iter_*") if re.fullmatch(r"iter_\d+", x.name) and x.name < newest)
    for old in older[: max(0, len(older) + 1 - keep_last)]:
        # a folder that is half removed must not look like a checkpoint
        gone = old.with_suffix(".removed")
        old.rename(gone)
        shutil.rmtree(gone)


def load(
    folder: str | Path,
    policy: MegatronPolicy,
    buffer: RolloutReplayBuffer,
    fixed: dict[str, Any],
    *,
    allow_empty_buffer: bool = False,
) -> RunState:
    """Fill policy and buffer from the latest iteration of `folder`, on this run's layout.

    `fixed` names what must not differ (flag -> value): a difference is a ValueError with both values.
    """
    iteration = latest(folder)
    check_manifest(iteration, allow_empty_buffer)
    run = _read_run(iteration)
    for name, value in fixed.items():
        saved = run["fixed"].get(name)
        if saved != value:
            raise ValueError(f"--load {iteration} was written with {name} {saved!r}, got {value!r}")
    for name, value in _model_identity(policy).items():
        if (saved := run["model"].get(name)) != value:
            raise ValueError(f"--load {iteration} is of another model: {name} {saved}, this run has {value}")
    if run["distributed_optimizer"] != _is_distributed(policy):
        raise ValueError(
            f"--load {iteration} was written {'with' if run['distributed_optimizer'] else 'without'} "
            f"--use-distributed-optimizer, got the opposite"
        )
    try:
        _load_weights(iteration / "weights", policy)
    except (Exception, CheckpointException) as error:
        if str(error).startswith("--load"):
            raise
        # whole files, by their checksums, that hold something else
        raise ValueError(f"--load {iteration / 'weights'} cannot be read: {type(error).__name__}: {error}") from error
    # the schedule is that of this run's flags, so that --train-iters can be raised; only its place is restored
    policy.scheduler.num_steps = 0
    policy.scheduler.step(run["scheduler"]["num_steps"])

    shards = sorted(iteration.glob("replay_buffer_*_of_*.safetensors"))
    if len(shards) == run["data_parallel"]:
        try:
            buffer.load_state_dict(load_file(x) for x in shards)
        except (ValueError, SafetensorError) as error:
            raise ValueError(f"--load {iteration}: {error}") from error
    elif not allow_empty_buffer:
        raise ValueError(f"--load {iteration} must have {run['data_parallel']} shards of the buffer, got {len(shards)}")
    return RunState(run["step"], run["cursor"], run["fixed"], run["counters"])


def _read_run(iteration: Path) -> dict[str, Any]:
    """run.json, of this format, with every field that is used."""
    path = iteration / "run.json"
    try:
        run: dict[str, Any] = json.loads(path.read_text())
        version = run["format_version"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--load {path} is none ({type(error).__name__}: {error})") from error
    if version != FORMAT_VERSION:
        newer = " (a newer megatron_replay wrote it)" if type(version) is int and version > FORMAT_VERSION else ""
        raise ValueError(f"--load {iteration}: format_version must be {FORMAT_VERSION}, got {version!r}{newer}")
    for name, kind in RUN_FIELDS.items():
        if type(run.get(name)) is not kind:
            raise ValueError(f"--load {path}: {name} must be of type {kind.__name__}, got {run.get(name)!r}")
    steps = run["scheduler"].get("num_steps")
    for name, value in (("step", run["step"]), ("cursor", run["cursor"]), ("scheduler.num_steps", steps)):
        if type(value) is not int or value < 0:
            raise ValueError(f"--load {path}: {name} must be an integer of at least 0, got {value!r}")
    return run


def latest(folder: str | Path) -> Path:
    """The newest complete iteration. Raises ValueError when there is none: a resume is never a fresh start."""
    root = Path(folder)
    if not (root / LATEST).is_file():
        raise ValueError(f"--load must name a folder with a checkpoint, got {str(folder)!r} without {LATEST}")
    text = (root / LATEST).read_text(errors="replace").strip()
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"--load {root / LATEST} must hold an iteration number, got {text!r}")
    iteration = root / f"iter_{int(text):07d}"
    if not iteration.is_dir():
        raise ValueError(f"--load {root / LATEST} names iteration {text}, and {iteration} is missing")
    return iteration


def _sharded_state(policy: MegatronPolicy, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": True,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
    }
    allocate_adam_state(policy.optimizer)
    weights = unwrap(policy.model).sharded_state_dict(metadata=metadata)
    optimizer = policy.optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": optimizer}


def _load_weights(folder: Path, policy: MegatronPolicy) -> None:
    with nothing_is_run(folder):
        state = dist_checkpointing.load(_sharded_state(policy, is_loading=True), str(folder))
    result = unwrap(policy.model).load_state_dict(state["model"], strict=False)
    missing = [k for k in result.missing_keys if not k.endswith("_extra_state")]
    if missing or result.unexpected_keys:
        raise ValueError(f"--load {folder} is of another model: missing {missing}, unexpected {result.unexpected_keys}")
    adam = state["optimizer"].get("optimizer", state["optimizer"])
    use_own_settings(adam, policy.optimizer)
    write_count_of_zero(adam, policy.optimizer)
    policy.optimizer.load_state_dict(state["optimizer"])


def _model_identity(policy: MegatronPolicy) -> dict[str, Any]:
    """Sizes that decide the shapes of the weights, and their precision; none depends on the layout."""
    model = unwrap(policy.model)
    names = ("hidden_size", "num_layers", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size")
    sizes = {name: getattr(model.config, name) for name in names}
    return {**sizes, "vocab_size": policy.head.vocab_size, "dtype": str(model.config.params_dtype)}


def _is_distributed(policy: MegatronPolicy) -> bool:
    return any(isinstance(x, DistributedOptimizer) for x in parts_of(policy.optimizer))
