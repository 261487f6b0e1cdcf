"""Two nodes for real: torchrun in two network namespaces, TP inside a node, DP or PP across; nodes and cables fail."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from megatron_replay.telemetry import read_metrics
from tests.launch import EXAMPLE, ROOT, environment
from tests.parallel.namespaces import INTERFACE, Network, network
from tests.preloaded import preloaded
from tests.test_entry_script import FLAGS, comparable

pytestmark = pytest.mark.slow
STEPS = 6
SHORT = (
    f"--train-iters {STEPS} --grpo-prompts-per-step 8 --grpo-group-size 4 --rl-replay-warmup-steps 1 "
    "--rl-replay-tau-max 3 --save-interval 2 --eval-prompts 0 --micro-batch-size 20 --distributed-timeout-minutes 1"
).split()
LAYOUTS = {"dp": "--pipeline-model-parallel-size 1", "pp": "--pipeline-model-parallel-size 2"}
PORT = 29500  # of a network that is the test's own
PATIENCE = 240  # seconds for what only takes long on a busy machine


@pytest.fixture
def nodes() -> Iterator[Network]:
    with network(2) as made:
        yield made


def flags(run_dir: Path, layout: str, *more: object) -> list[str]:
    return [f"@{FLAGS}", *SHORT, *LAYOUTS[layout].split(), "--run-dir", str(run_dir), *map(str, more)]


def start(
    nodes: Network, args: Sequence[str], logs: Path, ranks: int = 2, **variables: str
) -> list[subprocess.Popen[bytes]]:
    """torchrun on the first two nodes, `ranks` on each; the first is the meeting point."""
    env = environment() | {"GLOO_SOCKET_IFNAME": INTERFACE} | variables
    launchers = []
    for number, node in enumerate(nodes.nodes[:2]):
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)]
        torchrun += ["--node-rank", str(number), "--master-addr", nodes.address(0), "--master-port", str(PORT)]
        launchers.append(node.start([*torchrun, str(EXAMPLE), *args], env, logs / f"{node.name}.log"))
    return launchers


def wait_for_rows(run_dir: Path, rows: int, launchers: Sequence[subprocess.Popen[bytes]], logs: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(read_metrics(run_dir)) < rows:
        assert time.monotonic() < deadline and all(p.poll() is None for p in launchers), said(logs)
        time.sleep(0.05)


def said(logs: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-3000:]}" for log in sorted(logs.glob("*.log")))


def finish(nodes: Network, args: Sequence[str], logs: Path) -> None:
    for process in start(nodes, args, logs):
        assert process.wait(PATIENCE) == 0, said(logs)


@pytest.mark.parametrize(
    ("layout", "fault", "bound"),
    # a dead process closes its connections; behind a pulled cable nothing is heard, which only the timeout ends
    [("dp", "node", 60), ("pp", "cable", 60 + 60)],
)
def test_a_node_is_lost_and_both_go_on(nodes: Network, tmp_path: Path, layout: str, fault: str, bound: float) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    preloaded(4, *flags(whole, layout))
    launchers = start(nodes, flags(run_dir, layout), tmp_path)
    wait_for_rows(run_dir, 3, launchers, tmp_path)
    began = time.monotonic()
    if fault == "node":
        nodes.nodes[1].vanish()
    else:
        nodes.cable(1, "down")
    survivors = launchers[:1] if fault == "node" else launchers
    for process in survivors:
        assert process.wait(bound) != 0
    seconds = time.monotonic() - began
    print(f"{layout}, {fault}: both ended after {seconds:.1f} s")
    # the ranks of the second node, by name
    assert re.search(r"rank [23] has ended or stands still", (tmp_path / "node0.log").read_text()), said(tmp_path)
    if fault == "node":
        nodes.replace(1)
    else:
        nodes.cable(1, "up")
    assert len(read_metrics(run_dir)) < STEPS
    finish(nodes, flags(run_dir, layout, "--load", run_dir / "checkpoints"), tmp_path)
    assert comparable(read_metrics(run_dir)) == comparable(read_metrics(whole))


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_a_server_on_a_third_node_asks_for_its_key(tmp_path: Path) -> None:
    """examples/serve_vllm.sh, fed and asked by a data-parallel rank on each of two other nodes."""
    with network(3) as nodes:
        url, key = f"http://{nodes.address(2)}:8000", {"VLLM_API_KEY": "a key for tests"}
        settings = {"HOST": nodes.address(2), "PYTHON": sys.executable, "DTYPE": "float32", "MAX_MODEL_LEN": "16"}
        script = [str(ROOT / "examples" / "serve_vllm.sh"), str(FLAGS.parent / "model"), "8000"]
        small = ["--kv-cache-memory-bytes", str(1 << 26), "--max-num-seqs", "64"]
        server = nodes.nodes[2].start([*script, *small], environment() | settings | key, tmp_path / "server.log")
        wait_until_it_answers(nodes, url, server, tmp_path)
        args = flags(tmp_path / "run", "dp", "--tensor-model-parallel-size", 1, "--train-iters", 3)
        args += ["--rl-engine", "vllm-server", "--rl-vllm-server-url", url]

        wrong = [sys.executable, str(EXAMPLE), *args]
        refused = nodes.nodes[0].start(wrong, environment() | {"VLLM_API_KEY": "another"}, tmp_path / "wrong.log")
        assert refused.wait(PATIENCE) != 0
        refusal = (tmp_path / "wrong.log").read_text().strip()
        assert re.search(rf"Error: .*{url}.* 401 Unauthorized.*VLLM_API_KEY", refusal), refusal[-2000:]
        assert read_metrics(tmp_path / "run") == []

        for process in start(nodes, args, tmp_path, ranks=1, **key):
            assert process.wait(PATIENCE) == 0, said(tmp_path)
        rows = read_metrics(tmp_path / "run")
        assert [row["engine/weight_version"] for row in rows] == [0, 1, 2]
        # the server samples with the weights that came over the network
        assert all(row["train_rollout_logprob_abs_diff_max"] < 1e-4 for row in rows)
        assert all(row["sync/bytes"] > 0 and row["engine/server_failures"] == 0 for row in rows)


def wait_until_it_answers(nodes: Network, url: str, server: subprocess.Popen[bytes], logs: Path) -> None:
    ask = f"import urllib.request; urllib.request.urlopen('{url}/health', timeout=5)"
    deadline = time.monotonic() + PATIENCE
    while subprocess.run(nodes.nodes[0].command([sys.executable, "-c", ask]), capture_output=True).returncode != 0:
        assert time.monotonic() < deadline and server.poll() is None, said(logs)
        time.sleep(1)
