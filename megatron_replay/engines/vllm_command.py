"""How a vLLM server is started for rollouts: its command line, its environment, and the wait until it is ready.

`vllm serve` crashes in the CPU build, hence the module behind it. examples/serve_vllm.sh starts such a server by hand.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import sys
import time
from collections.abc import Mapping

import psutil

from megatron_replay.config import VllmConfig
from megatron_replay.engines.child_process import ChildProcess, clean_environment, reserve_port
from megatron_replay.engines.require_api_key import KEY_VARIABLE
from megatron_replay.engines.vllm_client import EngineError, VllmClient
from megatron_replay.engines.vllm_options import PINNED_VLLM, ServedModel, engine_options
from megatron_replay.weight_sync.transports.addresses import ELSEWHERE, address_towards

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
MIDDLEWARE = "megatron_replay.engines.require_api_key.RequireApiKey"
SERVED_MODEL_NAME = "policy"
PORT_TAKEN = "address already in use"
STARTS = 3  # times that a server is started which finds its port taken
POLL = 0.25  # seconds
LOG_LINES = 20


class PortTakenError(RuntimeError):
    """Another program took the server's port first."""


def server_command(config: VllmConfig, model: ServedModel, port: int) -> list[str]:
    """The command line. Raises ValueError for a folder without config.json."""
    options = engine_options(config, model) | {
        "served_model_name": SERVED_MODEL_NAME,
        "host": config.host,
        "port": port,
        "middleware": MIDDLEWARE,
        "uvicorn_log_level": "warning",
        "enable_scale_out": True,  # the route that takes token ids
        "disable_uvicorn_access_log": True,
        "disable_fastapi_docs": True,
    }
    command = [config.python or sys.executable, "-m", SERVER_MODULE]
    for name, value in options.items():
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return command


def engine_environment(workers: int, **extra: str) -> dict[str, str]:
    """The variables of a process that runs vLLM with this many workers: none of torchrun's, and no question to the
    network."""
    settings = {
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if workers > 1:
        # on a CPU vLLM would bind each worker to a NUMA node of its own, and fail where there are fewer
        settings["VLLM_CPU_OMP_THREADS_BIND"] = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    env = clean_environment(**(settings | extra))
    # it would overrule the size of the key-value cache that we give in bytes
    env.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return env


def server_environment(config: VllmConfig, api_key: str | None, **extra: str) -> dict[str, str]:
    """The server's variables: the routes of weight transfer are on, the key goes where no command line shows it."""
    env = engine_environment(config.tensor_parallel_size, VLLM_SERVER_DEV_MODE="1", **extra)
    env.pop(KEY_VARIABLE, None)
    return env | ({KEY_VARIABLE: api_key} if api_key else {})


def check_exposure(host: str, api_key: str | None) -> None:
    """Raises ValueError for a server that others could reach and that asks for no key."""
    if api_key or is_loopback(host):
        return
    raise ValueError(
        f"--rl-vllm-host must be a loopback address where the environment variable {KEY_VARIABLE} is not set "
        f"(anyone who reaches the port could replace the weights), got {host!r}"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # another name may resolve to anything
        return False


def start_server(
    config: VllmConfig,
    model: ServedModel,
    api_key: str | None,
    log_path: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
) -> tuple[ChildProcess, str]:
    """Start a server on a port of its own; returns at once with its process and URL.

    `env` are further variables, such as CUDA_VISIBLE_DEVICES. Raises ValueError for a host that needs a key.
    """
    check_exposure(config.host, api_key)
    try:
        reserved = reserve_port(config.host)
    except OSError as error:
        raise ValueError(f"--rl-vllm-host must be an address of this machine, got {config.host!r}: {error}") from error
    with reserved:
        port = reserved.getsockname()[1]
        command = server_command(config, model, port)
        process = ChildProcess(command, server_environment(config, api_key, **(env or {})), log_path, [reserved])
    return process, f"http://{_reachable(config.host)}:{port}"


def wait_ready(process: ChildProcess, client: VllmClient, timeout: float) -> None:
    """Until the server of `process` answers, and is of the version that this project was built for.

    Raises PortTakenError, EngineError where the process ends first, TimeoutError after `timeout` seconds. The process
    is left to the caller.
    """
    port = int(client.url.rsplit(":", 1)[1])
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if not process.alive():
            log = process.log_tail(LOG_LINES)
            said = f"the server ended with exit code {process.returncode}: {_first_error(process)}\n"
            said += f"the end of {process.log_path}:\n{log}"
            if PORT_TAKEN in log.lower():
                raise PortTakenError(f"{client.url}: {said}")
            raise EngineError("unreachable", client.url, "start", said)
        # the second look: a server of another run would answer as well
        if client.healthy() and port in _listening_ports(process.pid):
            check_version(client)
            return
        time.sleep(POLL)
    raise TimeoutError(
        f"{client.url}: the server was not ready within --rl-vllm-startup-timeout {timeout:g} s; "
        f"the end of {process.log_path}:\n{process.log_tail(LOG_LINES)}"
    )


def check_version(client: VllmClient) -> None:
    """Raises EngineError for a server of a version whose weight-transfer interface may be another."""
    version = client.version()
    if version.split(".")[:2] != PINNED_VLLM.split("."):
        raise EngineError(
            "answer", client.url, "GET /version", f"vLLM must be of version {PINNED_VLLM}, the server is {version}"
        )


def launch_server(
    config: VllmConfig,
    model: ServedModel,
    api_key: str | None,
    log_path: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
) -> tuple[ChildProcess, VllmClient]:
    """Start a server and wait for it; one that finds its port taken is started again on another.

    Raises what `start_server` and `wait_ready` raise; then no process is left.
    """
    for start in range(1, STARTS + 1):
        process, url = start_server(config, model, api_key, log_path, env)
        client = VllmClient(url, api_key, config.sync_timeout)
        try:
            wait_ready(process, client, config.startup_timeout)
        except BaseException as error:
            client.close()
            process.stop()
            if not isinstance(error, PortTakenError) or start == STARTS:
                raise
        else:
            return process, client
    raise AssertionError("the last start returns or raises")


def _first_error(process: ChildProcess) -> str:
    """The line that names the cause: vLLM's last lines are about processes that waited for the one that failed."""
    errors = (line for line in process.log_tail(10**6).splitlines() if re.search(r"\b\w+Error: ", line))
    return next(errors, "its log names no error")


def _listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens itself."""
    try:
        found = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return set()
    return {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}


def _own_address(host: str) -> str:
    try:
        return address_towards(ELSEWHERE)
    except OSError:
        # no way leads out: the callers are here
        return "127.0.0.1" if host == "0.0.0.0" else "::1"


def _reachable(host: str) -> str:
    """The address to call a server that listens on `host`, as it stands in a URL."""
    if host in ("0.0.0.0", "::"):
        # every address of this machine, also for callers elsewhere: the one that its way to the world begins with
        host = _own_address(host)
    return f"[{host}]" if ":" in host else host
