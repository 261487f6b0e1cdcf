"""RequestPool: the real server for what it does, a stub for what it cannot be made to do. Nothing is lost silently."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Iterator

import pytest

from megatron_replay.config import SamplingConfig, VllmConfig
from megatron_replay.engines.child_process import free_port
from megatron_replay.engines.group_request import MissingGroup
from megatron_replay.engines.request_pool import PoolCounters, PoolResult, RequestPool
from megatron_replay.engines.vllm_client import VllmClient
from megatron_replay.rollout import Prompt
from tests.stub_server import StubServer, choice, group
from tests.vllm_models import SHARED, VOCAB_SIZE, SharedServer, shared_server

pytestmark = pytest.mark.slow
VERSION = 7
QUICK = VllmConfig(max_num_seqs=64, request_timeout=5, retries=2)
SAMPLING = SamplingConfig(max_response_length=24, seed=5)


def prompts(count: int, first: int = 0, length: int = 6) -> list[Prompt]:
    def tokens(i: int) -> tuple[int, ...]:
        return tuple(3 + (7 * i + j) % (VOCAB_SIZE - 3) for j in range(length))

    return [Prompt(tokens(i), counter=i, prompt_id=i) for i in range(first, first + count)]


def wanted(prompts: list[Prompt]) -> list[MissingGroup]:
    return [MissingGroup(prompt) for prompt in prompts]


def failed(result: PoolResult) -> list[Prompt]:
    return [group.prompt for group in result.missing]


def reasons(result: PoolResult) -> list[str]:
    return [group.reason for group in result.missing]


@pytest.fixture
def server() -> SharedServer:
    running = shared_server()
    running.set_version(VERSION)
    return running


@pytest.fixture
def eos_id() -> int:
    return 9


@pytest.fixture
def pool(server: SharedServer, eos_id: int) -> Iterator[RequestPool]:
    pool = RequestPool([server.client], SAMPLING, eos_id, SHARED)
    yield pool
    pool.close()


def nobody() -> VllmClient:
    return VllmClient(f"http://127.0.0.1:{free_port('127.0.0.1')}")


def test_groups_come_whole_ordered_and_reproducible(pool: RequestPool, server: SharedServer) -> None:
    asked = prompts(12)
    result = pool.generate(wanted(asked[::-1]), 6, VERSION, progress=True)
    assert result.counters == PoolCounters() and not result.missing
    assert [c.prompt for c in result.completions] == [p for p in asked[::-1] for _ in range(6)]
    assert [c.uid for c in result.completions] == [p.uid(i, 6) for p in asked[::-1] for i in range(6)]
    for c in result.completions:
        assert c.problem() is None and c.weight_version == VERSION
        assert (c.finish_reason == "stop") == (c.tokens[-1] == 9)
        assert 9 not in c.tokens[:-1]
        assert c.finish_reason == "stop" or len(c.tokens) == 24
    assert any(c.finish_reason == "stop" for c in result.completions)
    for p in asked:
        assert len({c.tokens for c in result.completions if c.prompt is p}) > 1
    again = pool.generate(wanted(asked), 6, VERSION)
    assert {c.uid: c.tokens for c in again.completions} == {c.uid: c.tokens for c in result.completions}


def test_the_same_prompt_at_another_step_or_with_another_seed_draws_anew(
    pool: RequestPool, server: SharedServer, eos_id: int
) -> None:
    def drawn(pool: RequestPool, counter: int) -> set[tuple[int, ...]]:
        prompt = dataclasses.replace(prompts(1)[0], counter=counter)
        return {c.tokens for c in pool.generate(wanted([prompt]), 4, VERSION).completions}

    first = drawn(pool, 0)
    assert len(first) == 4 and not first & drawn(pool, 1)
    other = RequestPool([server.client], dataclasses.replace(SAMPLING, seed=6), eos_id, SHARED)
    assert not first & drawn(other, 0)
    other.close()


def test_many_windows_of_prompts(server: SharedServer, eos_id: int) -> None:
    pool = RequestPool([server.client], dataclasses.replace(SAMPLING, max_response_length=2), eos_id, SHARED)
    result = pool.generate(wanted(prompts(400)), 2, VERSION)
    pool.close()
    assert len(result.completions) == 800 and result.counters == PoolCounters()


def test_a_pause_in_the_middle_aborts_and_the_prompts_are_sent_again(pool: RequestPool, server: SharedServer) -> None:
    asked = prompts(40)
    pending = pool.submit(wanted(asked), 8, VERSION)
    time.sleep(0.3)
    assert not pending.done()
    server.client.pause()
    time.sleep(0.2)
    server.client.resume()
    result = pending.result(60)
    assert len(result.completions) == 320 and not result.missing
    assert result.counters.aborted >= 1 and result.counters.retried == result.counters.aborted
    assert result.counters.discarded_samples == 8 * result.counters.aborted
    assert all(c.problem() is None for c in result.completions)


def test_another_version_is_not_accepted(pool: RequestPool) -> None:
    result = pool.generate(wanted(prompts(3)), 4, VERSION + 1)
    assert not result.completions and failed(result) == prompts(3)
    assert result.counters == PoolCounters(retried=6, wrong_version=9, discarded_samples=36)
    assert "weight version must be 8, got 7" in result.missing[0].reason


def test_a_server_that_is_not_there_is_left_out(server: SharedServer, eos_id: int) -> None:
    pool = RequestPool([nobody(), server.client, nobody()], SAMPLING, eos_id, dataclasses.replace(SHARED, retries=0))
    result = pool.generate(wanted(prompts(60)), 4, VERSION)
    pool.close()
    assert len(result.completions) == 240 and not result.missing
    # at most a window of each was on its way
    assert 2 <= result.counters.server_failures == result.counters.retried <= 64


def test_without_any_server_every_prompt_fails_at_once() -> None:
    pool = RequestPool([nobody(), nobody()], SAMPLING, 1, QUICK)
    began = time.monotonic()
    result = pool.generate(wanted(prompts(300)), 4, VERSION)
    pool.close()
    assert time.monotonic() - began < 5
    assert failed(result) == prompts(300) and not result.completions
    assert all("no server is left" in reason for reason in reasons(result))
    assert any("no connection" in reason for reason in reasons(result))


def test_a_wrong_key_and_a_refused_prompt_are_not_sent_again(server: SharedServer, pool: RequestPool) -> None:
    stranger = RequestPool([VllmClient(server.client.url)], SAMPLING, 1, QUICK)
    result = stranger.generate(wanted(prompts(5)), 2, VERSION)
    stranger.close()
    assert len(result.missing) == 5 and "status 401" in result.missing[0].reason and not result.refused
    assert result.counters.retried == 0
    long = prompts(1, first=100, length=300)
    result = pool.generate(wanted([*prompts(2), *long, *prompts(1, first=2)]), 2, VERSION)
    assert failed(result) == long and [c.prompt.counter for c in result.completions] == [0, 0, 1, 1, 2, 2]
    assert "status 400" in result.missing[0].reason and "256" in result.missing[0].reason and result.refused
    assert result.counters == PoolCounters(server_failures=1)


def run_stub(stub: StubServer, count: int, group_size: int = 2, config: VllmConfig = QUICK, version: int = 0):
    pool = RequestPool([VllmClient(stub.url)], SAMPLING, 1, config)
    try:
        return pool.generate(wanted(prompts(count)), group_size, version)
    finally:
        pool.close()


def sent_samples(*samples: dict) -> tuple[int, str]:
    return 200, json.dumps({"choices": list(samples)})


@pytest.mark.parametrize(
    ("reply", "counters", "words"),
    [
        ((200, "garbage"), {"server_failures": 3}, "no JSON in garbage"),
        (None, {"server_failures": 3}, "the connection broke"),
        ((500, "dead"), {"server_failures": 3}, "status 500 Internal Server Error: dead"),
        (sent_samples(choice(0, [5])), {"server_failures": 3, "discarded_samples": 3}, "samples must be 2, got 1"),
        (
            sent_samples(choice(0, [5]), choice(1, [], finish_reason="abort")),
            {"aborted": 3, "discarded_samples": 6},
            "finish_reason must be stop or length, got 'abort'",
        ),
        (
            sent_samples(choice(0, [5]), choice(1, [5], version="1")),
            {"wrong_version": 3, "discarded_samples": 6},
            "weight version must be 0, got 0, 1",
        ),
        (
            sent_samples(choice(0, [5]), choice(1, [5], weight_versions=None)),
            {"wrong_version": 3, "discarded_samples": 6},
            "weight version must be 0, got 0, none",
        ),
    ],
)
def test_a_prompt_is_sent_again_as_often_as_the_retries_say(
    reply: tuple[int, str] | None, counters: dict[str, int], words: str
) -> None:
    """The second of two prompts is answered badly: three times, and then it has failed; the first is whole."""
    with StubServer(lambda number, body: reply if body["token_ids"][0] != 3 else group(body)) as stub:
        result = run_stub(stub, 2)
        assert len(stub.bodies) == 4
        assert {b["sampling_params"]["seed"] for b in stub.bodies if b["token_ids"][0] != 3} == {
            stub.bodies[-1]["sampling_params"]["seed"]
        }
    assert [c.uid for c in result.completions] == [0, 1] and failed(result) == prompts(1, first=1)
    assert result.counters == PoolCounters(retried=2, **counters)
    assert words in result.missing[0].reason


def test_the_last_allowed_answer_counts() -> None:
    with StubServer(lambda number, body: group(body) if number >= 2 else (500, "not yet")) as stub:
        result = run_stub(stub, 1)
        assert len(result.completions) == 2
        assert result.counters == PoolCounters(retried=2, server_failures=2)
        result = run_stub(stub, 1, config=dataclasses.replace(QUICK, retries=0))
        assert result.counters == PoolCounters()


def test_failures_from_before_count_and_a_limit_ends_sooner() -> None:
    with StubServer(lambda number, body: (500, "not yet")) as stub:
        pool = RequestPool([VllmClient(stub.url)], SAMPLING, 1, QUICK)
        asked = [MissingGroup(prompt, failures=i) for i, prompt in enumerate(prompts(3))]
        result = pool.generate(asked, 2, 0)
        assert [group.failures for group in result.missing] == [3, 3, 3] and len(stub.bodies) == 3 + 2 + 1
        result = pool.generate(asked[:1], 2, 0, tries=2)
        assert [group.failures for group in result.missing] == [2] and len(stub.bodies) == 6 + 2
        pool.close()


def test_a_mixed_sample_is_of_no_version() -> None:
    spans = [{"version": "0", "start": 0, "end": 1}, {"version": "1", "start": 1, "end": 2}]
    with StubServer(lambda n, body: sent_samples(choice(0, [5, 5], weight_versions=spans))) as stub:
        result = run_stub(stub, 1, group_size=1, version=1)
    assert result.counters.wrong_version == 3 and not result.completions


def test_logprobs_that_are_missing_stay_missing() -> None:
    reply = json.dumps({"choices": [choice(0, [5], logprobs={"content": [{"token_id": 5, "logprob": float("nan")}]})]})
    assert "NaN" in reply
    with StubServer(lambda n, body: (200, reply)) as stub:
        [completion] = run_stub(stub, 1, group_size=1).completions
    assert completion.problem() == "has no finite log-prob at token 0: nan"


def test_a_stalled_server_is_timed_out_in_bounded_time() -> None:
    release = threading.Event()
    with StubServer(lambda n, body: group(body) if release.wait(30) else None) as stub:
        began = time.monotonic()
        result = run_stub(stub, 10, config=dataclasses.replace(QUICK, request_timeout=0.3, retries=1))
        release.set()
    assert time.monotonic() - began < 5
    assert result.counters == PoolCounters(retried=10, timed_out=20)
    assert len(result.missing) == 10 and "no answer within 0.3 s" in result.missing[0].reason


def test_a_failed_prompt_goes_to_another_server() -> None:
    with StubServer(lambda n, body: (500, "sick")) as sick, StubServer(lambda n, body: group(body)) as well:
        pool = RequestPool([VllmClient(sick.url), VllmClient(well.url)], SAMPLING, 1, QUICK)
        result = pool.generate(wanted(prompts(20)), 2, 0)
        pool.close()
        assert len(result.completions) == 40
        assert result.counters.retried == result.counters.server_failures == len(sick.bodies) > 0
        assert len(well.bodies) == 20


def test_load_follows_the_speed_of_the_servers_within_a_window() -> None:
    def after(seconds: float) -> StubServer:
        return StubServer(lambda n, body: time.sleep(seconds) or group(body))

    config = dataclasses.replace(QUICK, max_num_seqs=8)
    with after(0.2) as slow, after(0.02) as fast:
        pool = RequestPool([VllmClient(slow.url), VllmClient(fast.url)], SAMPLING, 1, config)
        assert len(pool.generate(wanted(prompts(100)), 4, 0).completions) == 400
        pool.close()
        # two groups of four are decoded at once, and as many wait
        assert slow.most_outstanding == fast.most_outstanding == 4
        assert len(fast.bodies) > 2 * len(slow.bodies)


def test_the_server_with_the_fewest_prompts_is_next() -> None:
    together = threading.Barrier(9)

    def answer(number: int, body: dict) -> tuple[int, str] | None:
        together.wait(20)
        return group(body)

    with StubServer(answer) as a, StubServer(answer) as b, StubServer(answer) as c:
        pool = RequestPool([VllmClient(stub.url) for stub in (a, b, c)], SAMPLING, 1, QUICK)
        assert len(pool.generate(wanted(prompts(9)), 2, 0).completions) == 18
        pool.close()
        assert [len(stub.bodies) for stub in (a, b, c)] == [3, 3, 3]


def test_a_thousand_requests_are_outstanding_at_once() -> None:
    barrier = threading.Barrier(1000)

    def together(number: int, body: dict) -> tuple[int, str] | None:
        barrier.wait(60)
        return group(body)

    with StubServer(together) as stub:
        config = dataclasses.replace(QUICK, max_num_seqs=1000, request_timeout=60, retries=0)
        result = run_stub(stub, 1000, config=config)
        assert stub.most_outstanding == 1000
    assert len(result.completions) == 2000


def test_the_caller_can_work_meanwhile_and_cancel() -> None:
    release = threading.Event()
    with StubServer(lambda n, body: group(body) if release.wait(30) else None) as stub:
        pool = RequestPool([VllmClient(stub.url)], SAMPLING, 1, QUICK)
        first, second = pool.submit(wanted(prompts(3)), 2, 0), pool.submit(wanted(prompts(3, first=3)), 2, 0)
        assert not first.done()
        first.cancel()
        release.set()
        assert [c.prompt.counter for c in second.result(10).completions] == [3, 3, 4, 4, 5, 5]
        assert first.cancelled()
        pool.close()
        pool.close()


def test_close_ends_what_is_in_flight() -> None:
    release = threading.Event()
    with StubServer(lambda n, body: group(body) if release.wait(30) else None) as stub:
        pool = RequestPool([VllmClient(stub.url)], SAMPLING, 1, QUICK)
        pending = pool.submit(wanted(prompts(3)), 2, 0)
        time.sleep(0.2)
        began = time.monotonic()
        pool.close()
        assert time.monotonic() - began < 2 and pending.cancelled()
        release.set()
    assert not [t for t in threading.enumerate() if t.name == "request-pool"]


def test_progress_is_shown_on_request(capfd: pytest.CaptureFixture[str]) -> None:
    with StubServer(lambda n, body: group(body)) as stub:
        pool = RequestPool([VllmClient(stub.url)], SAMPLING, 1, QUICK)
        pool.generate(wanted(prompts(3)), 2, 0)
        assert capfd.readouterr().err == ""
        pool.generate(wanted(prompts(3)), 2, 0, progress=True)
        assert "rollouts" in capfd.readouterr().err
        pool.close()


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="clients must be at least one server, got none"):
        RequestPool([], SAMPLING, 1, QUICK)
    pool = RequestPool([nobody()], SAMPLING, 1, QUICK)
    for size in (0, 65):
        with pytest.raises(ValueError, match=f"group_size must be between 1 and --rl-vllm-max-num-seqs 64, got {size}"):
            pool.submit(wanted(prompts(1)), size, 0)
    assert pool.generate(wanted([]), 2, 0).completions == []
    pool.close()
