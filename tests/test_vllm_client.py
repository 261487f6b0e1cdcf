"""VllmClient against a real server, and against answers that a real one cannot be made to give."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_replay.engines.child_process import free_port
from megatron_replay.engines.group_request import RawSample
from megatron_replay.engines.vllm_client import EngineError, VllmClient
from tests.stub_server import Reply, StubServer, choice
from tests.vllm_models import EOS_ID, SharedServer, shared_server

pytestmark = pytest.mark.slow
PROMPT = [20, 21, 22, 23, 24]


@pytest.fixture
def server() -> SharedServer:
    return shared_server()


def generate(client: VllmClient, timeout: float = 60, prompt: list[int] = PROMPT, **params: Any) -> list[RawSample]:
    async def ask() -> list[RawSample]:
        async with client.async_http() as http:
            return await client.generate(http, prompt, {"logprobs": 0, **params}, timeout)

    return asyncio.run(ask())


def reference(server: SharedServer, sample: RawSample, temperature: float) -> torch.Tensor:
    """log_softmax(logits / T) of the sampled tokens, by transformers."""
    with torch.no_grad():
        logits = server.model(torch.tensor([[*PROMPT, *sample.tokens]])).logits[0, len(PROMPT) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(1, torch.tensor(sample.tokens)[:, None])[:, 0]


def test_control_calls(server: SharedServer) -> None:
    client = server.client
    assert client.version() == "0.32.0"
    assert client.healthy()
    assert client.world_size() == 1
    assert client.reset_prefix_cache() is True
    server.set_version("default")
    assert client.weight_version() is None
    server.set_version(41)
    assert client.weight_version() == 41
    server.set_version("v1")
    with pytest.raises(EngineError, match=r"http://127.*: GET /weight_info: weight_version must be a number, got 'v1'"):
        client.weight_version()


def test_pause_holds_requests_until_resume(server: SharedServer) -> None:
    assert not server.client.is_paused()
    server.client.pause()
    try:
        assert server.client.is_paused()
        with pytest.raises(EngineError, match=r"POST /inference/v1/generate: no answer within 1 s") as caught:
            generate(server.client, timeout=1, max_tokens=2)
        assert caught.value.kind == "timeout"
    finally:
        server.client.resume()
    assert not server.client.is_paused()
    assert len(generate(server.client, max_tokens=2)[0].tokens) == 2


def test_the_prefix_cache_is_not_reset_while_requests_run(server: SharedServer) -> None:
    """Requests follow each other until a reset has met one: a single one can run between two resets."""
    refused = threading.Event()
    deadline = time.monotonic() + 60

    def ask() -> None:
        while not refused.is_set() and time.monotonic() < deadline:
            generate(server.client, n=64, max_tokens=60, ignore_eos=True)

    asking = threading.Thread(target=ask)
    asking.start()
    while asking.is_alive():
        if not server.client.reset_prefix_cache():
            refused.set()
    assert refused.is_set()
    assert server.client.reset_prefix_cache()


def test_without_the_key_only_health_is_open(server: SharedServer) -> None:
    for key in (None, "another key"):
        stranger = VllmClient(server.client.url, key)
        assert stranger.healthy()
        for call in (stranger.pause, stranger.version, stranger.is_paused, stranger.start_weight_update):
            with pytest.raises(EngineError, match="status 401 Unauthorized: .*VLLM_API_KEY") as caught:
                call()
            assert caught.value.status == 401
        with pytest.raises(EngineError, match="POST /inference/v1/generate: status 401"):
            generate(stranger, max_tokens=1)
    assert not server.client.is_paused()


def test_an_error_has_the_servers_own_words(server: SharedServer) -> None:
    client = server.client
    with pytest.raises(EngineError, match=r"status 400 .*max_num_seqs \(64\), got 65") as caught:
        generate(client, n=65)
    assert (caught.value.kind, caught.value.status) == ("status", 400)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_sampling_distribution(server: SharedServer, temperature: float) -> None:
    server.set_version(5)
    params = {"n": 8, "temperature": temperature, "max_tokens": 40, "seed": 11, "ignore_eos": True}
    samples = generate(server.client, **params)
    assert len({s.tokens for s in samples}) == 8
    for sample in samples:
        assert len(sample.tokens) == len(sample.logprobs) == 40
        assert sample.finish_reason == "length" and sample.weight_versions == ("5",)
        said = torch.tensor([float(x) for x in sample.logprobs])
        torch.testing.assert_close(said, reference(server, sample, temperature), atol=1e-4, rtol=0)
        assert (said - reference(server, sample, 1.7 - temperature)).abs().max() > 0.05
    assert generate(server.client, **params) == samples


def test_the_one_stop_is_ours_and_is_kept(server: SharedServer) -> None:
    """The model's own end-of-sequence token, made likely, does not stop; ours does, and is in the answer."""
    bias = {str(EOS_ID): 8.0, "7": 8.0}
    params = {"n": 16, "temperature": 1.0, "max_tokens": 30, "seed": 3, "logit_bias": bias}
    samples = generate(server.client, **params, stop_token_ids=[7], ignore_eos=True, detokenize=False)
    assert any(EOS_ID in s.tokens for s in samples)
    stopped = [s for s in samples if s.finish_reason == "stop"]
    assert stopped and all(s.tokens.index(7) == len(s.tokens) - 1 for s in stopped)
    assert all(7 not in s.tokens and len(s.tokens) == 30 for s in samples if s.finish_reason == "length")


def answering(reply: Reply) -> StubServer:
    return StubServer(lambda number, body: reply)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('[{"token_id": 5, "logprob": NaN}, {"token_id": 6, "logprob": -0.5}]', (math.nan, -0.5)),
        ('[{"token_id": 5, "logprob": null}, null]', (None, None)),
        ('[{"token_id": 5, "logprob": -9999.0}, {"token_id": 6, "logprob": 0.0}]', (None, 0.0)),
        ('[{"token_id": 5, "logprob": -Infinity}, {"token_id": 6, "logprob": -9998.5}]', (None, -9998.5)),
        ("[]", (None, None)),
        ("null", (None, None)),
    ],
)
def test_a_logprob_that_is_not_there_is_never_invented(content: str, expected: tuple[float | None, ...]) -> None:
    text = json.dumps({"choices": [choice(0, [5, 6], logprobs={"content": "HERE"})]}).replace('"HERE"', content)
    with answering((200, text)) as stub:
        [sample] = generate(VllmClient(stub.url))
    assert sample.tokens == (5, 6)
    assert str(sample.logprobs) == str(expected)


def test_samples_come_in_the_order_of_their_index() -> None:
    mixed = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 2}]
    choices = [choice(2, [7]), choice(0, [5, 5], weight_versions=mixed), choice(1, [], logprobs=None)]
    with answering((200, json.dumps({"choices": choices}))) as stub:
        samples = generate(VllmClient(stub.url + "/"))
    assert [s.tokens for s in samples] == [(5, 5), (), (7,)]
    assert [s.weight_versions for s in samples] == [("1", "2"), ("0",), ("0",)]


@pytest.mark.parametrize(
    ("reply", "kind", "words"),
    [
        ((200, "<html>no\nJSON"), "answer", r"no JSON in <html>no JSON$"),
        ((200, "[]"), "answer", r"no samples in \[\]"),
        ((200, '{"choices": [{"index": 0}]}'), "answer", r"no samples in .*KeyError\('token_ids'\)"),
        ((200, json.dumps({"choices": [choice(0, [5], logprobs={"content": [{"token_id": 6, "logprob": -1}]})]})),
         "answer", r"logprobs must be those of the tokens, got one of 6 for 5"),
        ((200, json.dumps({"choices": [choice(0, [5], logprobs={"content": [None, None]})]})), "answer", r"no samples"),
        ((503, "x" * 2000), "status", r"status 503 Service Unavailable: x{500} \.\.\.$"),
        (None, "lost", r"the connection broke \(RemoteProtocolError"),
    ],
)  # fmt: skip
def test_garbage_is_named(reply: Reply, kind: str, words: str) -> None:
    with answering(reply) as stub, pytest.raises(EngineError, match=words) as caught:
        generate(VllmClient(stub.url))
    assert caught.value.kind == kind
    assert str(caught.value).startswith(f"{stub.url}: POST /inference/v1/generate: ")


@pytest.mark.parametrize(
    ("call", "body", "words"),
    [
        (VllmClient.version, '{"vllm": "1"}', r"GET /version: version must be str, got \{'vllm': '1'\}"),
        (VllmClient.world_size, "[2]", r"GET /get_world_size: world_size must be int, got \[2\]"),
        (VllmClient.reset_prefix_cache, '{"success": 1}', r"success must be bool"),
        (VllmClient.resume, "done", r"POST /resume: no JSON in done"),
    ],
)
def test_a_control_answer_of_another_form_is_named(call: Callable[[VllmClient], Any], body: str, words: str) -> None:
    with answering((200, body)) as stub, pytest.raises(EngineError, match=words):
        call(VllmClient(stub.url))


def test_what_control_calls_send() -> None:
    with answering((200, "{}")) as stub:
        client = VllmClient(stub.url)
        client.init_weight_transfer({"a": 1})
        client.update_weights({"b": 2})
        client.finish_weight_update(12)
    assert stub.bodies == [{"init_info": {"a": 1}}, {"update_info": {"b": 2}}, {"weight_version": "12"}]


def test_nobody_there_and_nobody_answering() -> None:
    nobody = VllmClient(f"http://127.0.0.1:{free_port('127.0.0.1')}", timeout=5)
    assert not nobody.healthy()
    with pytest.raises(EngineError, match=r"GET /version: no connection \(ConnectError") as caught:
        nobody.version()
    assert caught.value.kind == "unreachable"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = VllmClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.3)
        began = time.monotonic()
        assert not mute.healthy()
        with pytest.raises(EngineError, match=r"POST /resume: no answer within 0.3 s") as caught:
            mute.resume()
        assert caught.value.kind == "timeout" and time.monotonic() - began < 3


def test_proxies_of_the_environment_have_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with answering((200, '{"version": "0.32.0"}')) as stub:
        assert VllmClient(stub.url).version() == "0.32.0"
