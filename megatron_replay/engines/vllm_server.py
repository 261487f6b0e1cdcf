"""The vllm-server engine: token ids in and out over HTTP, to servers that the user started or that rank 0 spawns."""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch

from megatron_replay.engines.child_process import ChildProcess
from megatron_replay.engines.group_request import MissingGroup
from megatron_replay.engines.request_pool import PoolResult, RequestPool
from megatron_replay.engines.require_api_key import KEY_VARIABLE
from megatron_replay.engines.vllm_client import EngineError, VllmClient
from megatron_replay.engines.vllm_command import POLL, check_version, is_loopback, launch_server
from megatron_replay.engines.vllm_engine import VllmEngine
from megatron_replay.rollout import Completion, Prompt

STRIKES = 2  # pushes in a row that fail at a server, before it is left out


@dataclass
class Server:
    """One server; without a process it is the user's. `client` is None while it is down or left out.

    Of the user's: `problem` is why one that answers is left out, "" where it does not answer; `barred` is such a
    problem that stays until it has stopped answering.
    """

    number: int
    url: str = ""
    process: ChildProcess | None = None
    client: VllmClient | None = None
    problem: str = ""
    barred: str = ""


class VllmServerEngine(VllmEngine):
    """Servers that all replicas share. The first rank starts and feeds them; each replica's leader sends its requests.

    A server of ours that is gone is started again; one of the user's is left out until it answers again. One of
    several that takes no weights in a run under way is left out too, with a warning: the run goes on with the others.
    """

    AUTO: ClassVar = {"cpu": "gloo", "cuda": "nccl"}
    IMPOSSIBLE: ClassVar = {"cuda-ipc": "needs an engine on the GPUs that train"}

    def __init__(self, *args: Any, log_folder: str | Path, progress: bool = False) -> None:
        super().__init__(*args)
        self.log_folder, self.progress = Path(log_folder), progress
        self._key = os.environ.get(KEY_VARIABLE)
        urls = self.config.server_urls
        self._servers = [Server(i, url) for i, url in enumerate(urls or [""] * self.config.servers)]
        self._spawned = not urls
        nodes = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self._spawned and nodes and is_loopback(self.config.host):
            raise ValueError(
                f"--rl-vllm-host must be an address that the other nodes of the run reach, got {self.config.host!r}; "
                f"0.0.0.0 is all of this node's, and needs {KEY_VARIABLE}"
            )
        if self._spawned and is_loopback(self.config.host):
            # everyone on this machine reaches the port, and could replace the weights
            self._key = self.ranks.from_first(self._key or secrets.token_urlsafe())
        self._urls: tuple[str, ...] = ()
        self._pool: RequestPool | None = None

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> PendingRequests:
        """Send the requests; they run on the servers while the caller goes on."""
        future = None
        if self.ranks.leads:
            assert self._pool is not None, "load_weights comes first"
            asked = [MissingGroup(prompt) for prompt in prompts]
            # the last try comes after a push, which finds out the servers that hang
            tries = max(1, self.config.retries)
            future = self._pool.submit(asked, group_size, self.weight_version, self.progress, tries)
        return PendingRequests(self, future, group_size)

    def close(self) -> None:
        super().close()
        self._end_pool()
        for server in self._servers:
            _stop(server)

    def feeds(self) -> bool:
        return self.ranks.data.rank == 0

    def controls(self) -> list[VllmClient]:
        return [s.client for s in self._servers if s.client is not None]

    def host(self) -> str:
        """One that other hosts reach too, where there is one."""
        up = [urlsplit(s.url).hostname or "" for s in self._servers if s.client is not None]
        return next((h for h in up if not is_loopback(h)), up[0] if up else "127.0.0.1")

    def revive(self, suspect: bool) -> bool:
        gone = [s for s in self._servers if s.client is None or not s.client.healthy()]
        if self._spawned:
            new = self._start(self._servers if suspect else gone)
        else:
            new = self._look_for(gone) | self._leave_out() | self._wait()
        if not self.controls():
            words = next((s.problem for s in self._servers if s.problem), "") or (
                f"no server answers within --rl-vllm-startup-timeout {self.config.startup_timeout:g} s"
            )
            raise EngineError("unreachable", ", ".join(s.url for s in self._servers), "start", words)
        return new

    def sample(self, asked: Sequence[MissingGroup], group_size: int) -> tuple[list[Completion], list[MissingGroup]]:
        assert self._pool is not None
        return self._counted(self._pool.generate(asked, group_size, self.weight_version, self.progress))

    def _sync(self, version: int, suspect: bool = False) -> None:
        super()._sync(version, suspect)
        urls = self.ranks.from_first(tuple(s.url for s in self._servers if s.client is not None))
        if self.ranks.leads and (urls != self._urls or self._pool is None):
            self._end_pool()
            clients = [VllmClient(url, self._key, self.config.sync_timeout) for url in urls]
            self._pool = RequestPool(clients, self.sampling, self.eos_id, self.config)
        self._urls = urls

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            for client in self._pool.clients:
                client.close()
        self._pool = None

    def _counted(self, result: PoolResult) -> tuple[list[Completion], list[MissingGroup]]:
        self.counts.update(vars(result.counters))
        self._hopeless |= result.refused
        return result.completions, result.missing

    def _start(self, servers: Sequence[Server]) -> bool:
        """Start our servers (again), all at once; True if there were any."""
        self.log_folder.mkdir(parents=True, exist_ok=True)
        self.counts["restarts"] += sum(bool(server.url) for server in servers)
        with ThreadPoolExecutor(len(servers) or 1) as calls:
            started = [calls.submit(self._spawn, server) for server in servers]
        # all have ended, also where one did not start
        for one in started:
            one.result()
        return bool(servers)

    def _spawn(self, server: Server) -> None:
        _stop(server)
        env = server_devices(server.number, self.config.tensor_parallel_size, self.ranks.device)
        log = self.log_folder / f"vllm-server-{server.number}.log"
        server.process, server.client = launch_server(self.config, self.model, self._key, log, env)
        server.url = server.client.url

    def _look_for(self, gone: Sequence[Server]) -> bool:
        """See which of the user's servers that were gone answer now; True if some came or went."""
        changed = False
        for server in gone:
            changed |= server.client is not None
            _stop(server)
            server.problem = ""
            client = VllmClient(server.url, self._key, self.config.sync_timeout)
            if not client.healthy():
                # it may come back as another
                server.barred = ""
            elif not (problem := server.barred or _version_problem(client)):
                server.client, changed = client, True
                continue
            else:
                server.problem = problem
            client.close()
        return changed

    def _wait(self) -> bool:
        """Where none of the user's servers can be fed, until one can that does not answer yet, for up to
        --rl-vllm-startup-timeout; True if one came."""
        deadline = time.monotonic() + self.config.startup_timeout
        came = warned = False
        while not self.controls() and not all(s.problem for s in self._servers) and time.monotonic() < deadline:
            if not warned:
                silent = ", ".join(s.url for s in self._servers if not s.problem)
                warnings.warn(
                    f"no server answers at {silent}: waiting for up to --rl-vllm-startup-timeout "
                    f"{self.config.startup_timeout:g} s",
                    stacklevel=2,
                )
                warned = True
            time.sleep(POLL)
            came = self._look_for(self._servers)
        return came

    def _leave_out(self) -> bool:
        """Leave out those of the user's servers that keep failing pushes, where others take them; True if any did."""
        fed = [(server, self._strikes[server.client.name]) for server in self._servers if server.client is not None]
        bad = [(server, strikes) for server, strikes in fed if len(strikes) >= STRIKES]
        if not self._fed or not bad or len(bad) == len(fed):
            return False
        for server, strikes in bad:
            server.barred = strikes[-1]
            warnings.warn(
                f"{server.url} is left out until it is started again, it takes no weights: {server.barred}",
                stacklevel=2,
            )
            _stop(server)
        return True


@dataclass
class PendingRequests:
    engine: VllmServerEngine
    future: Future[PoolResult] | None
    group_size: int

    def result(self, version: int) -> list[Completion]:
        """Wait. What failed is sampled again with the policy's weights as they are now, `version`."""
        done: list[Completion] = []
        missing: list[MissingGroup] = []
        if self.future is not None:
            done, missing = self.engine._counted(self.future.result())
        return self.engine._complete(done, missing, self.group_size, version)


def server_devices(number: int, size: int, device: torch.device) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of spawned server `number`: the GPUs of this node behind those that train."""
    if device.type != "cuda":
        return {}
    first = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) + number * size
    found = torch.cuda.device_count()
    if first + size > found:
        raise ValueError(
            f"--rl-vllm-servers and --rl-vllm-tensor-parallel-size need GPUs {first} to {first + size - 1} of this "
            f"node for server {number}, behind those that train, got {found} GPUs; name servers elsewhere with "
            "--rl-vllm-server-url, or use --rl-engine vllm-colocated"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(found)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[first : first + size])}


def _version_problem(client: VllmClient) -> str:
    try:
        check_version(client)
    except EngineError as error:
        return str(error)
    return ""


def _stop(server: Server) -> None:
    if server.client is not None:
        server.client.close()
    if server.process is not None:
        server.process.stop()
    server.client = server.process = None
