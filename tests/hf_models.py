"""Tiny random Hugging Face models of every supported family, and what transformers computes with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB = 29  # odd: every layout pads it
SEQ_LENGTH = 320  # positions that feel RoPE scaling
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "max_position_embeddings": SEQ_LENGTH,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True)
class Case:
    family: str
    tied: bool
    scaled: bool = False


CASES = {
    "qwen3-tied": Case("qwen3", True),
    "qwen3-untied": Case("qwen3", False),
    "qwen2-tied": Case("qwen2", True),
    "qwen2-untied": Case("qwen2", False),
    "llama-tied": Case("llama", True),
    "llama-untied-scaled": Case("llama", False, True),
}


def random_model(folder: Path, case: Case, *, seed: int = 0, **changes: Any) -> Path:
    """Save a model whose norms are away from 1, biases away from 0 and logits of the order of 1."""
    import transformers

    torch.manual_seed(seed)
    prefix = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[case.family]
    sizes: dict[str, Any] = {**SIZES, "tie_word_embeddings": case.tied}
    # Qwen3 states head_dim; here it is not hidden / heads
    sizes |= {"head_dim": 16} if case.family == "qwen3" else {}
    sizes["rope_parameters"] = {"rope_theta": 10_000.0, **(LLAMA3_ROPE if case.scaled else {"rope_type": "default"})}
    config = getattr(transformers, f"{prefix}Config")(**(sizes | changes))
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.5 if name.endswith("bias") else 0.15)
    model.save_pretrained(folder)
    return folder


def load(folder: Path, **changes: Any) -> Any:
    """The model as transformers reads it, with other values of its config where given."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **changes)


def sequences() -> list[list[int]]:
    """Unequal lengths, two of them equal."""
    g = torch.Generator().manual_seed(3)
    return [torch.randint(2, VOCAB, (n,), generator=g).tolist() for n in (7, 12, 7, 300)]


def coefficients() -> Tensor:
    """[T, V] of a loss that is linear in the logits of all sequences."""
    return torch.randn(sum(map(len, sequences())), VOCAB, generator=torch.Generator().manual_seed(4))


def logits_and_gradients(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers: logits [T, V] of `sequences`, and d sum(coefficients * logits) / d weight by name."""
    rows = torch.cat([model(torch.tensor([ids])).logits[0] for ids in sequences()])
    (rows * coefficients()).sum().backward()
    return rows.detach(), {name: p.grad for name, p in model.named_parameters()}


@torch.no_grad()
def logprobs(model: Any, prompt: list[int], response: list[int], temperature: float = 1.0) -> Tensor:
    """log softmax of each token of the response."""
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    rows = (logits / temperature).log_softmax(-1)
    return rows.gather(1, torch.tensor(response)[:, None])[:, 0]
