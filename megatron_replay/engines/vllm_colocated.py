"""The vllm-colocated engine: each replica samples on an engine of its own, beside the ranks that train.

The engine is a child process of the replica's leader (`VllmChild` says why). On GPUs it shares the replica's devices:
it sleeps while the policy trains, takes the weights through the memory of those GPUs, and wakes to sample.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from megatron_replay.engines.group_request import GroupRequest, MissingGroup
from megatron_replay.engines.vllm_child import VllmChild
from megatron_replay.engines.vllm_client import EngineError
from megatron_replay.engines.vllm_engine import VllmEngine
from megatron_replay.engines.vllm_options import engine_options
from megatron_replay.rollout import Completion, Prompt


class VllmColocatedEngine(VllmEngine):
    """One child for each replica; lost with a call that fails, and started again."""

    AUTO: ClassVar = {"cpu": "shared-memory", "cuda": "cuda-ipc"}
    IMPOSSIBLE: ClassVar = {"nccl": "cannot join two processes on one GPU"}

    def __init__(self, *args: Any, log_folder: str | Path) -> None:
        super().__init__(*args)
        cuda = self.ranks.device.type == "cuda"
        self.log_folder = Path(log_folder)
        self._devices = (
            replica_devices(self.ranks.of_replica(_place()), self.config.tensor_parallel_size) if cuda else {}
        )
        self._child: VllmChild | None = None
        self._asleep = False

    def submit(self, prompts: Sequence[Prompt], group_size: int) -> PendingGroups:
        return PendingGroups(self, list(prompts), group_size)

    def close(self) -> None:
        super().close()
        if self._child is not None:
            self._child.close()
        self._child = None

    def feeds(self) -> bool:
        return True

    def controls(self) -> list[VllmChild]:
        return [] if self._child is None else [self._child]

    def make_room(self) -> None:
        """What training has freed lies in PyTorch's allocator, where the engine cannot have it."""
        if self.ranks.device.type == "cuda":
            torch.cuda.empty_cache()
            # no engine wakes before every rank has
            self.ranks.any(False)

    def revive(self, suspect: bool) -> bool:
        if self._child is not None and self._child.alive() and not suspect:
            self._wake("weights")
            return False
        if self._child is not None:
            self.counts["restarts"] += 1
            self._child.close()
        self._child, self._asleep = None, False
        self.log_folder.mkdir(parents=True, exist_ok=True)
        options = engine_options(self.config, self.model)
        if self.ranks.device.type == "cuda":
            options["enable_sleep_mode"] = True
        self._child = VllmChild(
            options,
            self.log_folder / f"vllm-colocated-{self.ranks.data.rank}.log",
            timeout=self.config.sync_timeout,
            startup_timeout=self.config.startup_timeout,
            python=self.config.python,
            env=self._devices,
        )
        return True

    def sample(self, asked: Sequence[MissingGroup], group_size: int) -> tuple[list[Completion], list[MissingGroup]]:
        request = GroupRequest(
            self.sampling, self.eos_id, group_size, self.weight_version, seeded=not self.config.unseeded
        )
        assert self._child is not None, "load_weights comes first"
        try:
            self._wake("kv_cache")
            answers = self._child.call(
                "generate",
                [a.prompt.tokens for a in asked],
                [request.params(a.prompt) for a in asked],
                timeout=self.config.request_timeout,
            )
        except EngineError as error:
            self.counts["timed_out" if error.kind == "timeout" else "server_failures"] += 1
            return [], [MissingGroup(a.prompt, a.failures + 1, str(error)) for a in asked]
        done, missing = [], []
        for a, samples in zip(asked, answers, strict=True):
            if (problem := request.problem(samples)) is None:
                done += request.completions(a.prompt, samples)
                continue
            self.counts[problem.counter] += 1
            self._hopeless |= problem.final
            self.counts["discarded_samples"] += len(samples)
            missing.append(MissingGroup(a.prompt, a.failures + 1, problem.words))
        return done, missing

    def _wake(self, part: str) -> None:
        if self.ranks.device.type == "cuda" and self._asleep:
            assert self._child is not None
            self._child.wake_up(part)
            self._asleep = part == "weights"

    def rest(self) -> None:
        """On GPUs, give the memory back before the policy trains. Weights go too: the next use begins with a push."""
        if self.ranks.device.type != "cuda":
            return
        if self.ranks.leads:
            assert self._child is not None
            self._child.sleep()
            self._asleep = True
        # no rank of the replica goes on before its GPU is free
        self.ranks.from_leader(None)
        self.weight_version = -1


@dataclass
class PendingGroups:
    """Prompts that are sampled when they are asked for: the engine has no device of its own."""

    engine: VllmColocatedEngine
    prompts: list[Prompt]
    group_size: int

    def result(self, version: int) -> list[Completion]:
        """Sample. What failed is sampled again by an engine with the policy's weights, `version`."""
        done: list[Completion] = []
        missing: list[MissingGroup] = []
        if self.engine.ranks.leads:
            done, missing = self.engine.sample([MissingGroup(p) for p in self.prompts], self.group_size)
        completions = self.engine._complete(done, missing, self.group_size, version)
        self.engine.rest()
        return completions


def replica_devices(places: Sequence[tuple[str, str]], size: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of a replica's engine: the GPUs of all its ranks, whose memory it reads; it runs on the
    first `size`. places[i] is (host, GPU) of the replica's rank i.
    """
    hosts = {host for host, _ in places}
    if len(hosts) > 1:
        raise ValueError(
            f"--rl-engine vllm-colocated needs each replica on one node, got one on {', '.join(sorted(hosts))}; "
            "use vllm-server"
        )
    if size > len(places):
        raise ValueError(
            f"--rl-vllm-tensor-parallel-size must be at most the {len(places)} ranks of a replica, got {size}"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpu for _, gpu in places)}


def _place() -> tuple[str, str]:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return socket.gethostname(), visible.split(",")[local] if visible else str(local)
