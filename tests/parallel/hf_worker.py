"""The Hugging Face layout test from inside: models on layouts, loaded, computed with, and saved back.

    hf_worker.py --models DIR --cases tp2:NAME,NAME pp2:NAME ... --out DIR

For each layout and model, OUT/LAYOUT/MODEL is the folder that save_hf wrote and MODEL.safetensors holds the logits,
the gradients (where there is one stage) and what was sampled. OUT/LAYOUT/faults.json says what every rank raised
where one of them fails, OUT/LAYOUT/memory.json how many bytes every rank held beside its model during an export.

Ranks are forked from this process after it has imported everything, which takes longer than what they do.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# gloo processes on the CPU, also where there is a GPU
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist

from megatron_replay.trainer import cpu

cpu.install()

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from safetensors.torch import save_file
from torch import Tensor

from megatron_replay.config import ModelOptions, SamplingConfig
from megatron_replay.trainer import hf_checkpoint
from megatron_replay.trainer.attention import PackedSequences
from megatron_replay.trainer.generation import ModelSampler
from megatron_replay.trainer.hf_checkpoint import export_hf, load_hf_weights, save_hf
from megatron_replay.trainer.model import build_model, global_parameters
from megatron_replay.trainer.parallel import ParallelGroups, initialize
from megatron_replay.weight_sync.hf_mapping import find_rule, to_hf
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.hf_models import SEQ_LENGTH, coefficients, sequences
from tests.parallel.forked import MINUTES, run_world
from tests.parallel.layout_worker import layout

SAMPLING = SamplingConfig(max_response_length=8, seed=7)
FILE_BYTES = 60_000  # several files of several tensors


def run(name: str, models: list[Path], out: Path) -> None:
    at = layout(name)
    groups = initialize(at["tp"], at["pp"], seed=1, timeout_minutes=MINUTES)
    if dist.get_rank() == 0:
        out.mkdir(parents=True)
    dist.barrier()
    for base in models:
        shape = ModelShape.from_folder(base)
        options = ModelOptions(make_vocab_size_divisible_by=8, sequence_parallel=at["sp"])
        model = build_model(shape, options, groups, SEQ_LENGTH)
        load_hf_weights(model, base, shape, groups)
        results = {f"gradient.{k}": v for k, v in gradients(model, shape, groups).items()} if at["pp"] == 1 else {}
        results["logits"] = pipeline_logits(model, shape, groups)
        results |= samples(model, shape, groups)
        if dist.get_rank() == dist.get_world_size() - 1:
            save_file({k: v.contiguous() for k, v in results.items()}, out / f"{base.name}.safetensors")
        save_hf(out / base.name, model, shape, groups, base=base, max_file_bytes=FILE_BYTES)
    gather_to(out / "memory.json", export_memory(model, shape, groups))
    gather_to(out / "faults.json", faults(model, shape, groups, base, out))
    dist.barrier()
    parallel_state.destroy_model_parallel()


def packed_inputs() -> dict[str, Any]:
    lengths = torch.tensor([len(s) for s in sequences()])
    cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    position_ids = torch.cat([torch.arange(int(n)) for n in lengths])
    return {
        "input_ids": torch.tensor([[t for s in sequences() for t in s]]),
        "position_ids": position_ids[None],
        "attention_mask": None,
        "packed_seq_params": PackedSequences.build(cu_seqlens, position_ids, int(lengths.max()), dtype=torch.float32),
        "runtime_gather_output": True,
    }


def gradients(model: GPTModel, shape: ModelShape, groups: ParallelGroups) -> dict[str, Tensor]:
    """Of the loss of `hf_models`, in Hugging Face names, whole."""
    logits = model(**packed_inputs())[0, :, : shape.vocab_size]
    (logits * coefficients()).sum().backward()
    found = {}
    for name, parameter in global_parameters(model):
        grad = parameter.grad
        if "q_layernorm" in name or "k_layernorm" in name or getattr(parameter, "sequence_parallel", False):
            # each rank has the part of its own heads or tokens; megatron adds them up before the optimizer's step
            dist.all_reduce(grad, group=groups.tensor)
        shards = [grad]
        if find_rule(name, shape)[0].shard_dim is not None:
            shards = [torch.empty_like(grad) for _ in range(groups.tensor_size)]
            dist.all_gather(shards, grad.contiguous(), group=groups.tensor)
        found |= {k: v.clone() for k, v in to_hf(name, shards, shape).items()}
        parameter.grad = None
    return found


@torch.no_grad()
def pipeline_logits(model: GPTModel, shape: ModelShape, groups: ParallelGroups) -> Tensor:
    """[T, V] on the last stage, hidden states elsewhere: one microbatch handed from stage to stage."""
    rank, inputs = groups.pipeline_rank, packed_inputs()
    if rank > 0:
        hidden = torch.empty(inputs["input_ids"].size(1), 1, shape.hidden_size)
        dist.recv(hidden, dist.get_global_rank(groups.pipeline, rank - 1), group=groups.pipeline)
        model.set_input_tensor(hidden)
    out = model(**inputs)
    if not groups.is_last_stage:
        dist.send(out, dist.get_global_rank(groups.pipeline, rank + 1), group=groups.pipeline)
        return out
    return out[0, :, : shape.vocab_size]


def samples(model: GPTModel, shape: ModelShape, groups: ParallelGroups) -> dict[str, Tensor]:
    """Tokens and log-probs drawn with the key-value cache, after a short and a long prompt."""
    sampler = ModelSampler(model, groups, vocab_size=shape.vocab_size, max_sequence_length=SEQ_LENGTH, batch_size=1)
    drawn = sampler([sequences()[0], sequences()[3]], [5, 6], SAMPLING, eos_id=shape.vocab_size)
    return {
        f"sampled.{i}.{what}": torch.tensor(value)
        for i, pair in enumerate(drawn)
        for what, value in zip(("tokens", "logprobs"), pair, strict=True)
    }


def export_memory(model: GPTModel, shape: ModelShape, groups: ParallelGroups) -> dict[str, int]:
    """The most bytes of tensors that are alive beside the model while its weights are exported."""
    gc.collect()
    known = set(storages())
    # what is frozen is not looked through again
    gc.freeze()
    most = 0

    def look() -> None:
        nonlocal most
        most = max(most, sum(size for at, size in storages().items() if at not in known))

    def looking(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            look()
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for module, name in ((dist, "gather"), (dist, "send"), (dist, "recv"), (hf_checkpoint, "to_hf")):
            stack.enter_context(mock.patch.object(module, name, looking(getattr(module, name))))
        count, tensors = 0, export_hf(model, shape, groups)
        # not a loop over them: its variable would keep the last one
        while next(tensors, None) is not None:
            count += 1
    gc.unfreeze()
    return {"most": most, "tensors": count}


def storages() -> dict[int, int]:
    """Address -> bytes of every tensor that is alive."""
    found = {}
    for x in gc.get_objects():
        if type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu":
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    return found


def faults(model: GPTModel, shape: ModelShape, groups: ParallelGroups, base: Path, out: Path) -> dict[str, str]:
    """What this rank raises when one rank cannot go on. That there is an answer at all means that nobody waits."""
    found = {}

    def attempt(what: str, target: Path) -> None:
        try:
            save_hf(target, model, shape, groups, base=base, max_file_bytes=FILE_BYTES)
            found[what] = "nothing"
        except Exception as error:
            found[what] = f"{type(error).__name__}: {error}"

    real, written = hf_checkpoint.save_file, []

    def disk_full(tensors: dict[str, Tensor], path: Path, **kwargs: Any) -> None:
        if written:
            raise OSError(28, "No space left on device")
        written.append(path)
        real(tensors, path, **kwargs)

    with mock.patch.object(hf_checkpoint, "save_file", disk_full):
        attempt("disk full after a file", out / "full")
    with stranger(model) if dist.get_rank() == 1 else mock.patch.object(model, "unused", 0, create=True):
        attempt("one rank's model is another", out / "stranger")
    attempt("the folder exists", out / base.name)
    return found | {"left behind": ", ".join(x.name for x in out.iterdir() if x.name in ("full", "stranger"))}


@contextmanager
def stranger(model: GPTModel) -> Iterator[None]:
    model.decoder.register_parameter("adapter", torch.nn.Parameter(torch.zeros(2)))
    try:
        yield
    finally:
        del model.decoder.adapter


def gather_to(path: Path, value: Any) -> None:
    """All ranks' values, by rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(everyone))


def run_all(cases: list[tuple[str, list[Path]]], out: Path) -> None:
    for name, models in cases:
        run(name, models, out / name)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    worlds: dict[int, list[tuple[str, list[Path]]]] = {}
    for case in args.cases:
        name, _, models = case.partition(":")
        sizes = [int(x) for x in re.findall(r"\d+", name)]
        worlds.setdefault(math.prod(sizes), []).append((name, [args.models / x for x in models.split(",")]))
    for world, cases in worlds.items():
        run_world(world, args.out / f"store{world}", run_all, cases, args.out)


if __name__ == "__main__":
    main()
