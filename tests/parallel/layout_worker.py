"""The layout test from inside: the real loop for three updates with replay, on each layout in turn.

    layout_worker.py --model DIR --layouts 1:tp1 2:tp2 2:pp2 4:tp2-pp2 ... --out DIR

The reference run (`tp1`) samples its rollouts and records them; the others train on the recorded ones, so
that what differs is the layout alone. Each layout's own sampling of the first step is kept for comparison.
OUT/LAYOUT.json has what each came to; the number before a layout is that of its ranks, forked from this process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# gloo processes on the CPU, also where there is a GPU
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# for the layouts whose name ends in triton; decided on when triton is imported
os.environ["TRITON_INTERPRET"] = "1"

from megatron_replay.trainer import cpu

cpu.install()

from megatron.core import parallel_state

from megatron_replay.algorithm import replay_grpo
from megatron_replay.config import GrpoConfig, ModelOptions, OptimizerOptions, ReplayConfig, SamplingConfig
from megatron_replay.engines.embedded import EmbeddedEngine, Sampled
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.replay_buffer import RolloutReplayBuffer
from megatron_replay.rollout import Completion, Prompt, RolloutBatch
from megatron_replay.trainer.forward_step import HeadOptions
from megatron_replay.trainer.generation import ModelSampler
from megatron_replay.trainer.hf_checkpoint import load_hf_weights
from megatron_replay.trainer.model import build_model
from megatron_replay.trainer.optimizer import unwrap, wrap_for_training
from megatron_replay.trainer.parallel import ParallelGroups, initialize
from megatron_replay.trainer.policy import MegatronPolicy
from megatron_replay.weight_sync.model_shape import ModelShape
from tests.parallel.forked import run_world

SEQ_LENGTH, EOS, PROMPTS, GROUP, UPDATES = 48, 1, 4, 4, 3
SAMPLING = SamplingConfig(max_response_length=10, temperature=0.9, seed=11)


class FixedPrompts:
    """Prompts of unequal length that depend on their counter alone."""

    def __init__(self, vocab: int) -> None:
        self.vocab, self.cursor = vocab, 0

    def take(self, n: int) -> list[Prompt]:
        out = []
        for counter in range(self.cursor, self.cursor + n):
            g = torch.Generator().manual_seed(counter)
            ids = torch.randint(2, self.vocab, (2 + counter % 5,), generator=g)
            out.append(Prompt(tuple(ids.tolist()), counter, counter))
        self.cursor += n
        return out


class RecordedEngine:
    """The reference run's completions, by uid."""

    def __init__(self, recording: dict[int, dict[str, Any]]) -> None:
        self.recording = recording

    def load_weights(self, policy: object, version: int) -> None: ...

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> Sampled:
        rows = [self.recording[p.uid(s, group_size)] for p in prompts for s in range(group_size)]
        owners = [p for p in prompts for _ in range(group_size)]
        return Sampled(
            [
                Completion(
                    p, r["uid"], tuple(r["tokens"]), tuple(r["logprobs"]), r["finish_reason"], r["weight_version"]
                )
                for p, r in zip(owners, rows, strict=True)
            ]
        )

    def metrics(self) -> dict[str, float]:
        return {}


class RecordingEngine(EmbeddedEngine):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept: list[Completion] = []

    def generate(self, prompts: Sequence[Prompt], group_size: int) -> list[Completion]:
        out = super().generate(prompts, group_size)
        self.kept += out
        return out


def reward(completions: Sequence[Completion]) -> list[float]:
    """Anything that depends on the tokens: the share of even ids."""
    return [sum(t % 2 == 0 for t in c.tokens) / len(c.tokens) for c in completions]


def layout(name: str) -> dict[str, Any]:
    """tp2-pp2-sp-distopt -> sizes and switches; what is left of the world is data parallel."""
    sizes = {m[1]: int(m[2]) for m in re.finditer(r"(tp|pp)(\d+)", name)}
    return {"tp": sizes.get("tp", 1), "pp": sizes.get("pp", 1), "sp": "sp" in name, "distopt": "distopt" in name}


def run(name: str, folder: Path, recording: Path) -> dict[str, Any]:
    at = layout(name)
    groups = initialize(at["tp"], at["pp"], seed=1)
    shape = ModelShape.from_folder(folder)
    options = ModelOptions(sequence_parallel=at["sp"], make_vocab_size_divisible_by=8)
    model = build_model(shape, options, groups, SEQ_LENGTH)
    load_hf_weights(model, folder, shape, groups)
    ddp, optimizer, scheduler = wrap_for_training(
        model, OptimizerOptions(lr=1e-3, total_updates=UPDATES, use_distributed_optimizer=at["distopt"], clip_grad=0.1)
    )
    config = GrpoConfig(
        train_iters=UPDATES,
        prompts_per_step=PROMPTS,
        group_size=GROUP,
        replay=ReplayConfig(warmup_steps=1, tau_max=2, priority_alpha=1.0, replay_ratio=0.5),
        loss=GrpoLossOptions(entropy_weight=0.01, kl_beta=0.02),
        sampling=SAMPLING,
    )
    head = HeadOptions(
        config.loss,
        shape.vocab_size,
        SAMPLING.temperature,
        logits_memory_bytes=4096,
        age_buckets=3,
        backend="triton" if name.endswith("triton") else "reference",
    )
    policy = MegatronPolicy(ddp, optimizer, scheduler, groups, head, bin_tokens=SEQ_LENGTH, age_metrics=True)
    data = groups.data_parallel()
    sampler = ModelSampler(
        unwrap(ddp), groups, vocab_size=shape.vocab_size, max_sequence_length=SEQ_LENGTH, batch_size=7
    )
    own = RecordingEngine(sampler, SAMPLING, EOS)
    own.load_weights(policy, 0)
    sampled = own.generate(data.shard(FixedPrompts(shape.vocab_size).take(PROMPTS)), GROUP)
    engine: Any = own
    if recording.exists():
        engine = RecordedEngine({r["uid"]: r for r in json.loads(recording.read_text())})
    rows: list[dict[str, Any]] = []
    replay_grpo(
        policy,
        engine,
        FixedPrompts(shape.vocab_size),
        reward,
        RolloutReplayBuffer(config.replay, seed=5, arena_tokens=4096, group=data),
        config,
        group=data,
        phase=lambda _: nullcontext(),
        report=lambda step, iteration, metrics: rows.append(metrics),
        end_step=lambda step: False,
    )
    if not recording.exists():
        recording.write_text(json.dumps([asdict(c) for c in {c.uid: c for c in own.kept}.values()]))
    gap = labels_gap(policy) if groups.pipeline_size == 1 else None
    results = {"rows": rows, "sampled": gather_samples(groups, sampled), "labels_gap": gap}
    if groups.tensor_size == groups.data_size == 1:
        results["bf16_head"] = bf16_samples(folder, shape, groups, None)
        results["fp32_head"] = bf16_samples(folder, shape, groups, torch.float32)
    return results


def bf16_samples(
    folder: Path, shape: ModelShape, groups: ParallelGroups, logits_dtype: torch.dtype | None
) -> dict[str, Any]:
    """Sampled with bfloat16 weights and logits of `logits_dtype`."""
    options = ModelOptions(dtype=torch.bfloat16, make_vocab_size_divisible_by=8)
    model = build_model(shape, options, groups, SEQ_LENGTH)
    load_hf_weights(model, folder, shape, groups)
    sampler = ModelSampler(
        model,
        groups,
        vocab_size=shape.vocab_size,
        max_sequence_length=SEQ_LENGTH,
        batch_size=7,
        logits_dtype=logits_dtype,
    )
    engine = EmbeddedEngine(sampler, SAMPLING, EOS)
    engine.weight_version = 0
    return gather_samples(groups, engine.generate(FixedPrompts(shape.vocab_size).take(PROMPTS), GROUP))


@torch.no_grad()
def labels_gap(policy: MegatronPolicy) -> float:
    """Largest difference between our log-probs and minus the loss of GPTModel's own labels path.

    That path lets the padded columns of the vocabulary into its softmax, so here ours does too.
    """
    ids = torch.randint(2, 20, (1, 12), generator=torch.Generator().manual_seed(0))
    made = Completion(Prompt((int(ids[0, 0]),), 0, 0), 0, tuple(ids[0, 1:].tolist()), (0.0,) * 11, "length", 0)
    padded = unwrap(policy.model).vocab_size
    at_one = replace(policy, head=replace(policy.head, temperature=1.0, vocab_size=padded))
    ours = at_one.logprobs(RolloutBatch.from_completions([made], [0.0]))[1:]
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    theirs = -unwrap(policy.model)(ids, torch.arange(12)[None], None, labels=labels)[0, :11]
    return float((ours - theirs).abs().max())


def gather_samples(groups: ParallelGroups, sampled: list[Completion]) -> dict[str, Any]:
    """uid -> tokens and log-probs, from all data-parallel ranks."""
    mine = {str(c.uid): [c.tokens, c.logprobs] for c in sampled}
    everyone: list[Any] = [None] * groups.data_size
    dist.all_gather_object(everyone, mine, group=groups.data)
    return {uid: value for part in everyone for uid, value in part.items()}


def run_all(names: Sequence[str], folder: Path, out: Path) -> None:
    for name in names:
        results = run(name, folder, out / "recording")
        if dist.get_rank() == 0:
            (out / f"{name}.json").write_text(json.dumps(results))
        dist.barrier()
        parallel_state.destroy_model_parallel()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    worlds: dict[int, list[str]] = {}
    for case in args.layouts:
        world, _, name = case.partition(":")
        worlds.setdefault(int(world), []).append(name)
    for world, names in worlds.items():
        run_world(world, args.out / f"store{world}", run_all, names, args.model, args.out)


if __name__ == "__main__":
    main()
