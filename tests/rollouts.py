"""Synthetic rollouts for tests."""

from __future__ import annotations

import torch

from megatron_replay.rollout import Completion, Prompt, RolloutBatch

VOCAB = 29


def completion(
    counter: int = 0,
    sample: int = 0,
    *,
    prompt: int = 3,
    response: int = 4,
    group_size: int = 4,
    seed: int = 0,
    version: int = 0,
) -> Completion:
    """Random ids and log-probs; `prompt` and `response` are lengths."""
    g = torch.Generator().manual_seed(seed * 1_000_003 + counter * 1009 + sample)
    source = Prompt(tuple(torch.randint(0, VOCAB, (prompt,), generator=g).tolist()), counter, prompt_id=counter)
    return Completion(
        prompt=source,
        uid=source.uid(sample, group_size),
        tokens=tuple(torch.randint(0, VOCAB, (response,), generator=g).tolist()),
        logprobs=tuple((-3 * torch.rand(response, generator=g)).tolist()),
        finish_reason="stop",
        weight_version=version,
    )


def batch(
    lengths: list[tuple[int, int]], *, birth_step: int = 0, first_counter: int = 0, seed: int = 0
) -> RolloutBatch:
    """One rollout for each (prompt length, response length), random advantages, uids distinct."""
    made = [
        completion(first_counter + i, prompt=p, response=r, seed=seed, group_size=1, version=birth_step)
        for i, (p, r) in enumerate(lengths)
    ]
    g = torch.Generator().manual_seed(seed + 17)
    out = RolloutBatch.from_completions(made, torch.rand(len(made), generator=g).tolist())
    return out.replace(advantage=torch.randn(len(made), generator=g), group_std=torch.ones(len(made)))


def sharing_prompts(source: RolloutBatch) -> RolloutBatch:
    """Rollouts whose prompts have the same length get the prompt of the first of them."""
    tokens = source.tokens.clone()
    first: dict[int, torch.Tensor] = {}
    for i in range(len(source)):
        start, end = source.cu_seqlens[i : i + 2].tolist()
        prompt = tokens[start:end][~source.loss_mask[start:end]]
        tokens[start : start + len(prompt)] = first.setdefault(len(prompt), prompt.clone())
    return source.replace(tokens=tokens)
