"""tools/benchmark_weight_sync.py: its contract on a tiny model and real engines, its arithmetic, its command line."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megatron_replay.weight_sync.hf_mapping import megatron_names, to_megatron
from tests.launch import ROOT
from tools.benchmarks.weight_sync.engine import LEAST_EQUAL, PROMPTS, complaint
from tools.benchmarks.weight_sync.model import (
    LAYOUTS,
    WEIGHTS,
    TrainerLayout,
    load_shards,
    padded_vocab,
    shard_bytes,
    total_bytes,
    write_model,
)
from tools.benchmarks.weight_sync.phases import StackClock, place
from tools.benchmarks.weight_sync.report import Report
from tools.benchmarks.weight_sync.row import Row
from tools.benchmarks.weight_sync.settings import Settings

ROW_KEYS = {"transport", "trainer_layout", "engine_layout", "bytes", "seconds", "floor_seconds"}
# two bytes for each number: embedding and padding to 384 rows; q, k, v, o; gate, up, down; norms
TINY_LAYER = 64 * (128 + 64 + 64) + 128 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 32
TINY_BYTES = 2 * (384 * 64 + 2 * TINY_LAYER + 64)


def test_the_model_is_counted_as_it_is_written(tmp_path: Path) -> None:
    shape = write_model("tiny", tmp_path)
    assert total_bytes(shape) == TINY_BYTES
    stored = load_file(tmp_path / WEIGHTS)
    # the padding is the trainer's own
    assert sum(x.nbytes for x in stored.values()) == TINY_BYTES - 2 * (384 - 320) * 64
    assert {x.dtype for x in stored.values()} == {torch.bfloat16}
    matrices = [x for x in stored.values() if x.dim() == 2]
    assert all(float(x.float().std()) == pytest.approx(0.02, rel=0.1) for x in matrices)
    # layers and parts that change places are seen
    assert len({x.flatten()[:64].float().numpy().tobytes() for x in matrices}) == len(matrices)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_the_ranks_of_a_layout_hold_the_model_once(layout: TrainerLayout, tmp_path: Path) -> None:
    shape = write_model("tiny", tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    seen: dict[str, int] = {}
    for rank in range(layout.ranks):
        size = shard_bytes(shape, layout, rank)
        memory = torch.zeros(size, dtype=torch.uint8)
        parameters = load_shards(tmp_path, shape, layout, rank, memory)
        assert sum(x.nbytes for x in parameters.values()) == size
        for name, found in parameters.items():
            seen[name] = seen.get(name, 0) + 1
            expected = to_megatron(
                name,
                stored.__getitem__,
                shape,
                padded_vocab=padded_vocab(shape),
                tensor_rank=rank % layout.tensor_size,
                tensor_size=layout.tensor_size,
            )
            assert torch.equal(found, expected), name
            assert memory.data_ptr() <= found.data_ptr() < memory.data_ptr() + size
        layers = {name.split(".")[2] for name in parameters if name.startswith("decoder.layers.")}
        assert len(layers) == shape.num_layers // layout.stages
    assert seen == dict.fromkeys(megatron_names(shape), layout.tensor_size)


def test_times_of_a_row() -> None:
    row = Row("gloo", "TP1", "TP2", 3_000_000_000, "a broadcast")
    assert str(row).endswith("engine TP2: None") and row.ratio is None
    row.timed(9.0, [2.0, 4.0, 1.0], [1.0, 0.5, 3.0])
    assert (row.first_seconds, row.seconds, row.floor_seconds, row.ratio) == (9.0, 2.0, 1.0, 2.0)
    assert row.gigabytes_per_second == pytest.approx(1.5) and "ratio 2.00" in str(row)


def test_who_fails_a_run(tmp_path: Path) -> None:
    bad, foreign = Row("gloo", "TP1", "TP1", 1, ""), Row("vllm-reload", "-", "TP1", 1, "", foreign=True)
    bad.failed("no\nway")
    foreign.failed("neither")
    for rows, passed in (([foreign], True), ([foreign, bad], False)):
        report = Report({}, tmp_path / "report.json", rows, [{"transport": "nccl", "why": "no card"}])
        assert not report.passed, "nothing is passed before it is complete"
        report.finish()
        assert report.passed == json.loads((tmp_path / "report.json").read_text())["passed"] == passed
    assert "no way" in report.table() and "not measured: nccl, no card" in report.table()


def test_an_engine_with_other_weights_is_seen() -> None:
    expected = list(range(len(PROMPTS)))
    assert complaint(expected, expected) is None
    for wrong, fails in ((len(PROMPTS) - LEAST_EQUAL, False), (len(PROMPTS) - LEAST_EQUAL + 1, True)):
        found = [-1] * wrong + expected[wrong:]
        assert (complaint(found, expected) is not None) == fails


@pytest.mark.parametrize(
    ("stack", "found"),
    [
        ("weight_sync/message.py:checksum weight_sync/sender.py:_stream weight_sync/sender.py:push", "sender checksum"),
        ("torch/x.py:f weight_sync/sender.py:_stream weight_sync/sender.py:push", "sender pack"),
        (
            "weight_sync/transports/slots.py:message weight_sync/sender.py:_stream weight_sync/sender.py:push",
            "sender wire",
        ),
        ("weight_sync/sender.py:_results weight_sync/sender.py:push", "sender engine"),
        ("weight_sync/sender.py:_results weight_sync/sender.py:_each weight_sync/sender.py:push", "sender control"),
        ("weight_sync/receiver.py:_tensors vllm/model_executor/q.py:f e.py:receive_weights", "engine convert"),
        ("weight_sync/hf_mapping.py:to_hf weight_sync/receiver.py:g e.py:receive_weights", "engine convert"),
        ("vllm/model_executor/q.py:f weight_sync/receiver.py:g e.py:receive_weights", "engine load"),
        ("weight_sync/transports/slots.py:wait weight_sync/receiver.py:g e.py:receive_weights", "engine wire"),
        ("vllm/model_executor/l.py:f engines/vllm_weight_transfer.py:finish_weight_update", "engine finalize"),
        ("threading.py:wait", None),
        ("other.py:push", None),
    ],
)
def test_phases_of_stacks(stack: str, found: str | None) -> None:
    place_of = place([(file, function) for file, function in (f.split(":") for f in stack.split())])
    assert place_of == (None if found is None else tuple(found.split()))


def test_nothing_is_counted_outside_a_push() -> None:
    with StackClock() as clock:
        torch.randn(1000, 1000).sum()
    assert clock.phases("sender") == clock.phases("engine") == {}


def test_settings_pass_between_processes(tmp_path: Path) -> None:
    settings = Settings(tmp_path, ("gloo", "vllm-reload"), ("TP1",), ("TP1", "TP2"), 2, 64, 1, 30.0)
    assert Settings.from_json(settings.to_json()) == settings
    # a sender and two receivers of a floor, though the trainer needs one process
    assert settings.ranks == 3 and settings.alone == ("vllm-reload",) and settings.between_processes == ("gloo",)


def benchmark(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | variables
    command = [sys.executable, str(ROOT / "tools" / "benchmark_weight_sync.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize(
    ("transports", "places"),
    [
        (
            ("gloo", "shared-memory", "gloo-per-tensor"),
            {
                ("gloo", "TP1"): 1,
                ("gloo", "TP2xPP2"): 1,
                ("shared-memory", "TP1"): 1,
                ("shared-memory", "TP2xPP2"): 1,
                # one for each parameter: embedding, 8 of each layer, final norm
                ("gloo-per-tensor", "TP1"): 18,
            },
        ),
        (("in-process", "vllm-reload"), {("in-process", "TP1"): 1, ("vllm-reload", "-"): None}),
    ],
    ids=["between processes", "in one process"],
)
def test_the_contract(transports: tuple[str, ...], places: dict[tuple[str, str], int | None], tmp_path: Path) -> None:
    out = tmp_path / "sync.json"
    # a short path: sockets may lie in it
    with tempfile.TemporaryDirectory(prefix="sync-") as folder:
        command = ("--quick", "--model", "tiny", "--transports", *transports, "--json", out)
        done = benchmark(*command, TMPDIR=folder)
        assert not [p for p in psutil.process_iter(["cmdline"]) if folder in " ".join(p.info["cmdline"] or [])]
        assert not list(Path(folder).glob("weight-sync-*"))
    assert done.returncode == 0, done.stderr + done.stdout
    data = json.loads(out.read_text())
    assert (data["complete"], data["passed"], data["quick"], data["model"]) == (True, True, True, "tiny")
    assert data["torch"] == torch.__version__ and data["vllm"].startswith("0.32.") and data["cpu_count"] > 0
    rows = {(r["transport"], r["trainer_layout"]): r for r in data["rows"]}
    assert {key: r["messages"] for key, r in rows.items()} == places
    for (transport, trainer), row in rows.items():
        assert set(row) >= ROW_KEYS and row["engine_layout"] == "TP1" and row["error"] is None
        assert row["bytes"] == TINY_BYTES and row["dtype"] == "bfloat16"
        assert row["seconds"] > 0 and row["floor_seconds"] > 0 and row["gigabytes_per_second"] > 0
        assert len(row["seconds_each"]) == len(row["floor_seconds_each"]) == data["repeats"] == 2
        assert row["ratio"] == pytest.approx(row["seconds"] / row["floor_seconds"])
        assert row["foreign"] == (transport in ("vllm-reload", "gloo-per-tensor"))
        looked_at = trainer == "TP1"
        assert (row["phases"] is not None) == looked_at
        if looked_at:
            assert row["phases"].keys() == {"sender", "engine"}
            assert all(s > 0 for phases in row["phases"].values() for s in phases.values())
        assert f"{row['ratio']:.2f}" in done.stdout
    assert {s["transport"] for s in data["skipped"]} == {"nccl", "cuda-ipc"}
    assert "not measured: nccl" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (["--bucket-mib", "0"], "--bucket-mib must be at least 1, got 0"),
        (["--threads", "-1"], "--threads must be at least 1, got -1"),
        (["--timeout", "0"], "--timeout must be above 0, got 0"),
        (["--json", "/no/x"], "--json must be in a folder that exists, got /no/x"),
        (["--trainers", "TP1", "TP1"], "--trainers must name each once, got TP1 2 times"),
        (["--transports", "nccl"], "argument --transports: invalid choice: 'nccl'"),
        (["--model", "70b"], "argument --model: invalid choice: '70b'"),
        (["--engines", "TP4"], "argument --engines: invalid choice: 'TP4'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = benchmark(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"benchmark_weight_sync.py: {message}") and done.stderr.count("\n") == 1
