"""Compile every Triton kernel ahead of time, without a GPU, and report what the compiler made of it.

    python tools/kernel_report.py --json report.json
    MEGATRON_REPLAY_LAUNCH=token_logprob_forward=8x4 python tools/kernel_report.py --arch sm_90a

The public wrappers are called on CPU tensors of the real strides, and each launch goes to Triton's own JIT with a
target in place of a device, so the code is that of such a launch on such a device. Keys of an entry of the JSON:

registers, stack_bytes: per thread. spill_bytes: spill stores + spill loads, as ptxas reports them.
shared_bytes: per block, what the launch asks for + what the cubin declares (sm_90 and later reserve 1024 bytes of it).
loads_*, stores_*: instructions to global memory in the code, those of 128 bits, of 256 bits, all.
bytes_loaded, bytes_stored: what one more row, token or rollout (`bytes_per`) adds, counted by running the same launch
in Triton's interpreter. Caches are not counted off: what is read twice counts twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

# Triton 3.9 warns about its default unless it is set
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import sass
import torch
import triton
from torch import Tensor
from triton.backends.nvidia.compiler import get_ptxas

from megatron_replay.ops import grpo_loss_triton, token_logprob_triton
from megatron_replay.ops.grpo_loss import GrpoLossOptions
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.launch import OVERRIDE, LaunchConfig, overridden, parse_overrides, table_row
from megatron_replay.ops.token_logprob import TokenLogprob

TESTS = Path(__file__).resolve().parent.parent / "tests"
CAPABILITIES = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QWEN3_WORDS = 151936
GPT2_WORDS = 50257
AGE_BUCKETS = 11


class Kernel(NamedTuple):
    """Where a kernel stands, and two sizes of a launch: bytes are counted between them, the second is compiled."""

    module: ModuleType
    function: str
    unit: str
    sizes: tuple[int, int]


KERNELS = {
    "token_logprob_forward": Kernel(token_logprob_triton, "_forward_kernel", "row", (0, 2)),
    "token_logprob_backward": Kernel(token_logprob_triton, "_backward_kernel", "row", (0, 2)),
    "grpo_loss": Kernel(grpo_loss_triton, "_rollout_kernel", "token", (100, 1101)),
    "grpo_loss_buckets": Kernel(grpo_loss_triton, "_bucket_kernel", "rollout", (30, 97)),
}


class Case(NamedTuple):
    """A way to launch one kernel: `call(size)` calls the public wrapper on `size` rows, tokens or rollouts."""

    kernel: str
    config: dict[str, Any]
    call: Callable[[int], object]


@dataclass(frozen=True)
class Shard:
    """Logits of the last of `tp` ranks."""

    case: str
    dtype: str
    tp: int
    columns: int
    stride: int

    def tensors(self, rows: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
        start = (self.tp - 1) * self.columns
        logits = torch.zeros(rows, self.stride, dtype=DTYPES[self.dtype])[:, : self.columns]
        vocabulary = {"vocab_start": start, "vocab_size": start + self.columns, "temperature": 0.9}
        return logits, torch.full((rows,), start + 1), vocabulary

    def forward(self, rows: int) -> None:
        logits, target, vocabulary = self.tensors(rows)
        token_logprob_triton.token_logprob_forward(logits, target, **vocabulary)

    def backward(self, rows: int, entropy: bool, coefficient: float) -> None:
        """In place, as the fused head calls it."""
        logits, target, vocabulary = self.tensors(rows)
        result = TokenLogprob(*[torch.ones(rows)] * len(TokenLogprob._fields))
        gradient = torch.full((rows,), coefficient)
        gradients = (gradient, gradient if entropy else None)
        token_logprob_triton.token_logprob_backward(logits, target, result, *gradients, **vocabulary, out=logits)


def shards() -> Iterator[Shard]:
    for dtype, tp in (("bf16", 1), ("fp16", 1), ("fp32", 1), ("bf16", 2), ("bf16", 4), ("bf16", 8), ("bf16", 16)):
        yield Shard(f"{dtype}, TP {tp}", dtype, tp, QWEN3_WORDS // tp, QWEN3_WORDS // tp)
    yield Shard("bf16, odd columns, even stride", "bf16", 1, GPT2_WORDS, -(-GPT2_WORDS // 64) * 64)
    yield Shard("bf16, odd stride", "bf16", 1, GPT2_WORDS, GPT2_WORDS)


def _backward_case(shard: Shard, *, entropy: bool, coefficient: float = 1.0) -> Case:
    text = shard.case + ", entropy" * entropy + ", coefficient 0" * (coefficient == 0)
    config = asdict(shard) | {"case": text, "entropy": entropy, "coefficient": coefficient}
    call = partial(shard.backward, entropy=entropy, coefficient=coefficient)
    return Case("token_logprob_backward", config, call)


def logprob_cases() -> Iterator[Case]:
    for shard in shards():
        yield Case("token_logprob_forward", asdict(shard), shard.forward)
        yield _backward_case(shard, entropy=False)
        yield _backward_case(shard, entropy=True)
    yield _backward_case(next(shards()), entropy=True, coefficient=0.0)


def _loss(size: int, options: GrpoLossOptions, *, statistics: bool = True, full: bool = False, each: int = 0) -> None:
    """The loss of `size` tokens in two rollouts, or of `size` rollouts of `each` tokens; `full` gives all inputs."""
    bounds = [i * each for i in range(size + 1)] if each else [0, 5, size]
    n, tokens = len(bounds) - 1, torch.zeros(bounds[-1])
    inputs = GrpoLossInputs(
        behavior_logprobs=tokens,
        advantage=torch.ones(n),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        loss_weight=torch.ones(n),
        reference_logprobs=tokens if full else None,
        importance_weight=torch.ones(n) if full else None,
        age=torch.arange(n) % AGE_BUCKETS if full else None,
        age_buckets=AGE_BUCKETS if full else 1,
    )
    grpo_loss_triton.grpo_loss_terms(tokens, inputs, options, tokens if full else None, statistics)


def loss_cases() -> Iterator[Case]:
    default = GrpoLossOptions()
    everything = GrpoLossOptions(ratio_level="sequence", dual_clip=3.0, kl_beta=0.1, entropy_weight=0.01)
    for text, call in {
        "default": partial(_loss, options=default),
        "everything": partial(_loss, options=everything, full=True),
        "cispo": partial(_loss, options=GrpoLossOptions(objective="cispo")),
        "derivatives only": partial(_loss, options=default, statistics=False),
    }.items():
        yield Case("grpo_loss", {"case": text}, call)
    for text, full in (("one bucket", False), (f"{AGE_BUCKETS} ages", True)):
        call = partial(_loss, options=default, full=full, each=1)
        yield Case("grpo_loss_buckets", {"case": text}, call)


def jobs(kernels: Sequence[str], archs: Sequence[str]) -> list[tuple[Case, str]]:
    cases = (*logprob_cases(), *loss_cases())
    return [(case, arch) for kernel in kernels for case in cases if case.kernel == kernel for arch in archs]


def launch_table(arch: str) -> dict[str, LaunchConfig]:
    """The table's row for an architecture, with the environment's overrides."""
    text = os.environ.get(OVERRIDE)
    return table_row(CAPABILITIES[arch]) | (parse_overrides(text) if text else {})


class _Launcher:
    """Stands for a kernel in its module: `kernel[grid](...)` calls act(grid, ...)."""

    def __init__(self, act: Callable[..., object]) -> None:
        self.act = act

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]:
        return partial(self.act, grid)


def launch(case: Case, arch: str, size: int, act: Callable[..., Any]) -> list[Any]:
    """Call the wrapper: what act(kernel, grid, ...) gives for each launch of the case's kernel. No other one runs."""
    chosen = getattr(*KERNELS[case.kernel][:2])
    results: list[Any] = []

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        if kernel is chosen:
            results.append(act(kernel, grid, *args, **kwargs))

    with ExitStack() as stack:
        for name, config in launch_table(arch).items():
            stack.enter_context(overridden(name, config))
        for module, function, *_ in KERNELS.values():
            kernel = getattr(module, function)
            stack.callback(setattr, module, function, kernel)
            setattr(module, function, _Launcher(partial(run, kernel)))
        case.call(size)
    return results


def count_bytes(case: Case, arch: str) -> list[int]:
    """[loaded, stored] per unit. In the interpreter only."""
    from triton_interpreter import traffic

    seen, sizes = [], KERNELS[case.kernel].sizes
    for size in sizes:
        traffic.loaded = traffic.stored = 0
        launch(case, arch, size, lambda kernel, grid, *a, **k: kernel[grid](*a, **k))
        seen.append((traffic.loaded, traffic.stored))
    per_unit = [divmod(after - before, sizes[1] - sizes[0]) for before, after in zip(*seen, strict=True)]
    if any(rest for _, rest in per_unit):
        raise RuntimeError(f"{case.kernel}, {case.config['case']}: bytes do not grow evenly, {seen} for {sizes}")
    return [whole for whole, _ in per_unit]


def print_traffic(kernels: Sequence[str], archs: Sequence[str]) -> None:
    """JSON: [bytes loaded, bytes stored] of each job."""
    torch.set_num_threads(1)
    known: dict[Any, list[int]] = {}
    answer = []
    for case, arch in jobs(kernels, archs):
        key = (case.kernel, case.config["case"], launch_table(arch).get(case.kernel))
        if key not in known:
            known[key] = count_bytes(case, arch)
        answer.append(known[key])
    print(json.dumps(answer))


def traffic_of(kernels: Sequence[str], archs: Sequence[str]) -> list[list[int]]:
    """`print_traffic` in a process of its own: whether Triton interprets is decided when a kernel is defined."""
    # the same modules as here, and the interpreter's extension
    path = os.pathsep.join([*sys.path, str(TESTS)])
    code = "import json, sys, kernel_report; kernel_report.print_traffic(*json.loads(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps([kernels, archs])],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout)


def entries(kernels: Sequence[str], archs: Sequence[str]) -> Iterator[dict[str, Any]]:
    built, code = [], {}
    with ThreadPoolExecutor() as pool, sass.fresh_cache():
        traffic = pool.submit(traffic_of, kernels, archs)
        for case, arch in jobs(kernels, archs):
            compiling = partial(sass.compile_launch, CAPABILITIES[arch])
            (binary,) = launch(case, arch, KERNELS[case.kernel].sizes[1], compiling)
            built.append((case, arch, binary))
            # several cases may come to one binary
            if binary.kernel.hash not in code:
                code[binary.kernel.hash] = pool.submit(sass.machine_code, binary)
    for (case, arch, binary), (loaded, stored) in zip(built, traffic.result(), strict=True):
        meta, config = binary.kernel.metadata, launch_table(arch).get(case.kernel)
        per_thread = {"per_thread": config.per_thread} if config else {}
        module, function, unit, _ = KERNELS[case.kernel]
        yield {
            "name": case.kernel,
            "function": f"{module.__name__}.{function}",
            "config": case.config | per_thread | {"num_warps": meta.num_warps},
            **code[meta.hash].result(),
            "fp_fusion": meta.enable_fp_fusion,
            "bytes_loaded": loaded,
            "bytes_stored": stored,
            "bytes_per": unit,
        }


def table_text(report: Sequence[dict[str, Any]]) -> str:
    rows = [("kernel", "arch", "case", "launch", "regs", "spill", "stack", "shared", "loads 128b", "stores 128b",
             "loaded", "stored", "per")]  # fmt: skip
    for e in report:
        config = e["config"]
        rows.append((
            e["name"], e["arch"], config["case"], f"{config.get('per_thread', '-')}x{config['num_warps']}",
            *(str(e[k]) for k in ("registers", "spill_bytes", "stack_bytes", "shared_bytes")),
            f"{e['loads_128']}/{e['loads_total']}", f"{e['stores_128']}/{e['stores_total']}",
            str(e["bytes_loaded"]), str(e["bytes_stored"]), e["bytes_per"],
        ))  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = "<<<<>>>>>>>><"
    return "\n".join(
        "  ".join(f"{x:{s}{w}}" for x, s, w in zip(row, sides, widths, strict=True)).rstrip() for row in rows
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    parser.add_argument("--arch", action="append", choices=CAPABILITIES, help="repeatable; all by default")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="repeatable; all by default")
    args = parser.parse_args(argv)
    if args.json:
        place = args.json if args.json.exists() else args.json.parent
        if args.json.is_dir() or not args.json.parent.is_dir() or not os.access(place, os.W_OK):
            parser.error(f"--json must name a writable file in an existing folder, got {str(args.json)!r}")
    if triton.knobs.runtime.interpret:
        parser.error(f"TRITON_INTERPRET must be unset to compile, got {os.environ['TRITON_INTERPRET']!r}")
    try:
        launch_table("sm_80")
        sass.check_tools()
    except ValueError as error:
        parser.error(str(error) if OVERRIDE in str(error) else f"{OVERRIDE}: {error}")
    except RuntimeError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    torch.set_num_threads(1)
    archs = [arch for arch in CAPABILITIES if arch in (args.arch or CAPABILITIES)]
    kernels = [kernel for kernel in KERNELS if kernel in (args.kernel or KERNELS)]
    report = list(entries(kernels, archs))
    print(table_text(report))
    if args.json:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        ptxas = {arch: get_ptxas(CAPABILITIES[arch]).version for arch in archs}
        args.json.write_text(json.dumps(versions | {"ptxas": ptxas, "kernels": report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
