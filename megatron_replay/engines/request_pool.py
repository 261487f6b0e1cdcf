"""Rollouts from several vLLM servers: one request for each prompt, spread by load, sent again where it failed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import httpx
from tqdm import tqdm

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.engines.group_request import GroupRequest, MissingGroup, Problem
from megatron_replay.engines.vllm_client import EngineError, VllmClient
from megatron_replay.rollout import Completion, Prompt

# sequences that wait on a server for each one that it can decode at once
QUEUE_DEPTH = 2
RETRY_DELAY = 0.2  # seconds before a prompt is sent again, for each time that it failed
# the server's words are about the request itself: any server would say the same again
REFUSED_REQUEST = (400, 413, 422)
# ... about this client or this server: nothing else sent there fares better
REFUSED_CLIENT = (401, 403, 404)


@dataclass
class PoolCounters:
    """What went wrong in one call, in requests unless said otherwise."""

    retried: int = 0  # sent again
    timed_out: int = 0
    aborted: int = 0
    server_failures: int = 0  # not reached, an error status, or an answer that is none
    wrong_version: int = 0
    discarded_samples: int = 0  # samples of answers that were not used


@dataclass(frozen=True)
class PoolResult:
    """Completions in the order of the prompts: a whole group of each prompt or none of it."""

    completions: list[Completion]
    missing: list[MissingGroup]
    counters: PoolCounters
    refused: bool  # some prompt failed in a way that no other attempt changes


@dataclass
class Server:
    """One server during one call."""

    client: VllmClient
    http: httpx.AsyncClient
    outstanding: int = 0
    left_out: bool = False


@dataclass
class Job:
    """One prompt on its way, and in the end its group or the reason why there is none."""

    prompt: Prompt
    failures: int = 0
    sent: int = 0
    avoid: Server | None = None  # where it failed last
    reason: str = ""
    refused: bool = False
    group: list[Completion] | None = None


@dataclass
class Call:
    """What one call of the pool asks for, and how it goes."""

    asked: GroupRequest
    servers: list[Server]
    window: int  # prompts outstanding on a server
    tries: int  # a prompt that has failed so often is given up
    waiting: deque[Job]
    bar: tqdm[Any]
    running: dict[asyncio.Task[list[Completion]], tuple[Job, Server]] = field(default_factory=dict)
    counters: PoolCounters = field(default_factory=PoolCounters)


class UnusableAnswerError(Exception):
    """An answer that came and cannot be used."""

    def __init__(self, url: str, problem: Problem, samples: int) -> None:
        super().__init__(f"{url}: {problem.words}")
        self.problem = problem
        self.samples = samples


class RequestPool:
    """Requests to `clients`, from an event loop on a thread of its own. `close` ends that thread."""

    def __init__(
        self, clients: Sequence[VllmClient], sampling: SamplingConfig, eos_id: int, config: VllmConfig
    ) -> None:
        if not clients:
            raise ValueError("clients must be at least one server, got none")
        self.clients = list(clients)
        self.sampling = sampling
        self.eos_id = eos_id
        self.config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="request-pool", daemon=True)
        self._thread.start()

    def generate(
        self,
        asked: Sequence[MissingGroup],
        group_size: int,
        expected_version: int,
        progress: bool = False,
        tries: int | None = None,
    ) -> PoolResult:
        """`group_size` completions of each prompt, sampled by weights of `expected_version`.

        A prompt that has failed `tries` times is given up; failures from before count. None: one more than the retries.
        """
        return self.submit(asked, group_size, expected_version, progress, tries).result()

    def submit(
        self,
        asked: Sequence[MissingGroup],
        group_size: int,
        expected_version: int,
        progress: bool = False,
        tries: int | None = None,
    ) -> concurrent.futures.Future[PoolResult]:
        """`generate` in the background. Cancelling the future aborts the requests on the servers.

        Raises ValueError for a group larger than --rl-vllm-max-num-seqs: a server refuses such a request.
        """
        if not 1 <= group_size <= self.config.max_num_seqs:
            raise ValueError(
                f"group_size must be between 1 and --rl-vllm-max-num-seqs {self.config.max_num_seqs}, got {group_size}"
            )
        tries = self.config.retries + 1 if tries is None else tries
        work = self._run(list(asked), group_size, expected_version, progress, tries)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Abort what is in flight and end the thread."""
        if not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _run(
        self, wanted: list[MissingGroup], group_size: int, version: int, progress: bool, tries: int
    ) -> PoolResult:
        jobs = [Job(group.prompt, group.failures) for group in wanted]
        window = max(1, QUEUE_DEPTH * self.config.max_num_seqs // group_size)
        async with AsyncExitStack() as stack:
            servers = [Server(c, await stack.enter_async_context(c.async_http())) for c in self.clients]
            bar = stack.enter_context(
                tqdm(total=len(jobs), desc="rollouts", unit="prompt", leave=False, disable=not progress)
            )
            asked = GroupRequest(self.sampling, self.eos_id, group_size, version, seeded=not self.config.unseeded)
            call = Call(asked, servers, window, tries, deque(jobs), bar)
            try:
                await self._serve(call)
            finally:
                for task in call.running:
                    task.cancel()
                await asyncio.gather(*call.running, return_exceptions=True)
        return PoolResult(
            completions=[completion for job in jobs for completion in job.group or ()],
            missing=[MissingGroup(job.prompt, job.failures, job.reason) for job in jobs if job.group is None],
            counters=call.counters,
            refused=any(job.refused for job in jobs),
        )

    async def _serve(self, call: Call) -> None:
        while call.waiting or call.running:
            self._send(call)
            if not call.running:
                # every server is left out
                for job in call.waiting:
                    job.reason = f"no server is left: {job.reason}" if job.reason else "no server is left"
                return
            done, _ = await asyncio.wait(call.running, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                job, server = call.running.pop(task)
                server.outstanding -= 1
                self._settle(call, job, server, task)

    def _send(self, call: Call) -> None:
        """Send what the windows have room for, each prompt to the server with the fewest outstanding."""
        live = [server for server in call.servers if not server.left_out]
        later: list[Job] = []
        while call.waiting and (free := [s for s in live if s.outstanding < call.window]):
            job = call.waiting.popleft()
            allowed = free if live == [job.avoid] else [s for s in free if s is not job.avoid]
            if not allowed:
                # the other servers are busy
                later.append(job)
                continue
            server = min(allowed, key=lambda s: s.outstanding)
            server.outstanding += 1
            call.counters.retried += job.sent > 0
            job.sent += 1
            call.running[asyncio.create_task(self._request(call, job, server))] = (job, server)
        call.waiting.extendleft(reversed(later))

    async def _request(self, call: Call, job: Job, server: Server) -> list[Completion]:
        await asyncio.sleep(RETRY_DELAY * job.failures)
        timeout = self.config.request_timeout
        async with asyncio.timeout(timeout):
            params = call.asked.params(job.prompt)
            samples = await server.client.generate(server.http, job.prompt.tokens, params, timeout)
        if (problem := call.asked.problem(samples)) is not None:
            raise UnusableAnswerError(server.client.url, problem, len(samples))
        return call.asked.completions(job.prompt, samples)

    def _settle(self, call: Call, job: Job, server: Server, task: asyncio.Task[list[Completion]]) -> None:
        """Keep the group, or count what went wrong and queue the prompt again, or give it up."""
        counters = call.counters
        try:
            job.group = task.result()
        except UnusableAnswerError as error:
            counter = error.problem.counter
            setattr(counters, counter, getattr(counters, counter) + 1)
            counters.discarded_samples += error.samples
            job.failures += 1
            job.refused = error.problem.final
            job.reason = str(error)
        except TimeoutError:
            counters.timed_out += 1
            job.failures += 1
            job.reason = f"{server.client.url}: no answer within {self.config.request_timeout:g} s"
        except EngineError as error:
            if error.kind == "timeout":
                counters.timed_out += 1
            else:
                counters.server_failures += 1
            # a prompt that was never taken has not failed
            never_taken = error.kind == "unreachable" or error.status in REFUSED_CLIENT
            server.left_out |= never_taken
            job.failures += not never_taken
            job.refused = error.status in REFUSED_REQUEST
            job.reason = str(error)
        if job.group is None and not job.refused and job.failures < call.tries:
            job.avoid = server
            call.waiting.appendleft(job)
        else:
            call.bar.update()

    async def _cancel_all(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
