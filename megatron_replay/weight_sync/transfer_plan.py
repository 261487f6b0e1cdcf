"""TransferPlan: which bytes of which parameter every trainer rank sends, in what order.

Shards travel as Megatron holds them, each from the rank that has it, and the engine puts the Hugging Face tensors
together: no byte crosses the wire twice, and the trainer gathers nothing. Parameters come stage by stage in buckets of
bounded size; a module larger than a bucket goes alone. Trainer and engine read the same plan, so nothing else is sent
beside the bytes. What an engine needs at once, the weight and the bias of one module, is never divided: it then keeps
nothing of a bucket that it has loaded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_replay.weight_sync.error import PlanRefusedError
from megatron_replay.weight_sync.hf_mapping import find_rule, hf_names, megatron_shape
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sharded_weights import ShardedWeights

ALIGNMENT = 16  # bytes; a parameter begins where any dtype may
# behavior log-probs are those of the distribution that was sampled, temperature included
LOGPROBS_MODE = "processed_logprobs"


@dataclass(frozen=True)
class Entry:
    """One parameter: its shards' shape and dtype, and the senders that hold them, in tensor-parallel order."""

    name: str
    shard_shape: tuple[int, ...]
    dtype: str  # as in torch.<dtype>
    senders: tuple[int, ...]

    @property
    def shard_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return math.prod(self.shard_shape) * dtype.itemsize


@dataclass(frozen=True)
class Bucket:
    entries: tuple[Entry, ...]

    @property
    def senders(self) -> list[int]:
        return sorted({s for entry in self.entries for s in entry.senders})

    def offsets(self, sender: int) -> dict[str, int]:
        """Where each parameter of a sender begins in its message."""
        at, offsets = 0, {}
        for entry in self.entries:
            if sender in entry.senders:
                offsets[entry.name] = at
                at += _aligned(entry.shard_bytes)
        return offsets

    def payload_bytes(self, sender: int) -> int:
        return sum(_aligned(e.shard_bytes) for e in self.entries if sender in e.senders)


@dataclass(frozen=True)
class TransferPlan:
    buckets: tuple[Bucket, ...]
    padded_vocab: int
    senders: int
    model: dict[str, Any]  # `described`, of the trainer's

    @property
    def nbytes(self) -> int:
        """Bytes of all shards, padding of the vocabulary included."""
        return sum(e.shard_bytes * len(e.senders) for b in self.buckets for e in b.entries)

    def largest_payload(self, sender: int) -> int:
        return max((b.payload_bytes(sender) for b in self.buckets), default=0)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TransferPlan:
        buckets = tuple(
            Bucket(
                tuple(
                    Entry(e["name"], tuple(e["shard_shape"]), e["dtype"], tuple(e["senders"]))
                    for e in bucket["entries"]
                )
            )
            for bucket in value["buckets"]
        )
        return cls(buckets, value["padded_vocab"], value["senders"], value["model"])

    def check(self, shape: ModelShape, dtype: str, head_dtype: str, logprobs_mode: str) -> None:
        """Raise PlanRefusedError unless the engine's model is the trainer's, and the plan holds every tensor of it
        once, in its shape and `dtype`."""
        here = described(shape, dtype, head_dtype, logprobs_mode)
        if other := [f"{n} must be {x}, got {here.get(n)}" for n, x in self.model.items() if here.get(n) != x]:
            raise PlanRefusedError(f"the engine's model is not the trainer's: {'; '.join(other)}")
        missing = hf_names(shape)
        for entry in (e for bucket in self.buckets for e in bucket.entries):
            try:
                rule, names = find_rule(entry.name, shape)
            except KeyError as error:
                raise PlanRefusedError(f"the trainer sends what the engine's model lacks: {error.args[0]}") from error
            if entry.dtype != dtype:
                raise PlanRefusedError(f"{entry.name} is {entry.dtype} in the trainer and {dtype} in the engine")
            full = list(entry.shard_shape)
            if rule.shard_dim is not None:
                full[rule.shard_dim] *= len(entry.senders)
            expected = megatron_shape(entry.name, shape, self.padded_vocab)
            if tuple(full) != expected:
                raise PlanRefusedError(f"{entry.name} is {full} in the trainer, the engine needs {list(expected)}")
            if twice := set(names) - missing:
                raise PlanRefusedError(f"the trainer sends {min(twice)} twice")
            missing -= set(names)
        if missing:
            raise PlanRefusedError(f"the trainer sends no {min(missing)}, and {len(missing) - 1} more are missing")


def described(shape: ModelShape, dtype: str, head_dtype: str, logprobs_mode: str) -> dict[str, Any]:
    """What the log-probs of a model follow from beside its weights. Equal weights in equal shapes are not enough: RoPE,
    norms and heads may differ."""
    sizes = {name: value for name, value in asdict(shape).items() if name != "max_positions"}
    return sizes | {"dtype": dtype, "head_dtype": head_dtype, "logprobs_mode": logprobs_mode}


def make_plan(
    held: Sequence[Sequence[Entry]],
    shape: ModelShape,
    padded_vocab: int,
    bucket_bytes: int,
    fp32_lm_head: bool = False,
) -> TransferPlan:
    """The plan of all senders; held[s] are the entries of sender s (`local_entries`), each naming its holders."""
    first: dict[str, Entry] = {}
    for entry in itertools.chain.from_iterable(held):
        first.setdefault(entry.name, entry)
    entries = list(first.values())
    dtype = entries[0].dtype
    model = described(shape, dtype, "float32" if fp32_lm_head else dtype, LOGPROBS_MODE)
    return TransferPlan(tuple(_fill(entries, bucket_bytes)), padded_vocab, len(held), model)


def local_entries(weights: ShardedWeights, sender: int) -> list[Entry]:
    """What one rank sends: its shards, and on a stage's first rank what all ranks of the stage hold."""
    first = sender - weights.tensor_rank  # the stage's tensor-parallel rank 0
    entries = []
    for name, parameter in weights.parameters.items():
        if name == "output_layer.weight" and weights.shape.tied_embeddings:
            # the last stage's copy of the embedding
            continue
        rule, _ = find_rule(name, weights.shape)
        if rule.shard_dim is None and weights.tensor_rank > 0:
            continue
        holders = (first,) if rule.shard_dim is None else tuple(range(first, first + weights.tensor_size))
        dtype = str(parameter.dtype).removeprefix("torch.")
        entries.append(Entry(name, tuple(parameter.shape), dtype, holders))
    return entries


def _fill(entries: Iterable[Entry], bucket_bytes: int) -> Iterable[Bucket]:
    bucket: list[Entry] = []
    size = 0
    for _, members in itertools.groupby(entries, key=lambda e: e.name.rpartition(".")[0]):
        module = list(members)
        nbytes = sum(_aligned(e.shard_bytes) * len(e.senders) for e in module)
        if bucket and size + nbytes > bucket_bytes:
            yield Bucket(tuple(bucket))
            bucket, size = [], 0
        bucket += module
        size += nbytes
    if bucket:
        yield Bucket(tuple(bucket))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
