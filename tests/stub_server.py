"""A plain HTTP server that answers as told: for what a real vLLM server cannot be made to do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType, TracebackType
from typing import Any

# (status, body), or None: close the connection without a word
Reply = tuple[int, str] | None


class StubServer:
    """`answer` gets the number of the request and its body, in a thread of that request; `pages` need none."""

    def __init__(
        self,
        answer: Callable[[int, dict[str, Any]], Reply],
        port: int = 0,
        pages: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.outstanding = 0
        self.most_outstanding = 0
        self.lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}")
                with stub.lock:
                    number = len(stub.bodies)
                    stub.bodies.append(body)
                    stub.outstanding += 1
                    stub.most_outstanding = max(stub.most_outstanding, stub.outstanding)
                try:
                    reply = (200, pages[self.path]) if self.path in pages else stub.answer(number, body)
                finally:
                    with stub.lock:
                        stub.outstanding -= 1
                if reply is None:
                    self.close_connection = True
                    return
                status, text = reply
                try:
                    self.send_response(status)
                    self.send_header("content-length", str(len(text.encode())))
                    self.end_headers()
                    self.wfile.write(text.encode())
                except (BrokenPipeError, ConnectionResetError):
                    # the client did not wait
                    self.close_connection = True

            do_GET = do_POST

            def log_message(self, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 2048

        self.http = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> StubServer:
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.http.shutdown()
        self.http.server_close()


def choice(index: int, tokens: list[int], version: str = "0", **changes: Any) -> dict[str, Any]:
    """One sample in vLLM's words."""
    content = [{"token_id": token, "logprob": -1.0} for token in tokens]
    spans = [{"version": version, "start": 0, "end": len(tokens)}]
    whole = {"index": index, "token_ids": tokens, "finish_reason": "stop", "weight_versions": spans}
    return whole | {"logprobs": {"content": content}} | changes


def group(body: dict[str, Any], version: str = "0") -> Reply:
    """A whole group for a request; each sample repeats the prompt."""
    n = body["sampling_params"]["n"]
    return 200, json.dumps({"choices": [choice(i, body["token_ids"], version) for i in range(n)]})
