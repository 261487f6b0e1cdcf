"""A tiny random Qwen3 checkpoint, and the one real vLLM server that tests of several files share."""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from megatron_replay.config import VllmConfig
from megatron_replay.engines.child_process import ChildProcess
from megatron_replay.engines.vllm_client import VllmClient
from megatron_replay.engines.vllm_command import launch_server
from megatron_replay.engines.vllm_options import ServedModel

VOCAB_SIZE = 320
EOS_ID = 1
MAX_MODEL_LEN = 256
API_KEY = "a key for tests"
SHARED = VllmConfig(max_num_seqs=64, memory_gib=0.25, startup_timeout=400, request_timeout=60, retries=2)


def write_tiny_qwen3(folder: Path, seed: int = 0) -> Qwen3ForCausalLM:
    """Write config.json and float32 weights to `folder`, without a tokenizer; returns the model in eval mode.

    The initializer range makes logits spread over several units, so that samples of two seeds differ.
    """
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        initializer_range=0.15,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float().eval()
    model.save_pretrained(folder)
    return model


@dataclass
class SharedServer:
    process: ChildProcess
    client: VllmClient
    model: Qwen3ForCausalLM
    folder: Path

    def set_version(self, version: object) -> None:
        """Label the weights, as the end of a push does."""
        body = {"new_version": str(version)}
        httpx.post(
            self.client.url + "/update_weight_version", json=body, headers=self.client.headers
        ).raise_for_status()


_running: list[SharedServer] = []
_failed: list[Exception] = []


def shared_server() -> SharedServer:
    """A server of the tiny model, started where none runs; it stops when the tests end. Skips without vllm."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    if _running and _running[-1].process.alive():
        return _running[-1]
    if _failed:
        pytest.fail(f"the vLLM server did not start: {_failed[0]}")
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder)
    model = write_tiny_qwen3(folder)
    served = ServedModel(folder, "float32", MAX_MODEL_LEN, 0, "cpu", load_format="auto", backend=None)
    try:
        process, client = launch_server(SHARED, served, API_KEY, folder / "log")
    except Exception as error:
        # no second wait of a minute for each test
        _failed.append(error)
        raise
    atexit.register(process.stop)
    _running.append(SharedServer(process, client, model, folder))
    return _running[-1]
