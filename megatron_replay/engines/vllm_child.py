"""A vLLM `LLM()` in a process of its own, and the two ends of the line to it.

Inside a torchrun rank `LLM()` hangs on the launcher's environment, and would share its allocator and signal handlers
with the trainer; a process of its own has neither, and what it does wrong ends with it. Run as a module this file is
that process: it connects back to the trainer and answers one call after another.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from megatron_replay.engines.child_process import ChildProcess
from megatron_replay.engines.group_request import RawSample
from megatron_replay.engines.vllm_client import EngineError
from megatron_replay.engines.vllm_command import engine_environment

KEY_VARIABLE = "MEGATRON_REPLAY_CHILD_KEY"
LOG_LINES = 20
POLL = 0.25  # seconds
HELLO = 10.0  # seconds that whoever connects has to show the key


class LlmEngine:
    """EngineControl over an LLM() in this process."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self.name = "vLLM in this process"
        self._llm, self._params = LLM(**options), SamplingParams

    def world_size(self) -> int:
        size: int = self._llm.get_world_size()
        return size

    def pause(self) -> None:
        """Nothing runs between two calls."""

    def resume(self) -> None:
        """See `pause`."""

    def init_weight_transfer(self, info: Mapping[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": dict(info)})

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, info: Mapping[str, Any]) -> None:
        self._llm.update_weights({"update_info": dict(info)})

    def finish_weight_update(self, version: int | None) -> None:
        self._llm.finish_weight_update(None if version is None else str(version))

    def transfer_status(self) -> list[dict[str, Any]]:
        status: list[dict[str, Any]] = self._llm.collective_rpc("transfer_status")
        return status

    def weight_version(self) -> int | None:
        said = self._llm.get_weight_version()
        return int(said) if said.isdigit() else None

    def reset_prefix_cache(self) -> bool:
        return bool(self._llm.reset_prefix_cache())

    def sleep(self) -> None:
        """Give the device's memory back: weights and key-value cache are dropped."""
        self._llm.sleep(level=2)

    def wake_up(self, part: str) -> None:
        """Take memory again: `weights`, and when they are there `kv_cache`."""
        self._llm.wake_up(tags=[part])

    def generate(self, prompts: Sequence[Sequence[int]], params: Sequence[Mapping[str, Any]]) -> list[list[RawSample]]:
        """The samples of each prompt (token ids), under its own SamplingParams."""
        asked = [{"prompt_token_ids": list(tokens)} for tokens in prompts]
        done = self._llm.generate(asked, [self._params(**p) for p in params], use_tqdm=False)
        return [[_sample(o) for o in sorted(request.outputs, key=lambda o: o.index)] for request in done]


class VllmChild:
    """EngineControl over an `LlmEngine` in a process of its own, which lives no longer than this one.

    Each method of LlmEngine is one here, with the same arguments; it runs in the child. One that fails raises
    EngineError; one that is not taken, or not answered, within `timeout` seconds ends the child, since nothing tells
    what it would still do. `options` are those of vLLM's LLM(), `python` an interpreter that has vLLM ("": this one).
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        log_path: str | os.PathLike[str],
        *,
        timeout: float,
        startup_timeout: float,
        python: str = "",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout = timeout
        key = secrets.token_hex(16)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            interpreter = python or sys.executable
            command = [interpreter, "-m", "megatron_replay.engines.vllm_child", str(port), json.dumps(dict(options))]
            # the engine in the child's own process, not in one more
            own = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", KEY_VARIABLE: key}
            variables = engine_environment(options.get("tensor_parallel_size", 1), **own, **(env or {}))
            self._process = ChildProcess(command, variables, log_path)
            self.name = f"the vLLM process {self._process.pid}"
            try:
                self._line = self._meet(server, key, startup_timeout)
                self._answer("start", startup_timeout)
            except BaseException:
                self._process.stop()
                raise

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or not hasattr(LlmEngine, method):
            raise AttributeError(method)
        return partial(self.call, method)

    def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """`LlmEngine.method(*args)` in the child; `timeout` seconds instead of the usual ones."""
        seconds = self.timeout if timeout is None else timeout
        _limit(self._line, seconds)
        try:
            self._line.send((method, args))
        except BlockingIOError as error:
            raise self._late(method, seconds) from error
        except OSError as error:
            raise self._dead(method) from error
        return self._answer(method, seconds)

    def alive(self) -> bool:
        return self._process.alive()

    def close(self) -> None:
        self._line.close()
        self._process.stop()

    def _meet(self, server: socket.socket, key: str, timeout: float) -> Connection:
        """The child's connection, once it has shown the key. Whoever else connects is hung up on."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self._process.alive():
                raise self._dead("start")
            if not select.select([server], [], [], POLL)[0]:
                continue
            line = Connection(server.accept()[0].detach())
            _limit(line, HELLO)
            # a stranger may say nothing, too much, or leave
            with contextlib.suppress(EOFError, OSError):
                if secrets.compare_digest(line.recv_bytes(len(key)), key.encode()):
                    return line
            line.close()
        raise self._late("start", timeout)

    def _answer(self, method: str, timeout: float) -> Any:
        try:
            if not self._line.poll(timeout):
                raise self._late(method, timeout)
            # what has begun to come may stop half-way
            _limit(self._line, timeout)
            good, value = self._line.recv()
        except BlockingIOError as error:
            raise self._late(method, timeout) from error
        except (EOFError, OSError) as error:
            raise self._dead(method) from error
        if not good:
            raise EngineError("answer", self.name, method, value)
        return value

    def _late(self, method: str, timeout: float) -> EngineError:
        """Ends the child."""
        self._process.stop()
        limit = f"--rl-vllm-startup-timeout {timeout:g}" if method == "start" else f"{timeout:g}"
        return EngineError("timeout", self.name, method, f"no answer within {limit} s, the process was ended")

    def _dead(self, method: str) -> EngineError:
        log = self._process.log_tail(LOG_LINES)
        words = f"the process ended (exit code {self._process.returncode}); the end of {self._process.log_path}:\n{log}"
        return EngineError("unreachable", self.name, method, words)


def _limit(line: Connection, seconds: float) -> None:
    """From now on a read or a write on `line` that gets nowhere for so long raises BlockingIOError."""
    whole = int(seconds)
    with socket.socket(fileno=os.dup(line.fileno())) as same:
        for way in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            # a struct timeval; all 0 would be no limit
            same.setsockopt(socket.SOL_SOCKET, way, struct.pack("@ll", whole, int((seconds - whole) * 1e6) or 1))


def _sample(output: Any) -> RawSample:
    logprobs = output.logprobs or [{}] * len(output.token_ids)
    found = [entry.get(token) for entry, token in zip(logprobs, output.token_ids, strict=True)]
    return RawSample(
        tokens=tuple(output.token_ids),
        logprobs=tuple(None if f is None else f.logprob for f in found),
        finish_reason=output.finish_reason,
        weight_versions=tuple(span.version for span in output.weight_versions or ()),
    )


def serve(port: int, options: Mapping[str, Any]) -> None:
    """The child: calls on an LlmEngine until the trainer hangs up."""
    line = Connection(socket.create_connection(("127.0.0.1", port)).detach())
    line.send_bytes(os.environ.pop(KEY_VARIABLE).encode())
    try:
        engine = LlmEngine(options)
    except Exception as error:
        line.send((False, f"{type(error).__name__}: {error}"))
        raise
    line.send((True, None))
    while True:
        try:
            method, args = line.recv()
        except EOFError:
            return
        try:
            line.send((True, getattr(engine, method)(*args)))
        except Exception as error:
            line.send((False, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
