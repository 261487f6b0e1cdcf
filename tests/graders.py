"""Graders for the tests of the pool: what `response` says is what they do."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from typing import Any

NO_FUNCTION = 3


def obey(*, prompt: Any, response: str, answer: str, extra: dict[str, Any]) -> Any:
    order, _, what = response.partition(" ")
    match order:
        case "value":
            return float(what)
        case "equal":
            return float(what == answer)
        case "echo":
            return float(repr((prompt, answer, extra)) == what)
        case "none":
            return None
        case "text":
            return what
        case "raise":
            raise ZeroDivisionError(what)
        case "leave":
            sys.exit(3)
        case "die":
            os._exit(int(what))
        case "crash":
            ctypes.string_at(0)
        case "hang":
            time.sleep(600)
        case "compute":
            # a computation in C that never gives the interpreter back
            return 9 ** (9**9)
        case "eat":
            return float(len(bytearray(int(what) << 20)) > 0)
        case "print":
            print("a grader that prints")
            return 1.0
        case "pid":
            return float(os.getpid())
        case "child":
            return float(subprocess.Popen(["sleep", "600"]).pid)
        case "imported":
            return float(what in sys.modules)
        case "hash":
            return float(hash("x") % 2**32)
    raise ValueError(f"response must be an order, got {response!r}")


def few_arguments(response: str, answer: str) -> float:
    return 0.0


async def late(**item: Any) -> float:
    return 0.0
