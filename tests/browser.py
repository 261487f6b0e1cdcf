"""Browser: a page in a headless Chromium, driven over the DevTools protocol through a pipe.

`make browser` installs the Chromium; nothing else is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(os.environ.get("MEGATRON_REPLAY_BROWSER", ROOT / ".venv" / "browser"))
PROGRAM = FOLDER / "chromium"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)
# Chromium reads commands from descriptor 3 and answers on 4
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
# code and text of the keys that tests press
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowLeft": (37, ""), "ArrowRight": (39, ""), "Home": (36, "")}


def missing() -> str | None:
    """Why there is no browser, or None."""
    return None if PROGRAM.is_file() else f"no headless browser in {FOLDER}: run `make browser`"


class Browser:
    """One page. `problems` are uncaught errors, console messages and what the page's own policy refused; `requests` the
    addresses that it asked for."""

    def __init__(self, width: int = 1280, height: int = 900, seconds: float = 60.0) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.seconds = seconds
        self._buffer, self._number = b"", 0
        self._profile = tempfile.TemporaryDirectory(prefix="browser-")
        commands_in, self._commands = os.pipe()
        self._answers, answers_out = os.pipe()
        environment = {"LD_LIBRARY_PATH": str(FOLDER / "lib"), "FONTCONFIG_FILE": str(FOLDER / "fonts.conf")}
        environment["HOME"] = self._profile.name
        arguments = [*FLAGS, f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "about:blank"]
        # above the two that they become, so that neither is closed by the other's coming
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands_in, answers_out)]
        self._process = subprocess.Popen(
            [sys.executable, "-c", START, *map(str, ends), str(PROGRAM), *arguments],
            pass_fds=ends,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands_in, answers_out, *ends):
            os.close(end)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._commands)
        os.close(self._answers)
        self._process.kill()
        self._process.wait()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Raises RuntimeError for what the browser refuses, TimeoutError where it does not answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        for answer in self._messages():
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)
        raise AssertionError("unreachable")

    def _messages(self) -> Iterator[dict[str, Any]]:
        end = time.monotonic() + self.seconds
        while True:
            while b"\0" in self._buffer:
                first, self._buffer = self._buffer.split(b"\0", 1)
                yield json.loads(first)
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the browser did not answer within {self.seconds:g} s")
            part = os.read(self._answers, 1 << 20)
            if not part:
                raise RuntimeError(f"the browser ended with exit code {self._process.wait()}")
            self._buffer += part

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(json.dumps(about["args"]))
        elif method == "Log.entryAdded":
            self.problems.append(about["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])

    def open(self, page: Path) -> None:
        """Load a file and wait until it is there."""
        self.call("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + self.seconds
        while not self.evaluate("location.href != 'about:blank' && document.readyState == 'complete'"):
            if time.monotonic() > end:
                raise TimeoutError(f"{page} did not load within {self.seconds:g} s")
            time.sleep(0.02)

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def move_mouse(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    @contextmanager
    def media(self, *, scheme: str = "light", kind: str = "screen") -> Iterator[None]:
        """As a reader sees it who prefers a colour scheme, or who prints."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)
        yield
        self.call("Emulation.setEmulatedMedia", media="", features=[])

    def screenshot(self, *, whole: bool = False) -> bytes:
        """A PNG of what is in view, or of the whole page."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(answer["data"])

    def print_to_pdf(self) -> bytes:
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])
