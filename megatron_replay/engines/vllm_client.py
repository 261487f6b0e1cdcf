"""Client of one vLLM server: control calls, and token ids in and out. A server is a URL; vllm is not imported."""

from __future__ import annotations

import functools
import json
import math
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import httpx

from megatron_replay.engines.group_request import RawSample

# vLLM sends this floor in place of a log-prob that is NaN, -inf or missing
NO_LOGPROB = -9999.0
# the version of a server that was never given weights
DEFAULT_VERSION = "default"
HEALTH_TIMEOUT = 5.0  # seconds
CONNECT_TIMEOUT = 30.0
WORDS = 500  # characters of a server's answer that an error repeats
# A connection for each call: the server breaks idle ones after 5 s and those of a call that failed, and httpx looks at
# every pair of idle ones each time. Requests wait for their turn in the pool, never for a connection.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=0)

ErrorKind = Literal["unreachable", "lost", "timeout", "status", "answer"]


class EngineError(RuntimeError):
    """A server took no connection, broke it, was late, refused, or answered what no server should.

    `kind` says which; `status` is the HTTP status of a refusal. The message names the URL, the call and the server's
    own words.
    """

    def __init__(self, kind: ErrorKind, url: str, call: str, words: str, status: int | None = None) -> None:
        super().__init__(f"{url}: {call}: {words}")
        self.kind = kind
        self.status = status


T = TypeVar("T")


class VllmClient:
    """Calls of a server at `url`. `timeout` is that of each control call, in seconds.

    Every call raises EngineError. Proxies of the environment have no part: servers are named by their own address.
    """

    def __init__(self, url: str, api_key: str | None = None, timeout: float = 300.0) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.timeout = timeout
        self._http = httpx.Client(**self._options(timeout))

    @property
    def name(self) -> str:
        return self.url

    def close(self) -> None:
        self._http.close()

    def async_http(self) -> httpx.AsyncClient:
        """A connection pool for `generate`, with this server's key; the caller closes it."""
        return httpx.AsyncClient(**self._options(self.timeout))

    def version(self) -> str:
        """vLLM's own version."""
        return self._field("GET", "/version", "version", str)

    def healthy(self) -> bool:
        """Whether the server answers and its engine lives; False while it starts."""
        try:
            return self._http.get(self.url + "/health", timeout=min(self.timeout, HEALTH_TIMEOUT)).is_success
        except httpx.HTTPError:
            return False

    def world_size(self) -> int:
        """Workers of the server: tensor x pipeline x data parallel."""
        return self._field("GET", "/get_world_size", "world_size", int)

    def pause(self) -> None:
        """Stop scheduling. Requests in flight end with finish reason "abort"; later ones wait for `resume`."""
        self._call("POST", "/pause", params={"mode": "abort"})

    def resume(self) -> None:
        self._call("POST", "/resume")

    def is_paused(self) -> bool:
        return self._field("GET", "/is_paused", "is_paused", bool)

    def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        self._call("POST", "/init_weight_transfer_engine", body={"init_info": info})

    def start_weight_update(self) -> None:
        self._call("POST", "/start_weight_update")

    def update_weights(self, info: Mapping[str, Any]) -> None:
        self._call("POST", "/update_weights", body={"update_info": info})

    def finish_weight_update(self, version: int | None) -> None:
        """Finish, and label what is sampled from now on with `version`; None: give up, and label nothing."""
        body = None if version is None else {"weight_version": str(version)}
        self._call("POST", "/finish_weight_update", body=body)

    def transfer_status(self) -> list[dict[str, Any]]:
        """What each worker's last call to the transfer engine came to."""
        answer = self._call("POST", "/collective_rpc", body={"method": "transfer_status"})
        results: Any = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list):
            raise self._answer("POST /collective_rpc", f"no results in {_shortened(str(answer))}")
        return results

    def weight_version(self) -> int | None:
        """The last version finished, or None where no weights were ever pushed."""
        said = self._field("GET", "/weight_info", "weight_version", str)
        if said == DEFAULT_VERSION:
            return None
        try:
            return int(said)
        except ValueError:
            raise self._answer("GET /weight_info", f"weight_version must be a number, got {said!r}") from None

    def reset_prefix_cache(self) -> bool:
        """Whether the cache was emptied; False while requests hold parts of it."""
        return self._field("POST", "/reset_prefix_cache", "success", bool)

    async def generate(
        self, http: httpx.AsyncClient, prompt_tokens: Sequence[int], params: Mapping[str, Any], timeout: float
    ) -> list[RawSample]:
        """Samples of one prompt, in the order of their index. `params` are vLLM's SamplingParams; seconds of timeout.

        A log-prob that is absent or not finite comes back as None or NaN, never as a number of our own.
        """
        call = "POST /inference/v1/generate"
        body = {"token_ids": list(prompt_tokens), "sampling_params": dict(params)}
        try:
            reply = await http.post(self.url + "/inference/v1/generate", json=body, timeout=_timeout(timeout))
        except httpx.HTTPError as error:
            raise self._failed(call, error, timeout) from error
        answer = self._json(call, reply)
        try:
            choices = sorted(answer["choices"], key=lambda choice: choice["index"])
            return [_sample(choice) for choice in choices]
        except (KeyError, TypeError, ValueError) as error:
            raise self._answer(call, f"no samples in {_shortened(reply.text)} ({error!r})") from error

    def _options(self, timeout: float) -> dict[str, Any]:
        return {
            "headers": self.headers,
            "limits": CONNECTIONS,
            "timeout": _timeout(timeout),
            "trust_env": False,
            "verify": _tls(),
        }

    def _call(self, method: str, path: str, body: Any = None, params: Mapping[str, str] | None = None) -> Any:
        call = f"{method} {path}"
        try:
            reply = self._http.request(method, self.url + path, json=body, params=params)
        except httpx.HTTPError as error:
            raise self._failed(call, error, self.timeout) from error
        return self._json(call, reply)

    def _field(self, method: str, path: str, name: str, kind: type[T]) -> T:
        answer = self._call(method, path)
        value: T | None = answer.get(name) if isinstance(answer, dict) else None
        if type(value) is not kind:
            raise self._answer(f"{method} {path}", f"{name} must be {kind.__name__}, got {_shortened(str(answer))}")
        return value

    def _json(self, call: str, reply: httpx.Response) -> Any:
        if not reply.is_success:
            words = f"status {reply.status_code} {reply.reason_phrase}: {_shortened(reply.text)}"
            raise EngineError("status", self.url, call, words, reply.status_code)
        try:
            return json.loads(reply.content)
        except ValueError as error:
            raise self._answer(call, f"no JSON in {_shortened(reply.text)}") from error

    def _failed(self, call: str, error: httpx.HTTPError, timeout: float) -> EngineError:
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return EngineError("unreachable", self.url, call, f"no connection ({error!r})")
        if isinstance(error, httpx.TimeoutException):
            return EngineError("timeout", self.url, call, f"no answer within {timeout:g} s")
        return EngineError("lost", self.url, call, f"the connection broke ({error!r})")

    def _answer(self, call: str, words: str) -> EngineError:
        return EngineError("answer", self.url, call, words)


@functools.cache
def _tls() -> ssl.SSLContext:
    # made once: reading the certificates takes longer than a call
    return httpx.create_ssl_context(trust_env=False)


def _timeout(seconds: float) -> httpx.Timeout:
    return httpx.Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT))


def _sample(choice: Mapping[str, Any]) -> RawSample:
    tokens = tuple(int(token) for token in choice["token_ids"] or ())
    entries = (choice.get("logprobs") or {}).get("content") or [None] * len(tokens)
    return RawSample(
        tokens=tokens,
        logprobs=tuple(_logprob(entry, token) for entry, token in zip(entries, tokens, strict=True)),
        finish_reason=choice.get("finish_reason"),
        weight_versions=tuple(span["version"] for span in choice.get("weight_versions") or ()),
    )


def _logprob(entry: Mapping[str, Any] | None, token: int) -> float | None:
    if entry is None or (said := entry.get("logprob")) is None:
        return None
    if entry["token_id"] != token:
        raise ValueError(f"logprobs must be those of the tokens, got one of {entry['token_id']} for {token}")
    value = float(said)
    return value if math.isnan(value) or value > NO_LOGPROB else None


def _shortened(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WORDS else flat[:WORDS] + " ..."
