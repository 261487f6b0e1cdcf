"""Budgets of the compiled kernels, on the report that the tool writes; it compiles, so it runs in its own process."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron_replay.ops.grpo_stats import MAXIMA, STATS
from tests.launch import ROOT

pytest.importorskip("triton")

TOOL = ROOT / "tools" / "kernel_report.py"
ARCHS = {"sm_80", "sm_90a", "sm_100a"}
# per thread; a multiprocessor has 65536, so 128 leave room for 512 threads
REGISTERS = {"token_logprob_forward": 128, "token_logprob_backward": 128, "grpo_loss": 128, "grpo_loss_buckets": 64}
# of a row: the target, and its logit
FORWARD_SCALARS = 2
# of a row: dlogprob, maximum, log_sum and the target; with entropy also dentropy and entropy
BACKWARD_SCALARS = {False: 4, True: 6}
INTEGERS = (
    *("registers", "spill_bytes", "stack_bytes", "shared_bytes", "loads_128", "loads_total", "stores_128"),
    *("stores_total", "bytes_loaded", "bytes_stored", "local_loads", "local_stores", "barriers", "shuffles", "ex2"),
)
SIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
Entry = dict[str, Any]


def run(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "MEGATRON_REPLAY_LAUNCH")}
    command = [sys.executable, str(TOOL), *map(str, args)]
    return subprocess.run(command, env=kept | env, cwd=ROOT, capture_output=True, text=True, timeout=600)


def write_report(path: Path, *args: object, **env: str) -> dict[str, Any]:
    done = run("--json", path, *args, **env)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(path.read_text()) | {"printed": done.stdout}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_report(tmp_path_factory.mktemp("report") / "kernels.json")


@pytest.fixture
def kernels(report: dict[str, Any]) -> list[Entry]:
    return report["kernels"]


def label(e: Entry) -> str:
    return f"{e['name']} {e['arch']} {e['config']['case']}"


def rows(kernels: list[Entry], name: str, *, odd: bool = False) -> list[Entry]:
    """The entries of a kernel on rows of logits: those of Qwen3's shards, or those with an odd number of columns."""
    return [e for e in kernels if e["name"] == name and (e["config"]["columns"] % 2 == 1) == odd]


def over_budget(kernels: list[Entry]) -> dict[str, list[str]]:
    """What is over which budget."""
    most = {"spill_bytes": 0, "stack_bytes": 0, "local_loads": 0, "local_stores": 0}
    found: dict[str, list[str]] = {key: [] for key in (*most, "registers")}
    for e in kernels:
        for key, limit in (most | {"registers": REGISTERS[e["name"]]}).items():
            if e[key] > limit:
                found[key].append(f"{label(e)}: {e[key]}, at most {limit}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("key", ["spill_bytes", "stack_bytes", "local_loads", "local_stores", "registers"])
def test_within_budget(kernels: list[Entry], key: str) -> None:
    assert over_budget(kernels)[key] == []


@pytest.mark.slow
def test_keys_and_types(report: dict[str, Any]) -> None:
    assert isinstance(report["triton"], str) and set(report["ptxas"]) == ARCHS
    for e in report["kernels"]:
        assert all(type(e[key]) is int and e[key] >= 0 for key in INTEGERS), label(e)
        assert isinstance(e["config"]["case"], str) and e["config"]["num_warps"] in (1, 2, 4, 8, 16, 32)
        assert 16 <= e["registers"] <= 255 and e["loads_total"] >= e["loads_128"] and e["stores_total"] > 0
        assert label(e).split()[0] in report["printed"] and e["config"]["case"] in report["printed"]
    labels = [label(e) for e in report["kernels"]]
    assert len(set(labels)) == len(labels)
    assert len(report["printed"].splitlines()) == 1 + len(labels)


@pytest.mark.slow
def test_every_kernel_on_every_architecture(kernels: list[Entry]) -> None:
    written = set()
    for path in (ROOT / "megatron_replay" / "ops").glob("*_triton.py"):
        functions = {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
        written |= {f"megatron_replay.ops.{path.stem}.{name}" for name in functions if name.endswith("_kernel")}
    assert len(written) >= 4
    cases = {(e["function"], e["config"]["case"]) for e in kernels}
    assert {function for function, _ in cases} == written
    assert {(e["function"], e["config"]["case"], e["arch"]) for e in kernels} == {(*c, a) for c in cases for a in ARCHS}
    for name in ("token_logprob_forward", "token_logprob_backward"):
        shards = {(e["config"]["dtype"], e["config"]["tp"]) for e in rows(kernels, name)}
        assert shards == {("bf16", tp) for tp in (1, 2, 4, 8, 16)} | {("fp16", 1), ("fp32", 1)}


@pytest.mark.slow
def test_rows_are_read_in_128_bits(kernels: list[Entry]) -> None:
    for e in rows(kernels, "token_logprob_forward") + rows(kernels, "token_logprob_backward"):
        # one loop over whole blocks and one over the rest, each with per_thread vectors
        assert e["loads_128"] == 2 * e["config"]["per_thread"], label(e)
        forward = e["name"] == "token_logprob_forward"
        scalars = FORWARD_SCALARS if forward else BACKWARD_SCALARS[e["config"]["entropy"]]
        assert e["loads_total"] - e["loads_128"] == scalars, label(e)


@pytest.mark.slow
def test_gradients_are_written_in_128_bits(kernels: list[Entry]) -> None:
    for e in rows(kernels, "token_logprob_backward"):
        assert e["stores_128"] == e["stores_total"] >= 3 * e["config"]["per_thread"], label(e)
    for e in rows(kernels, "token_logprob_forward"):
        assert (e["stores_128"], e["stores_total"]) == (0, 4), label(e)


@pytest.mark.slow
def test_rows_apart_by_an_even_stride_keep_wide_loads(kernels: list[Entry]) -> None:
    """With an odd number of columns only the last block of a row is read in narrow pieces; an odd stride costs all."""
    for name in ("token_logprob_forward", "token_logprob_backward"):
        odd = rows(kernels, name, odd=True)
        even_stride = [e for e in odd if e["config"]["stride"] % 64 == 0]
        odd_stride = [e for e in odd if e["config"]["stride"] == e["config"]["columns"]]
        assert len(even_stride) == len(odd_stride) == len(odd) / 2 > 0
        assert all(e["loads_128"] == e["config"]["per_thread"] for e in even_stride)
        assert all(e["loads_128"] == e["stores_128"] == 0 for e in odd_stride)


@pytest.mark.slow
def test_bytes_of_a_row(kernels: list[Entry]) -> None:
    """Each logit is read once in each pass and each gradient written once; int64 targets, float32 scalars."""
    for odd in (False, True):
        for e in rows(kernels, "token_logprob_forward", odd=odd):
            size = SIZE[e["config"]["dtype"]]
            assert e["bytes_per"] == "row"
            assert e["bytes_loaded"] == size * e["config"]["columns"] + 8 + size, label(e)
            assert e["bytes_stored"] == 4 * 4, label(e)
        for e in rows(kernels, "token_logprob_backward", odd=odd):
            whole, entropy = SIZE[e["config"]["dtype"]] * e["config"]["columns"], e["config"]["entropy"]
            idle = e["config"]["coefficient"] == 0
            scalars = 4 * (1 + 2 * entropy) if idle else 8 + 4 * (BACKWARD_SCALARS[entropy] - 1)
            assert e["bytes_loaded"] == scalars + (0 if idle else whole), label(e)
            assert e["bytes_stored"] == whole, label(e)
    assert any(e["config"]["coefficient"] == 0 for e in rows(kernels, "token_logprob_backward"))


@pytest.mark.slow
def test_bytes_of_a_token_and_of_a_rollout(kernels: list[Entry]) -> None:
    found = {(e["name"], e["config"]["case"]): (e["bytes_loaded"], e["bytes_stored"], e["bytes_per"]) for e in kernels}
    # policy, behavior and mask; the derivative
    plain = (4 + 4 + 1, 4, "token")
    for case in ("default", "cispo", "derivatives only"):
        assert found["grpo_loss", case] == plain
    # the sequence ratio reads them in a pass of its own; reference and entropy; dentropy
    assert found["grpo_loss", "everything"] == (2 * plain[0] + 4 + 4, 4 + 4, "token")
    row = 8 * (1 + len(STATS) + len(MAXIMA))
    assert found["grpo_loss_buckets", "one bucket"] == (row, 0, "rollout")
    # each bucket reads every age
    assert found["grpo_loss_buckets", "11 ages"] == (row + 11 * 8, 0, "rollout")


@pytest.mark.slow
def test_a_launch_that_spills_is_seen(tmp_path: Path) -> None:
    flags = ("--kernel", "grpo_loss", "--arch", "sm_90a")
    bad = write_report(tmp_path / "bad.json", *flags, MEGATRON_REPLAY_LAUNCH="grpo_loss=16x1")["kernels"]
    assert {e["arch"] for e in bad} == {"sm_90a"} and {e["name"] for e in bad} == {"grpo_loss"}
    assert all((e["config"]["per_thread"], e["config"]["num_warps"]) == (16, 1) for e in bad)
    assert all(over_budget(bad).values()), over_budget(bad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "env", "said"),
    [
        (["--arch", "sm_70"], {}, "--arch: invalid choice: 'sm_70'"),
        (["--json", "no/such/folder.json"], {}, "--json must name a writable file in an existing folder, got 'no/such"),
        ([], {"TRITON_INTERPRET": "1"}, "TRITON_INTERPRET must be unset to compile, got '1'"),
        ([], {"MEGATRON_REPLAY_LAUNCH": "grpo_loss=3x4"}, "MEGATRON_REPLAY_LAUNCH: per_thread must be a power of two"),
        ([], {"MEGATRON_REPLAY_LAUNCH": "nothing=2x4"}, "MEGATRON_REPLAY_LAUNCH must name one of"),
    ],
)
def test_bad_input_is_one_line(args: list[str], env: dict[str, str], said: str) -> None:
    done = run(*args, **env)
    assert done.returncode == 2 and done.stdout == ""
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.fixture(scope="module")
def sass() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sass", ROOT / "tools" / "sass.py")
    module = importlib.util.module_from_spec(spec)
    # a dataclass looks its module up by name
    sys.modules["sass"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["sass"]
    return module


LISTING = """
	.target	sm_90a
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R12, desc[UR12][R2.64+0x1000] ;
        /*0020*/              @!P0 LDG.E.128.CONSTANT R4, desc[UR12][R12.64] ;
        /*0030*/               @P0 LDG.E.U16 R12, desc[UR12][R6.64] ;
        /*0040*/            @!UPT LDG.E.ENL2.256 R12, R16, desc[UR12][R6.64] ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R1], [R2.64] ;
        /*0060*/               @P1 STG.E.128 desc[UR12][R4.64], R13 ;
        /*0070*/                   ST.E desc[UR12][R6.64], R11 ;
        /*0080*/                   STL.128 [R1], R4 ;
        /*0090*/              @!P1 LDL R4, [R1] ;
        /*00a0*/                   MUFU.EX2 R4, R4 ;
        /*00b0*/                   MUFU.RCP R4, R4 ;
        /*00c0*/                   SHFL.BFLY PT, R4, R4, 0x10, 0x1f ;
        /*00d0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00e0*/                   LDS.128 R4, [R1] ;
.L_x_1:
        /*10000*/                  EXIT ;
        /*10010*/                  NOP ;
"""


def test_instructions_are_counted(sass: ModuleType) -> None:
    assert sass.instruction_counts(LISTING) == {
        "loads_128": 3,
        "loads_256": 1,
        "loads_total": 5,
        "stores_128": 1,
        "stores_256": 0,
        "stores_total": 2,
        "local_loads": 1,
        "local_stores": 1,
        "barriers": 1,
        "shuffles": 1,
        "ex2": 1,
        "instructions": 16,
    }
