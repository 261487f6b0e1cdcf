"""The engine that takes the pushes, and how it shows which weights it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_replay.config import VllmConfig
from megatron_replay.engines.group_request import RawSample
from megatron_replay.engines.vllm_child import VllmChild
from megatron_replay.engines.vllm_options import LoadFormat, ServedModel, engine_options

from .engine_phases import FOLDER_VARIABLE
from .settings import ENGINES, Settings, python_path

STARTUP_TIMEOUT = 300.0  # seconds
KV_CACHE_GIB = 1 / 32
MAX_MODEL_LEN = 64
# short: without bfloat16 units a CPU takes a second for some tokens of a real model
PROMPTS = [[7 * i + 3, 5 * i + 11, 3 * i + 50] for i in range(8)]
GREEDY = {"temperature": 0, "max_tokens": 1, "ignore_eos": True, "logprobs": 0, "detokenize": False}
# other sums of bfloat16 let the second best token win now and then; other weights share no token
LEAST_EQUAL = 6
Generate = Callable[[Sequence[Sequence[int]], Sequence[dict[str, Any]]], list[list[RawSample]]]


def options(settings: Settings, engine_layout: str, load_format: LoadFormat) -> dict[str, Any]:
    """Of vLLM's LLM()."""
    config = VllmConfig(tensor_parallel_size=ENGINES[engine_layout], max_num_seqs=len(PROMPTS), memory_gib=KV_CACHE_GIB)
    served = ServedModel(settings.folder, "bfloat16", MAX_MODEL_LEN, seed=0, device="cpu", load_format=load_format)
    # vLLM warms up with as many tokens as a batch may have
    return engine_options(config, served) | {"max_num_batched_tokens": MAX_MODEL_LEN, "block_size": 32}


def start_engine(settings: Settings, engine_layout: str, phases: Path) -> VllmChild:
    """An engine with weights of its own, in processes of its own; `phases` connects it to `looked_at`."""
    env = {"PYTHONPATH": python_path(), FOLDER_VARIABLE: str(phases)}
    return VllmChild(
        options(settings, engine_layout, "dummy")
        | {"worker_extension_cls": "benchmarks.weight_sync.engine_phases.EnginePhases"},
        settings.folder / f"engine-{engine_layout}.log",
        timeout=settings.timeout,
        startup_timeout=STARTUP_TIMEOUT,
        env=env,
    )


def greedy_tokens(generate: Generate) -> list[int]:
    """The likeliest token after each prompt."""
    return [samples[0].tokens[0] for samples in generate(PROMPTS, [GREEDY] * len(PROMPTS))]


def complaint(found: list[int], expected: list[int]) -> str | None:
    """None where the engine samples as it should."""
    equal = sum(a == b for a, b in zip(found, expected, strict=True))
    return None if equal >= LEAST_EQUAL else f"the engine samples {found} after the push, expected {expected}"
