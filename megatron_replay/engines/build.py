"""The one place that chooses an engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.engines.embedded import EmbeddedEngine, Sampler
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.engines.vllm_colocated import VllmColocatedEngine
from megatron_replay.engines.vllm_options import ServedModel
from megatron_replay.engines.vllm_server import VllmServerEngine
from megatron_replay.weight_sync.model_shape import ModelShape

AnyEngine = EmbeddedEngine | VllmServerEngine | VllmColocatedEngine


def build_engine(
    kind: str,
    sampler: Callable[[], Sampler],
    sampling: SamplingConfig,
    eos_id: int,
    vllm: VllmConfig,
    model: ServedModel,
    shape: ModelShape,
    ranks: EngineRanks,
    *,
    log_folder: str | Path,
    progress: bool,
) -> AnyEngine:
    """The engine of `--rl-engine`. `sampler` makes the embedded engine's; vLLM starts with the first `load_weights`."""
    if kind == "embedded":
        return EmbeddedEngine(sampler(), sampling, eos_id)
    shared = (vllm, sampling, eos_id, model, shape, ranks)
    if kind == "vllm-server":
        return VllmServerEngine(*shared, log_folder=log_folder, progress=progress)
    return VllmColocatedEngine(*shared, log_folder=log_folder)
