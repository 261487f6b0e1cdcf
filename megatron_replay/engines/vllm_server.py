"""The vllm-server engine: token ids in and out over HTTP, to servers that the user started or that rank 0 spawns."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import torch

from megatron_replay.engines.child_process import ChildProcess
from megatron_replay.engines.request_pool import PoolResult, RequestPool
from megatron_replay.engines.require_api_key import KEY_VARIABLE
from megatron_replay.engines.vllm_client import EngineError, VllmClient
from megatron_replay.engines.vllm_command import check_version, is_loopback, launch_server
from megatron_replay.engines.vllm_engine import VllmEngine
from megatron_replay.rollout import Completion, Prompt


@dataclass
class Server:
    """One server; without a process it is the user's. `client` is None while it is down."""

    url: str = ""
    process: ChildProcess | None = None
    client: VllmClient | None = None


class VllmServerEngine(VllmEngine):
    """Servers that all replicas share. The first rank starts and feeds them; each replica's leader sends its requests.

    A server of ours that is gone is started again; one of the user's is left out until it answers again.
    """

    AUTO: ClassVar = {"cpu": "gloo", "cuda": "nccl"}
    IMPOSSIBLE: ClassVar = {"cuda-ipc": "needs an engine on the GPUs that train"}

    def __init__(self, *args: Any, log_folder: str | Path, progress: bool = False) -> None:
        super().__init__(*args)
        self.log_folder, self.progress = Path(log_folder), progress
        self._key = os.environ.get(KEY_VARIABLE)
        urls = self.config.server_urls
        self._servers = [Server(url) for url in urls] or [Server() for _ in range(self.config.servers)]
        self._spawned = not urls
        self._reason = ""  # why a server that answers is left out
        nodes = int(os.environ.get("WORLD_SIZE", "1")) > int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if self._spawned and nodes and is_loopback(self.config.host):
            raise ValueError(
                f"--rl-vllm-host must be an address that the other nodes of the run reach, got {self.config.host!r}; "
                f"0.0.0.0 is all of this node's, and needs {KEY_VARIABLE}"
            )
        self._urls: tuple[str, ...] = ()
        self._pool: RequestPool | None = None

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> PendingRequests:
        """Send the requests; they run on the servers while the caller goes on."""
        future = None
        if self.ranks.leads:
            assert self._pool is not None, "load_weights comes first"
            future = self._pool.submit(prompts, group_size, self.weight_version, self.progress)
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
        new = False
        for number, server in enumerate(self._servers):
            down = server.client is None or not server.client.healthy()
            if not down and not (suspect and self._spawned):
                continue
            # one that is left out changes who is fed, as one that comes back does
            new |= server.client is not None
            _stop(server)
            if self._spawned:
                self.counts["restarts"] += int(bool(server.url))
                self._spawn(number, server)
                new = True
            else:
                new |= self._find(server)
        if not self.controls():
            words = self._reason or "no server answers"
            raise EngineError("unreachable", ", ".join(s.url for s in self._servers), "start", words)
        return new

    def sample(self, prompts: Sequence[Prompt], group_size: int) -> tuple[list[Completion], list[Prompt], list[str]]:
        assert self._pool is not None
        return self._counted(self._pool.generate(prompts, group_size, self.weight_version, self.progress))

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

    def _counted(self, result: PoolResult) -> tuple[list[Completion], list[Prompt], list[str]]:
        self.counts.update(vars(result.counters))
        return result.completions, result.failed_prompts, result.reasons

    def _spawn(self, number: int, server: Server) -> None:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        env = server_devices(number, self.config.tensor_parallel_size, self.ranks.device)
        log = self.log_folder / f"vllm-server-{number}.log"
        server.process, server.client = launch_server(self.config, self.model, self._key, log, env)
        server.url = server.client.url

    def _find(self, server: Server) -> bool:
        """Whether the user's server answers now; one of another version does not count, where another server does."""
        client = VllmClient(server.url, self._key, self.config.sync_timeout)
        try:
            if client.healthy():
                check_version(client)
                server.client, self._reason = client, ""
                return True
        except EngineError as error:
            self._reason = str(error)
        client.close()
        return False


@dataclass
class PendingRequests:
    engine: VllmServerEngine
    future: Future[PoolResult] | None
    group_size: int

    def result(self, version: int) -> list[Completion]:
        """Wait. What failed is sampled again with the policy's weights as they are now, `version`."""
        done, failed, reasons = ([], [], [])
        if self.future is not None:
            done, failed, reasons = self.engine._counted(self.future.result())
        return self.engine._complete(done, failed, reasons, self.group_size, version)


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


def _stop(server: Server) -> None:
    if server.client is not None:
        server.client.close()
    if server.process is not None:
        server.process.stop()
    server.client = server.process = None
