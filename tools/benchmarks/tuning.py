"""A sweep over launch configurations of the two kernels on logits. Speed is reported where the numbers are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from megatron_replay.ops.launch import LaunchConfig, launch_config, overridden
from megatron_replay.ops.token_logprob import TokenLogprob

from .implementations import vocab_shard
from .measure_cuda import Clock
from .problem import Problem, Size, make_problem
from .report import Report

PER_THREAD = (1, 2, 4, 8)
NUM_WARPS = (4, 8, 16)
KERNELS = ("token_logprob_forward", "token_logprob_backward")
Subject = tuple[Callable[[], Any], Callable[[Any], bool], float]


def tune(sizes: Sequence[Size], clock: Clock, report: Report) -> None:
    """Every configuration of every kernel at every size, into the report; the best of each are printed."""
    for size in sizes:
        problem = make_problem("logits", replace(size, H=None), torch.device("cuda"))
        for kernel in KERNELS:
            subject = _subject(kernel, problem)
            configs = [LaunchConfig(p, w) for p in PER_THREAD for w in NUM_WARPS]
            found = [_measure(kernel, problem, subject, config, clock) for config in configs]
            report.tuning += found
            report.write()
            timed = [f for f in found if f["ms"] is not None]
            best = min(timed, key=lambda f: f["ms"], default=None)
            now = next((f for f in timed if f["in_table"]), None)
            report.say(f"tuning {kernel}, {problem.size.label}: best {_words(best)}; the table's {_words(now)}")
        del problem, subject
        torch.cuda.empty_cache()


def _measure(kernel: str, problem: Problem, subject: Subject, config: LaunchConfig, clock: Clock) -> dict[str, Any]:
    (logits,) = problem.operands
    size = problem.size
    found: dict[str, Any] = {
        "kernel": kernel,
        "T": size.T,
        "V": size.V,
        "tp": size.tp,
        "per_thread": config.per_thread,
        "num_warps": config.num_warps,
        "in_table": config == launch_config(kernel, logits.device),
        "ms": None,
        "gb_per_s": None,
        "error": None,
    }
    call, right, passes = subject
    with overridden(kernel, config):
        # a configuration may need more registers or shared memory than there are
        try:
            if not right(call()):
                found["error"] = "wrong result"
                return found
            found["ms"] = median(clock.each(call, lambda: None))
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"[:300]
            return found
    found["gb_per_s"] = passes * logits.numel() * logits.element_size() / found["ms"] / 1e6
    return found


def _subject(kernel: str, problem: Problem) -> Subject:
    """The call, whether its result is that of the reference, and how often it reads or writes all logits.

    The forward call ends with the merge of the shards' partials, a few small kernels.
    """
    (logits,) = problem.operands
    target = problem.target
    shard, reference = vocab_shard(problem, "triton"), vocab_shard(problem, "reference")
    parts = [reference.forward(logits[at], target[at]) for at in problem.chunks()]
    truth = TokenLogprob(*map(torch.cat, zip(*parts, strict=True)))
    if kernel == "token_logprob_forward":
        return (
            lambda: shard.forward(logits, target),
            lambda got: all(_near(x, y) for x, y in zip(got, truth, strict=True)),
            1.0,
        )
    # every token has a coefficient here, so every row is read
    dlogprob = problem.per_token(problem.inputs.advantage)
    out = torch.empty_like(logits)

    def right(got: Tensor) -> bool:
        return all(
            _near(
                got[at],
                reference.backward(logits[at], target[at], TokenLogprob(*(x[at] for x in truth)), dlogprob[at], None),
            )
            for at in problem.chunks()
        )

    return lambda: shard.backward(logits, target, truth, dlogprob, None, out=out), right, 2.0


def _near(got: Tensor, truth: Tensor) -> bool:
    """Within two roundings of the dtype, or of float32 sums, of the largest value."""
    eps = max(1e-5, torch.finfo(truth.dtype).eps)
    return bool((got.float() - truth.float()).abs().max() <= eps * truth.float().abs().max())


def _words(found: dict[str, Any] | None) -> str:
    if found is None:
        return "none"
    return f"{found['per_thread']}x{found['num_warps']} {found['ms']:.3f} ms {found['gb_per_s']:.0f} GB/s"
