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
from functools import partial
from pathlib import Path
from typing import Any

# Triton 3.9 warns about its default unless it is set
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import sass
import torch
import triton
from benchmarks.command_line import Parser
from kernel_cases import KERNELS, Case, logprob_cases, loss_cases
from triton.backends.nvidia.compiler import get_ptxas

from megatron_replay.ops.launch import OVERRIDE, LaunchConfig, overridden, parse_overrides, table_row

TESTS = Path(__file__).resolve().parent.parent / "tests"
CAPABILITIES = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100}


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


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
