"""linear_grpo_loss with its vocabulary over two processes equals one process, on both backends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_replay.ops.linear_grpo_loss import linear_token_logprob
from megatron_replay.ops.token_logprob import token_logprob
from tests.heads import COLUMNS, OPTIONS, TEMPERATURE, V, head_case, linear, with_grad
from tests.numerics import assert_not_trivial


def two_ranks(rank: int, store: str, seed: int) -> None:
    """Shards of 20 columns of V = 37 words: the second shard ends in 3 columns of padding that hold NaN."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group, start = dist.group.WORLD, rank * COLUMNS // 2
    mine = slice(start, start + COLUMNS // 2)
    shard = {"vocab_start": start, "vocab_size": V, "temperature": TEMPERATURE, "tp_group": group}
    for name, options in OPTIONS.items():
        hidden, weight, target, case = head_case(options)
        h1, w1 = with_grad(hidden, weight)
        alone = linear(h1, w1, target, case)
        (alone.loss * 0.7).backward()
        weight[V:] = math.nan
        h2, w2 = with_grad(hidden, weight[mine])
        together = linear(h2, w2, target, case, **shard)
        (together.loss * 0.7).backward()
        assert_not_trivial(h1.grad, 0.05)
        for x, y in zip(together, alone, strict=True):
            torch.testing.assert_close(x, y, msg=lambda m, name=name: f"{name}: {m}")
        dist.all_reduce(h2.grad)
        torch.testing.assert_close(h2.grad, h1.grad)
        torch.testing.assert_close(w2.grad, w1.grad[mine])
        # the kernels, in float32, against the same
        h3, w3 = with_grad(hidden.float(), weight[mine].float())
        floats = {k: v.float() for k, v in case.arguments().items() if k.endswith("_logprobs") or k == "entropy"}
        kernels = linear(h3, w3, target, replace(case, **floats), **shard, backend="triton")
        (kernels.loss * 0.7).backward()
        torch.testing.assert_close(kernels.logprobs.double(), alone.logprobs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(kernels.stats, alone.stats, rtol=1e-4, atol=1e-4)
        dist.all_reduce(h3.grad)
        torch.testing.assert_close(h3.grad.double(), h1.grad, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(w3.grad.double(), w1.grad[mine], rtol=1e-4, atol=1e-4)

    logits = (hidden @ weight.T).detach()
    g, e = torch.randn(2, len(target), dtype=torch.float64)
    whole, part = with_grad(logits, logits[:, mine])
    want = token_logprob(whole, target, vocab_size=V, temperature=TEMPERATURE)
    got = token_logprob(part, target, **shard)
    chunked = linear_token_logprob(hidden, weight[mine], target, **shard, chunk_tokens=9)
    for x, y, z in zip(got, want, chunked, strict=True):
        torch.testing.assert_close(x, y)
        torch.testing.assert_close(z, y)
    for result in (want, got):
        (result.logprob * g + result.entropy * e).sum().backward()
    assert_not_trivial(whole.grad, 0.1)
    torch.testing.assert_close(part.grad, whole.grad[:, mine])

    # a vocabulary of 15 words lies in the first shard alone
    few = torch.randint(0, 15, (len(target),))
    narrow = token_logprob(logits[:, mine], few, **{**shard, "vocab_size": 15})
    want = token_logprob(logits[:, :15], few, temperature=TEMPERATURE)
    for x, y in zip(narrow, want, strict=True):
        torch.testing.assert_close(x, y)
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(tmp_path: Path) -> None:
    mp.spawn(two_ranks, args=(str(tmp_path / "store"), 7), nprocs=2)
