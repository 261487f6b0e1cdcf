from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from megatron_replay.rollout import Completion
from megatron_replay.tasks.prompts import heldout_prompts
from megatron_replay.tasks.reward import Reward
from megatron_replay.tasks.sort_digits import SortDigits
from megatron_replay.tokenizer import build_tokenizer

MODEL = Path(__file__).parents[1] / "examples/quickstart/model"
RESPONSE = 6


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return Qwen3ForCausalLM.from_pretrained(MODEL, local_files_only=True).eval()


def test_folder_is_complete_and_small() -> None:
    names = {
        "config.json", "generation_config.json", "model.safetensors", "provenance.json",
        "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    }  # fmt: skip
    assert {p.name for p in MODEL.iterdir()} == names
    assert sum(p.stat().st_size for p in MODEL.iterdir()) < 3_000_000


def test_shapes(model: Qwen3ForCausalLM) -> None:
    layer = model.model.layers[0]
    shapes = {n: list(p.shape) for n, p in layer.self_attn.named_parameters()}
    assert shapes == {
        "q_proj.weight": [128, 64],
        "k_proj.weight": [64, 64],
        "v_proj.weight": [64, 64],
        "o_proj.weight": [64, 128],
        "q_norm.weight": [32],
        "k_norm.weight": [32],
    }
    assert list(layer.mlp.gate_proj.weight.shape) == [160, 64]
    assert len(model.model.layers) == 4
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert list(model.lm_head.weight.shape) == [15, 64]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    config = model.config
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}


def test_no_sampling_default_truncates(model: Qwen3ForCausalLM) -> None:
    config = json.loads((MODEL / "generation_config.json").read_text())
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(MODEL))
    assert (config["temperature"], config["top_p"], config["top_k"]) == (1.0, 1.0, 0)
    assert config["eos_token_id"] == model.config.eos_token_id == tokenizer.eos_id


def test_the_base_is_right_about_one_time_in_eight(model: Qwen3ForCausalLM) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(MODEL / "tokenizer.model"))
    task = SortDigits(split="heldout", seed=1234)
    prompts = heldout_prompts(task, tokenizer, 300, max_prompt_length=10)
    tokens = torch.tensor([p.tokens for p in prompts])
    with torch.no_grad():
        out = model.generate(tokens, do_sample=True, max_new_tokens=RESPONSE)[:, tokens.size(1) :].tolist()
    completions = []
    for prompt, row in zip(prompts, out, strict=True):
        stop = row.index(tokenizer.eos_id) + 1 if tokenizer.eos_id in row else len(row)
        reason = "stop" if tokenizer.eos_id in row else "length"
        response = tuple(row[:stop])
        completions.append(Completion(prompt, prompt.uid(0, 1), response, (0.0,) * stop, reason, 0))
    rewards = Reward(task, tokenizer)(completions)
    rate = sum(r for r in rewards if r is not None) / len(rewards)
    assert 0.05 < rate < 0.25
    measured = json.loads((MODEL / "provenance.json").read_text())["sampled_heldout_accuracy"]
    assert 0.10 <= measured <= 0.18
    assert abs(rate - measured) < 0.08  # four standard deviations of 300 samples
