"""ASGI middleware of a vLLM server: every path needs the API key.

vLLM's own check guards /v1, /v2, /inference and /cohere; /pause, /update_weights and /collective_rpc would stay open.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = ("/health",)


class RequireApiKey:
    """Answers 401 to a request without `Authorization: Bearer <VLLM_API_KEY>`; without a key set, all may pass.

    The key is read once, when the server starts.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self._key = os.environ.get(KEY_VARIABLE, "").encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._key or self._allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            body = json.dumps({"error": f"Unauthorized: the key of {KEY_VARIABLE} is needed as a bearer token"})
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body.encode()})

    def _allowed(self, scope: Message) -> bool:
        if scope["path"] in OPEN_PATHS:
            return True
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key, self._key)
