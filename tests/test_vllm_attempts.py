"""What the vLLM engines try again, how often, and what they give up: no vLLM runs here."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.engines.child_process import free_port
from megatron_replay.engines.engine_ranks import EngineRanks
from megatron_replay.engines.group_request import MissingGroup
from megatron_replay.engines.vllm_client import EngineError
from megatron_replay.engines.vllm_engine import VllmEngine
from megatron_replay.engines.vllm_options import PINNED_VLLM, ServedModel
from megatron_replay.engines.vllm_server import VllmServerEngine
from megatron_replay.rollout import Completion, Prompt
from megatron_replay.weight_sync.engine_control import EngineControl
from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.sender import SyncReport
from megatron_replay.weight_sync.sharded_weights import ShardedWeights
from tests.stub_server import Reply, StubServer, group
from tests.transfers import CPU, KeepingEngine, shape, shards

SERVED = ServedModel(Path("model"), "float32", 64, seed=0, device="cpu")
ALONE = EngineRanks(DataParallelGroup(), None, CPU)
PAGES = {"/health": "{}", "/version": json.dumps({"version": f"{PINNED_VLLM}.0"})}
NONE_LEFT = r"no group of the step could be sampled in 3 tries \(--rl-vllm-retries 2\): "


def prompts(count: int) -> list[Prompt]:
    return [Prompt((10 + i,), counter=i, prompt_id=i) for i in range(count)]


class OneRank:
    """A policy of one rank."""

    def sharded_weights(self, of: Any) -> ShardedWeights:
        return shards(of, 1, 1)[0]


class Colocated(VllmEngine):
    """An engine of its own for each replica; `make_room` is a collective, as on GPUs. It fails to start `failures`
    times."""

    AUTO: ClassVar = {"cpu": "in-process"}

    def __init__(self, ranks: EngineRanks, failures: int) -> None:
        super().__init__(VllmConfig(retries=2), SamplingConfig(), 1, SERVED, shape(), ranks)
        self.engine, self.failures = KeepingEngine(shape()), failures

    def feeds(self) -> bool:
        return True

    def make_room(self) -> None:
        self.ranks.any(False)

    def revive(self, suspect: bool) -> bool:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("no memory yet")
        return True

    def controls(self) -> list[EngineControl]:
        return [self.engine]


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    own = [dist.new_group([r]) for r in range(2)][rank]
    ranks = EngineRanks.build(DataParallelGroup(dist.group.WORLD, device=CPU), own, CPU)
    made = Colocated(ranks, failures=rank)
    made.load_weights(OneRank(), 5)
    # what the loop asks next: every rank's collectives still pair
    found = made.metrics()
    assert found["engine/failed_syncs"] == 1 and made.weight_version == made.engine.version == 5

    # all of one replica's groups are given up: the run goes on with the other's, and ends where it has none either
    there = Completion(prompts(2)[1], uid=1, tokens=(5,), logprobs=(-1.0,), finish_reason="length", weight_version=5)
    lost = [MissingGroup(prompts(1)[0], failures=3, reason="it is late")]
    assert made._complete([there] if rank else [], [] if rank else lost, 1, 5) == ([there] if rank else [])
    assert made.metrics()["engine/dropped_groups"] == 1
    with pytest.raises(RuntimeError, match=NONE_LEFT + ("another replica failed" if rank else "it is late")):
        made._complete([], [] if rank else lost, 1, 5)

    own_key = VllmServerEngine(VllmConfig(), SamplingConfig(), 1, SERVED, shape(), ranks, log_folder=folder)._key
    Path(folder, f"key{rank}").write_text(str(own_key))
    made.close()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_push_that_fails_at_one_replica_keeps_the_ranks_in_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    running = mp.spawn(_rank, (str(tmp_path),), nprocs=2, join=False)
    deadline = time.monotonic() + 150
    try:
        while not running.join(timeout=1):
            assert time.monotonic() < deadline, "the ranks wait for each other"
    finally:
        for process in running.processes:
            process.kill()
    first, second = ((tmp_path / f"key{r}").read_text() for r in range(2))
    assert first == second and len(first) > 40, "all leaders have the key of the server that the first one starts"


def server_engine(*urls: str, logs: Path = Path("unused"), **changes: Any) -> VllmServerEngine:
    config = VllmConfig(server_urls=urls, **({"retries": 2, "request_timeout": 0.3, "startup_timeout": 30} | changes))
    return VllmServerEngine(config, SamplingConfig(), 1, SERVED, shape(), ALONE, log_folder=logs)


class Pushed(VllmServerEngine):
    """With servers that always take weights."""

    syncs = 0

    def _try_sync(self, version: int, connected: bool, suspect: bool) -> tuple[str, SyncReport | None]:
        self.syncs += 1
        self.revive(suspect)
        return "", SyncReport(1, 0.1)


def pushed(url: str, **changes: Any) -> Pushed:
    made = server_engine(url, **changes)
    made.__class__ = Pushed
    made.load_weights(OneRank(), 0)
    return made


class Stalling:
    """Answers all prompts but those of `late`, which it answers never; `asked` counts the requests of each prompt."""

    def __init__(self, *late: int) -> None:
        self.late, self.released = late, threading.Event()
        self.asked: dict[int, int] = {}

    def __call__(self, number: int, body: dict[str, Any]) -> Reply:
        counter = body["token_ids"][0] - 10
        self.asked[counter] = self.asked.get(counter, 0) + 1
        if counter in self.late:
            self.released.wait(60)
        return group(body)


def test_a_group_that_never_comes_is_dropped_and_the_others_are_there() -> None:
    answer = Stalling(2)
    with StubServer(answer, pages=PAGES) as stub:
        # the others must be in time on a machine that has other work
        made = pushed(stub.url, request_timeout=1.5)
        began = time.monotonic()
        with pytest.warns(UserWarning, match=r"1 groups were dropped, not sampled in 3 tries: .* within 1.5 s"):
            completions = made.submit(prompts(5), 2).result(0)
        # three times 1.5 s, and 0.2 s and 0.4 s before the second and third
        assert 4.5 <= time.monotonic() - began < 20
        answer.released.set()
        assert [c.uid for c in completions] == [0, 1, 2, 3, 6, 7, 8, 9]
        assert answer.asked == {0: 1, 1: 1, 2: 3, 3: 1, 4: 1}, "once, and as often again as --rl-vllm-retries says"
        assert made.syncs == 2, "the last try is one after a push"
        found = made.metrics()
        assert (found["engine/dropped_groups"], found["engine/timed_out"], found["engine/retried"]) == (1, 3, 2)
        made.close()


def test_where_no_group_is_left_the_run_ends() -> None:
    answer = Stalling(0, 1)
    with StubServer(answer, pages=PAGES) as stub:
        made = pushed(stub.url)
        with pytest.raises(RuntimeError, match=NONE_LEFT + r"http://.*no answer within 0.3 s"):
            made.submit(prompts(2), 2).result(0)
        answer.released.set()
        assert answer.asked == {0: 3, 1: 3}
        made.close()


def test_a_server_that_is_lost_costs_each_prompt_one_try() -> None:
    """Requests that were never taken do not fail for ever: with every round the server is gone again."""
    with StubServer(Stalling(), pages=PAGES) as stub:
        made = pushed(stub.url)
        made._pool.clients[0].url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
        with pytest.raises(RuntimeError, match=NONE_LEFT + r"no server is left: .*no connection"):
            made.submit(prompts(2), 2).result(0)
        assert made.syncs == 3
        made.close()


def test_a_users_server_that_is_not_there_yet_is_waited_for() -> None:
    port = free_port("127.0.0.1")
    made = server_engine(f"http://127.0.0.1:{port}")
    stub: list[StubServer] = []

    def appear() -> None:
        stub.append(StubServer(Stalling(), port, PAGES).__enter__())

    later = threading.Timer(1, appear)
    began = time.monotonic()
    later.start()
    try:
        with pytest.warns(UserWarning, match=rf"no server answers at .*:{port}: waiting for up to .* 30 s"):
            assert made.revive(False)
        assert 0.9 < time.monotonic() - began < 20 and [c.url for c in made.controls()] == [f"http://127.0.0.1:{port}"]
        assert not made.revive(False), "and then it is as it was"
    finally:
        later.join()
        stub[0].__exit__(None, None, None)
    made.close()


def test_every_attempt_waits_for_the_servers_and_the_wait_ends() -> None:
    made = server_engine(f"http://127.0.0.1:{free_port('127.0.0.1')}", retries=1, startup_timeout=0.6)
    began = time.monotonic()
    words = r"in 2 attempts: EngineError: .* no server answers within --rl-vllm-startup-timeout 0.6 s"
    with pytest.warns(UserWarning, match="no server answers"), pytest.raises(WeightSyncError, match=words):
        made.load_weights(OneRank(), 0)
    assert 1.2 <= time.monotonic() - began < 15
    made.close()


def test_a_server_that_answers_and_cannot_be_used_is_not_waited_for() -> None:
    with StubServer(Stalling(), pages=PAGES | {"/version": json.dumps({"version": "0.1.0"})}) as stub:
        made = server_engine(stub.url)
        began = time.monotonic()
        with pytest.raises(EngineError, match=r"vLLM must be of version .*, the server is 0\.1\.0"):
            made.revive(False)
        assert time.monotonic() - began < 10
        made.close()


def test_servers_that_we_start_have_a_key_whether_or_not_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    keys = {server_engine()._key for _ in range(3)}
    assert len(keys) == 3 and all(key and len(key) > 40 for key in keys)
    assert server_engine("http://127.0.0.1:9")._key is None, "a server of the user's has the user's"
    assert server_engine(host="0.0.0.0")._key is None, "and so it must be where others reach it"
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert server_engine()._key == server_engine("http://127.0.0.1:9")._key == "secret"
