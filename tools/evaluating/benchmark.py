"""Benchmark: a name, problems from a JSONL file or a task, and their prompts."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_replay.rollout import Prompt
from megatron_replay.tasks.prompts import HELDOUT_COUNTER, PromptSource, heldout_prompts
from megatron_replay.tasks.task import Task, build_task, mixed
from megatron_replay.tokenizer import Tokenizer

TASK = "task:"
# counters of a benchmark begin at a place that its name picks: 2^48 to 2^49, room for 2^24 problems each
PLACES = 1 << 24
MOST_PROBLEMS = 1 << 24


@dataclass(frozen=True)
class Benchmark:
    """`report` says what of the source was left out, for a person; None where there is nothing to say."""

    name: str
    task: Task
    prompts: Sequence[Prompt]
    report: str | None

    @property
    def problems(self) -> list[int]:
        """Their numbers in the task, in the order in which they are sampled."""
        return [p.prompt_id for p in self.prompts]

    @property
    def identity(self) -> str:
        """SHA-256 of numbers, prompts and answers; a tokenizer or a template does not change it."""
        digest = hashlib.sha256()
        for index in self.problems:
            p = self.task.problem(index)
            prompt = p.prompt if isinstance(p.prompt, str) else [dict(m) for m in p.prompt]
            digest.update(json.dumps([index, prompt, p.answer]).encode() + b"\n")
        return digest.hexdigest()

    @property
    def tokens_identity(self) -> str:
        """SHA-256 of the prompts as the engine gets them."""
        return hashlib.sha256(json.dumps([p.tokens for p in self.prompts]).encode()).hexdigest()


def parse_sources(given: Sequence[str]) -> dict[str, str]:
    """NAME -> FILE or task:TASK of the values of --benchmark."""
    found: dict[str, str] = {}
    for value in given:
        name, _, source = value.partition("=")
        if not re.fullmatch(r"[\w.+-]+", name) or not source:
            raise ValueError(f"--benchmark must be NAME=FILE.jsonl or NAME=task:TASK, got {value!r}")
        if name in found:
            raise ValueError(f"--benchmark must give each name once, got {name!r} twice")
        found[name] = source
    return found


def build_benchmark(
    name: str, source: str, args: argparse.Namespace, tokenizer: Tokenizer, problems: int | None
) -> Benchmark:
    """The first `problems` of the source, or all. A ValueError names the benchmark, also for a line of its file."""
    limit = args.seq_length - args.rl_max_response_length
    shown = {"chat_template": args.rl_chat_template, "filter_long": args.rl_filter_long_prompts}
    try:
        task = _task(source, args)
        there = PromptSource(task, tokenizer, seed=args.seed, max_prompt_length=limit, **shown)
        if (most := there.size if problems is None else min(problems, there.size or problems)) is None:
            raise ValueError("--problems must be given for a task without end")
        prompts = heldout_prompts(task, tokenizer, most, limit, **shown)
        return Benchmark(name, task, numbered(prompts, name), there.report())
    except ValueError as error:
        raise ValueError(f"--benchmark {name}={source}: {error}") from error


def _task(source: str, args: argparse.Namespace) -> Task:
    if source.startswith(TASK):
        return build_task(source.removeprefix(TASK), split="heldout", seed=args.seed)
    keys = {"prompt_key": args.rl_prompt_key, "answer_key": args.rl_answer_key}
    return build_task("jsonl", split="heldout", seed=args.seed, data_path=source, **keys)


def numbered(prompts: Sequence[Prompt], benchmark: str) -> list[Prompt]:
    """The prompts with counters of this benchmark's own: equal problems of two benchmarks draw other random numbers.

    They follow from the name and the place in the benchmark alone, not from what else is evaluated beside it, and meet
    those of no training run. Raises ValueError for more than 2^24 prompts.
    """
    if len(prompts) > MOST_PROBLEMS:
        raise ValueError(f"it must have at most {MOST_PROBLEMS} problems, got {len(prompts)}")
    key = 0
    for byte in benchmark.encode():
        key = mixed(key ^ byte)
    first = HELDOUT_COUNTER + key % PLACES * MOST_PROBLEMS
    return [replace(p, counter=first + place) for place, p in enumerate(prompts)]
