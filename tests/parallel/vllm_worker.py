"""The trainer's side of the push test: models on layouts, exported, and pushed to servers that run.

    vllm_worker.py --models M1 M2 --servers URL URL --layouts tp2-pp2 tp1 ... --out DIR

All layouts feed all servers, each with one stream of messages. OUT/M1 and OUT/M2 are the exports of the first layout.
OUT/pushes.json has a row for each layout and push: model, bucket size, and every server's greedy answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch
import torch.distributed as dist

from megatron_replay.trainer import cpu

cpu.install()

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from megatron_replay.config import ModelOptions
from megatron_replay.engines.vllm_client import VllmClient
from megatron_replay.trainer.hf_checkpoint import load_hf_weights, save_hf
from megatron_replay.trainer.model import build_model, global_parameters
from megatron_replay.trainer.parallel import ParallelGroups, initialize
from megatron_replay.weight_sync import sender as sender_module
from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.sender import WeightSender
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from tests.parallel.forked import run_world
from tests.parallel.layout_worker import layout
from tests.vllm_greedy import PARAMS, Answers, answers, prompts

# one module at a time, which is less than the embedding; several; everything
BUCKETS = (1, 100_000, 1 << 30)


def run(name: str, args: argparse.Namespace, first_version: int, export: bool) -> None:
    at = layout(name)
    groups = initialize(at["tp"], at["pp"], seed=1)
    shape = ModelShape.from_folder(args.models[0])
    model = build_model(shape, ModelOptions(make_vocab_size_divisible_by=8), groups, 64)
    clients = [VllmClient(url, timeout=60) for url in args.servers] if dist.get_rank() == 0 else []
    rows = []
    if export:
        fail_once(sharded(model, shape, groups), clients, groups)
    for i, bucket in enumerate(BUCKETS):
        source = args.models[(i + 1) % 2]
        load_hf_weights(model, source, shape, groups)
        if export and i < 2:
            save_hf(args.out / source.name, model, shape, groups, base=source)
        # a sender of its own for each bucket size: the engines meet a trainer that starts again
        sender = WeightSender(
            sharded(model, shape, groups), transport="gloo", bucket_bytes=bucket, device=groups.device, timeout=60
        )
        sender.connect(clients)
        report = sender.push(first_version + i)
        sender.close()
        if dist.get_rank() == 0:
            found = [greedy(client, shape.vocab_size) for client in clients]
            rows.append({"layout": name, "model": source.name, "bucket": bucket, "buckets": len(sender.plan.buckets),
                         "version": first_version + i, "seconds": report.seconds, "answers": found})  # fmt: skip
    if dist.get_rank() == 0:
        path = args.out / "pushes.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else []) + rows))
    dist.barrier()
    parallel_state.destroy_model_parallel()


def fail_once(weights: ShardedWeights, clients: list[VllmClient], groups: ParallelGroups) -> None:
    """A push that is damaged on its way: an error on every rank, and servers that take the next one."""
    sender = WeightSender(weights, transport="gloo", bucket_bytes=100_000, device=groups.device, timeout=60)
    sender.connect(clients)
    real = sender_module.seal

    def damage(message: torch.Tensor, version: int, bucket: int) -> None:
        real(message, version, bucket)
        message[5] ^= 1

    with mock.patch.object(sender_module, "seal", damage):
        try:
            sender.push(0)
        except WeightSyncError as error:
            assert "arrived damaged" in str(error), error
        else:
            raise AssertionError("a damaged push was taken")
    if clients:
        assert all(client.is_paused() and client.weight_version() is None for client in clients)


def sharded(model: GPTModel, shape: ModelShape, groups: ParallelGroups) -> ShardedWeights:
    return ShardedWeights(
        shape,
        model.vocab_size,
        {name: parameter.detach() for name, parameter in global_parameters(model)},
        groups.tensor_rank,
        groups.tensor_size,
        groups.replica if dist.get_world_size() > 1 else None,
    )


def greedy(client: VllmClient, vocab_size: int) -> Answers:
    async def ask() -> list[Any]:
        async with client.async_http() as http:
            return await asyncio.gather(*(client.generate(http, p, PARAMS, 60) for p in prompts(vocab_size)))

    return answers(asyncio.run(ask()))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, nargs=2, required=True)
    parser.add_argument("--servers", nargs="+", required=True)
    parser.add_argument("--layouts", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    for i, name in enumerate(args.layouts):
        at = layout(name)
        run_world(at["tp"] * at["pp"], args.out / f"store{i}", run, name, args, i * len(BUCKETS), i == 0)


if __name__ == "__main__":
    main()
