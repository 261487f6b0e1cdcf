"""How servers are started, watched, guarded and ended; the last test kills the real one."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.engines import vllm_command
from megatron_replay.engines.child_process import ChildProcess, clean_environment, free_port
from megatron_replay.engines.group_request import MissingGroup
from megatron_replay.engines.guardian import segments, segments_of
from megatron_replay.engines.request_pool import RequestPool
from megatron_replay.engines.require_api_key import RequireApiKey
from megatron_replay.engines.vllm_client import EngineError, VllmClient
from megatron_replay.engines.vllm_command import (
    PortTakenError,
    check_exposure,
    launch_server,
    server_command,
    server_environment,
    start_server,
    wait_ready,
)
from megatron_replay.engines.vllm_options import ServedModel
from megatron_replay.rollout import Prompt
from tests.vllm_models import API_KEY, EOS_ID, SHARED, shared_server

ROOT = Path(__file__).resolve().parent.parent
CONFIG = VllmConfig(startup_timeout=10)

# what wait_ready sees of a server: argv is the port, the version, and words that it ends with
SMALL_SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
port, version, *last_words = sys.argv[1:]
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"version": version}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
server = HTTPServer(("127.0.0.1", int(port)), Handler)
if last_words:
    sys.exit("\\n".join(last_words))
server.serve_forever()
"""


@pytest.fixture
def model(tmp_path: Path) -> ServedModel:
    (tmp_path / "config.json").write_text("{}")
    return ServedModel(tmp_path, "bfloat16", 512, 3, "cpu")


@pytest.fixture
def started() -> Iterator[list[ChildProcess]]:
    processes: list[ChildProcess] = []
    yield processes
    for process in processes:
        process.stop(0)


def options(command: list[str]) -> dict[str, str | None]:
    """--name value pairs; None for a switch."""
    found: dict[str, str | None] = {}
    for part, following in zip(command, [*command[1:], "--"], strict=True):
        if part.startswith("--"):
            found[part] = None if following.startswith("--") else following
    return found


def test_the_command_line(model: ServedModel) -> None:
    config = VllmConfig(memory_gib=0.25, max_num_seqs=9, tensor_parallel_size=2, gpu_memory_utilization=0.3)
    command = server_command(config, model, 4711)
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    on_cpu = options(command)
    assert on_cpu["--port"] == "4711" and on_cpu["--host"] == "127.0.0.1"
    assert on_cpu["--model"] == str(model.folder) and on_cpu["--load-format"] == "dummy"
    assert on_cpu["--max-num-seqs"] == "9" and on_cpu["--tensor-parallel-size"] == "2"
    assert (on_cpu["--dtype"], on_cpu["--max-model-len"], on_cpu["--seed"]) == ("bfloat16", "512", "3")
    assert on_cpu["--logprobs-mode"] == "processed_logprobs" and on_cpu["--generation-config"] == "vllm"
    assert on_cpu["--weight-transfer-config"] == '{"backend": "megatron_replay"}'
    assert on_cpu["--kv-cache-memory-bytes"] == str(2**28) and "--enforce-eager" in on_cpu
    assert not {"--gpu-memory-utilization", "--hf-overrides"} & set(on_cpu)
    exact = options(server_command(config, dataclasses.replace(model, fp32_lm_head=True), 1))
    assert exact["--hf-overrides"] == '{"head_dtype": "float32"}'
    on_gpu = options(server_command(config, dataclasses.replace(model, device="cuda", backend=None), 1))
    assert on_gpu["--gpu-memory-utilization"] == "0.3"
    assert not {"--enforce-eager", "--kv-cache-memory-bytes", "--weight-transfer-config"} & set(on_gpu)


def test_a_folder_without_a_model_is_named(tmp_path: Path, model: ServedModel) -> None:
    with pytest.raises(ValueError, match=r"folder must hold the config.json .*, got /.*nothing"):
        server_command(CONFIG, dataclasses.replace(model, folder=tmp_path / "nothing"), 1)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"RANK": "1", "VLLM_API_KEY": "other", "VLLM_CPU_KVCACHE_SPACE": "9", "P": "p"})
    env = server_environment(CONFIG, "secret", CUDA_VISIBLE_DEVICES="2")
    assert env["VLLM_API_KEY"] == "secret" and env["CUDA_VISIBLE_DEVICES"] == "2" and env["P"] == "p"
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and env["HF_HUB_OFFLINE"] == "1"
    assert not {"RANK", "VLLM_CPU_KVCACHE_SPACE", "VLLM_CPU_OMP_THREADS_BIND"} & set(env)
    two = dataclasses.replace(CONFIG, tensor_parallel_size=2)
    assert server_environment(two, None)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    assert server_environment(two, None)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "VLLM_API_KEY" not in server_environment(CONFIG, None)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_loopback_needs_no_key(host: str) -> None:
    check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node17", ""])
def test_any_other_host_needs_a_key(host: str, model: ServedModel, tmp_path: Path) -> None:
    check_exposure(host, "key")
    config = dataclasses.replace(CONFIG, host=host)
    for key in (None, ""):
        with pytest.raises(ValueError, match=rf"^--rl-vllm-host .*variable VLLM_API_KEY .*, got '{host}'"):
            start_server(config, model, key, tmp_path / "log")


def test_a_host_that_is_not_ours_is_named(model: ServedModel, tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIG, host="192.0.2.1")
    with pytest.raises(ValueError, match=r"^--rl-vllm-host must be an address of this machine, got '192.0.2.1'"):
        start_server(config, model, "key", tmp_path / "log")


def small_server(started: list[ChildProcess], log: Path, *words: str) -> tuple[ChildProcess, VllmClient]:
    port = free_port("127.0.0.1")
    command = [sys.executable, "-c", SMALL_SERVER, str(port), *words]
    started.append(ChildProcess(command, clean_environment(), log))
    return started[-1], VllmClient(f"http://127.0.0.1:{port}")


@pytest.mark.slow
def test_wait_ready_accepts_the_pinned_version_alone(started: list[ChildProcess], tmp_path: Path) -> None:
    for version in ("0.32.0", "0.32.7+cpu"):
        wait_ready(*small_server(started, tmp_path / "log", version), timeout=10)
    for version in ("0.33.0", "0.3.2", "1.32.0"):
        with pytest.raises(EngineError, match=rf"vLLM must be of version 0\.32, the server is {version}$"):
            wait_ready(*small_server(started, tmp_path / "log", version), timeout=10)


@pytest.mark.slow
def test_wait_ready_fails_fast_with_the_log_of_a_server_that_died(started: list[ChildProcess], tmp_path: Path) -> None:
    words = ["AssertionError: the cause", *("line" for _ in range(40)), "RuntimeError: later", "the end"]
    (tmp_path / "log").write_text("ValueError: of a run before\n")
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        wait_ready(*small_server(started, tmp_path / "log", "0.32.0", *words), timeout=60)
    assert time.monotonic() - began < 10
    said = str(caught.value)
    assert "exit code 1: AssertionError: the cause\n" in said and said.endswith("RuntimeError: later\nthe end")
    assert "of a run before" not in said


@pytest.mark.slow
def test_wait_ready_does_not_take_another_server_for_its_own(started: list[ChildProcess], tmp_path: Path) -> None:
    _, client = small_server(started, tmp_path / "other", "0.32.0")
    started.append(ChildProcess(["sleep", "60"], clean_environment(), tmp_path / "log"))
    (tmp_path / "log").write_text("still loading\n")
    words = r"not ready within --rl-vllm-startup-timeout 1.5 s; the end of .*log:\nstill loading$"
    with pytest.raises(TimeoutError, match=words):
        wait_ready(started[-1], client, timeout=1.5)
    assert client.healthy()


@pytest.mark.slow
def test_a_start_that_finds_its_port_taken_is_tried_on_another(
    started: list[ChildProcess], model: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, taken = small_server(started, tmp_path / "other", "0.32.0")
    wait_ready(started[0], taken, 10)
    ports: list[int] = []

    def command(config: VllmConfig, model: ServedModel, port: int) -> list[str]:
        ports.append(port)
        lost = len(ports) <= losses
        return [sys.executable, "-c", SMALL_SERVER, taken.url.rsplit(":")[-1] if lost else str(port), "0.32.0"]

    monkeypatch.setattr(vllm_command, "server_command", command)
    losses = 2
    process, client = launch_server(CONFIG, model, None, tmp_path / "log")
    started.append(process)
    assert len(set(ports)) == 3 and client.url == f"http://127.0.0.1:{ports[-1]}" and process.alive()
    losses = 99
    with pytest.raises(PortTakenError, match=r"Address already in use"):
        launch_server(CONFIG, model, None, tmp_path / "log")
    assert len(ports) == 6


def ask(app: RequireApiKey, kind: str = "http", path: str = "/pause", *headers: bytes) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message.get("status", message["type"]))

    scope = {"type": kind, "path": path, "headers": [(b"Authorization", value) for value in headers]}
    asyncio.run(app(scope, None, send))  # type: ignore[arg-type]
    return sent


async def inner(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "through"})


def test_the_middleware_guards_every_path_but_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    guarded = RequireApiKey(inner)
    assert ask(guarded, "lifespan") == ask(guarded, "http", "/health") == ["through"]
    for header in (b"Bearer secret", b"bearer secret"):
        assert ask(guarded, "http", "/update_weights", header) == ["through"]
    for path in ("/pause", "/healthy", "/health/", "/v1/models", "/metrics", "/"):
        assert ask(guarded, "http", path) == [401, "http.response.body"]
    for header in (b"Bearer secre", b"Bearer secret2", b"secret", b"Basic secret", b"Bearer ", b"Bearer \xff", b""):
        assert ask(guarded, "http", "/pause", header) == [401, "http.response.body"]
    assert ask(guarded, "http", "/pause", b"Bearer secret", b"Bearer secret") == [401, "http.response.body"]
    assert ask(guarded, "websocket", "/v1/realtime") == ["websocket.close"]
    monkeypatch.delenv("VLLM_API_KEY")
    assert ask(RequireApiKey(inner)) == ["through"]


# stands in for python: there is no CUDA, and the arguments are shown
SHOW_ARGUMENTS = """#!/bin/sh
[ "$1" = -c ] && exit 1
printf "%s\\n" "$@" "$VLLM_CPU_OMP_THREADS_BIND" "dev mode $VLLM_SERVER_DEV_MODE"
"""


def serve_by_hand(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    python = folder / "show"
    python.write_text(SHOW_ARGUMENTS)
    python.chmod(0o755)
    variables = {"PATH": os.environ["PATH"], "PYTHON": str(python), **env}
    script = str(ROOT / "examples" / "serve_vllm.sh")
    return subprocess.run([script, *args], env=variables, cwd="/", capture_output=True, text=True, timeout=30)


def test_the_script_starts_the_same_server(model: ServedModel, tmp_path: Path) -> None:
    shown = serve_by_hand(tmp_path, str(tmp_path), "4711", "--max-num-seqs", "9", MAX_MODEL_LEN="512")
    assert shown.returncode == 0, shown.stderr
    *arguments, bind, last = shown.stdout.splitlines()
    assert (bind, last) == ("", "dev mode 1")
    expected = options(server_command(VllmConfig(max_num_seqs=9), model, 4711))
    del expected["--seed"]
    assert options(arguments) == expected
    exact = serve_by_hand(tmp_path, str(tmp_path), "4711", FP32_LM_HEAD="1").stdout.splitlines()[:-2]
    served = dataclasses.replace(model, fp32_lm_head=True)
    assert options(exact)["--hf-overrides"] == options(server_command(CONFIG, served, 1))["--hf-overrides"]
    for several in (["--tensor-parallel-size", "2"], ["--tensor-parallel-size=2"], ["-tp", "2"], ["-tp=2"]):
        assert serve_by_hand(tmp_path, str(tmp_path), *several).stdout.splitlines()[-2] == "nobind"


def test_the_script_names_what_is_wrong(tmp_path: Path, model: ServedModel) -> None:
    folder = str(tmp_path)
    for args, env, words in (
        ([], {}, "usage: .*MODEL .*got: nothing"),
        (["/nowhere"], {}, "MODEL must be a folder with config.json, got /nowhere"),
        ([folder, "80a"], {}, "PORT must be a number, got 80a"),
        ([folder, "--host", "0.0.0.0"], {}, "host and port are HOST and the second argument, got --host"),
        ([folder, "--host=::"], {}, "got --host=::"),
        ([folder, "--port", "80"], {}, "got --port"),
        ([folder], {"FP32_LM_HEAD": "yes"}, "FP32_LM_HEAD must be 0 or 1, got yes"),
        ([folder], {"HOST": "0.0.0.0"}, "HOST must be a loopback address where VLLM_API_KEY is not set, got 0.0.0.0"),
    ):
        refused = serve_by_hand(tmp_path, *args, **env)
        assert refused.returncode == 2
        assert re.search(words, refused.stderr)
    assert serve_by_hand(tmp_path, folder, HOST="0.0.0.0", VLLM_API_KEY="key").returncode == 0


@pytest.mark.slow
def test_a_killed_server_fails_its_prompts_and_leaves_nothing() -> None:
    server = shared_server()
    server.set_version(0)
    tree = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    assert len([p for p in tree if "Worker" in p.name()]) == SHARED.tensor_parallel_size
    assert not any(API_KEY in part for p in tree for part in p.cmdline())
    used = segments() & set().union(*(segments_of(p.pid) for p in tree))
    assert used
    sampling = SamplingConfig(max_response_length=200)
    pool = RequestPool([server.client], sampling, EOS_ID, SHARED)
    asked = [Prompt((5, 6, 7 + i), counter=i, prompt_id=i) for i in range(60)]
    pending = pool.submit([MissingGroup(prompt) for prompt in asked], 16, 0)
    time.sleep(0.5)
    assert not pending.done()
    os.kill(server.process.pid, signal.SIGKILL)
    result = pending.result(20)
    pool.close()
    finished = {c.prompt.counter for c in result.completions}
    assert [m.prompt for m in result.missing] == [p for p in asked if p.counter not in finished]
    assert len(result.missing) > 50 and result.counters.server_failures >= 8
    assert all("no server is left" in m.reason for m in result.missing)
    assert not server.process.alive() and server.process.returncode == -signal.SIGKILL
    server.process.stop()
    assert psutil.wait_procs(tree, timeout=0.1)[1] == []
    assert not used & segments()
