"""What a vLLM engine is started with for rollouts: one table, for servers and for engines in a child process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_replay.config import VllmConfig
from megatron_replay.weight_sync.transfer_plan import LOGPROBS_MODE

# the weight-transfer interface changes between minor versions
PINNED_VLLM = "0.32"
BACKEND = "megatron_replay"
WORKER_EXTENSION = "megatron_replay.engines.transfer_status.TransferStatus"

LoadFormat = Literal["dummy", "auto"]


@dataclass(frozen=True)
class ServedModel:
    """What an engine serves. `folder` holds config.json; with load format dummy its weights, if any, are not read.

    `device` is "cpu" or "cuda", `dtype` a name that vLLM knows. `backend` receives weights; None: no weight transfer.
    """

    folder: Path
    dtype: str
    max_model_len: int
    seed: int
    device: Literal["cpu", "cuda"]
    load_format: LoadFormat = "dummy"
    backend: str | None = BACKEND
    fp32_lm_head: bool = False


def engine_options(config: VllmConfig, model: ServedModel) -> dict[str, Any]:
    """vLLM's engine arguments, by the names that `LLM()` has for them. Raises ValueError for a folder without
    config.json."""
    if not (model.folder / "config.json").is_file():
        raise ValueError(f"folder must hold the config.json of a Hugging Face model, got {model.folder}")
    options: dict[str, Any] = {
        "model": str(model.folder),
        "dtype": model.dtype,
        "max_model_len": model.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "seed": model.seed,
        # all weights are pushed before the first request
        "load_format": model.load_format,
        # the model's generation_config.json would bring stops and sampling defaults of its own
        "generation_config": "vllm",
        "logprobs_mode": LOGPROBS_MODE,
        # token ids in and out: text never passes
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    if model.backend is not None:
        options["weight_transfer_config"] = {"backend": model.backend}
        options["worker_extension_cls"] = WORKER_EXTENSION
    if model.fp32_lm_head:
        options["hf_overrides"] = {"head_dtype": "float32"}
    if model.device == "cpu":
        # in bytes: VLLM_CPU_KVCACHE_SPACE knows whole GiB only
        options["kv_cache_memory_bytes"] = int(config.memory_gib * 2**30)
        options["enforce_eager"] = True
    else:
        options["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.tensor_parallel_size > 1:
        options["tensor_parallel_size"] = config.tensor_parallel_size
        options["distributed_executor_backend"] = "mp"
    return options
