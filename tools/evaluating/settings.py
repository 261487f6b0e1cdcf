"""What decides the samples of an evaluation and their scores: a second start, and a baseline, are held against it."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron_replay import arguments
from megatron_replay.tasks.prompt_encoder import PromptEncoder
from megatron_replay.tasks.reward import needs_graders
from megatron_replay.tokenizer import Tokenizer
from megatron_replay.weight_sync.model_shape import ModelShape

from .benchmark import Benchmark

# a response's text, of the files that a tokenizer may consist of
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
RESPONSES = (
    "--rl-max-response-length",
    "--rl-default-temperature",
    "--rl-default-top-p",
    "--rl-default-top-k",
)
REWARD = ("--rl-reward", "--rl-reward (sha256 of its file)")


def sample_settings(
    own: argparse.Namespace,
    args: argparse.Namespace,
    shape: ModelShape,
    tokenizer: Tokenizer,
    benchmarks: Collection[Benchmark],
) -> dict[str, Any]:
    """Setting -> value, all but the weights."""
    config = arguments.grpo_config(args)
    found: dict[str, Any] = {
        "--load-hf (config.json)": asdict(shape),
        "--tokenizer-model (EOS, sha256)": [tokenizer.eos_id, _tokenizer_identity(args)],
        "--samples": own.samples,
        "--seed": args.seed,
        "--rl-engine": args.rl_engine,
        "--rl-vllm-unseeded": args.rl_vllm_unseeded,
        "--rl-max-response-length": config.sampling.max_response_length,
        "--rl-default-temperature": config.sampling.temperature,
        "--rl-default-top-p": config.sampling.top_p,
        "--rl-default-top-k": config.sampling.top_k,
        "--rl-chat-template (sha256)": PromptEncoder(tokenizer, args.rl_chat_template).identity,
        "--bf16": args.bf16,
        "--rl-fp32-lm-head": args.rl_fp32_lm_head,
        "--keep-text": own.keep_text,
        **_reward_settings(args, any(needs_graders(args.rl_reward, b.task) for b in benchmarks)),
    }
    for b in benchmarks:
        found[f"--benchmark {b.name} (problems and sha256)"] = [len(b.prompts), b.identity]
        found[f"--benchmark {b.name} (sha256 of its prompts' tokens)"] = b.tokens_identity
    return found


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """The first setting without which two accuracies or lengths are not of one kind, with both values; or ''."""
    for name in (*RESPONSES, *REWARD):
        if ours.get(name) != theirs.get(name):
            return f"{name} {ours.get(name)} as here, got {theirs.get(name)}"
    return ""


def _reward_settings(args: argparse.Namespace, graded: bool) -> dict[str, Any]:
    """A grader's limits decide what it leaves unjudged. A task's own score has none."""
    found: dict[str, Any] = {"--rl-reward": args.rl_reward}
    if graded:
        options = arguments.grader_options(args)
        found |= {"--rl-grader-timeout": options.timeout, "--rl-grader-memory-mib": options.memory_mib}
    file = Path(args.rl_reward.rpartition(":")[0])
    if file.suffix == ".py" and file.is_file():
        found["--rl-reward (sha256 of its file)"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _tokenizer_identity(args: argparse.Namespace) -> str:
    path = Path(args.tokenizer_model or args.load_hf)
    digest = hashlib.sha256()
    for file in [path] if path.is_file() else [path / name for name in TOKENIZER_FILES]:
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()
