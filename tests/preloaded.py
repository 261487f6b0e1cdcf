"""Runs of the entry script whose ranks are forked from a process that has imported everything.

Importing takes a rank longer than a short run does. The environment is torchrun's: its variables, one store, ranks that
end with their launcher, and the first one that fails ends all. What torchrun itself does is left to tests that use it.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from tests.launch import EXAMPLE, ROOT, environment
from tools.studying.fork import fork

# what a run imports after its start
LATER = (
    "jinja2",
    "matplotlib.pyplot",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.inference.contexts",
    "sentencepiece",
    "torch.utils.tensorboard",
    "tqdm",
    "transformers",
)


def preloaded(processes: int, *args: object, timeout: float = 300) -> str:
    """As `launch.torchrun` of the entry script; returns stdout and stderr together."""
    code, output = _server().run({"processes": processes, "args": list(map(str, args)), "timeout": timeout})
    if code != 0:
        raise AssertionError(f"exit code {code} of {processes} ranks of {EXAMPLE.name} {args}\n{output[-4000:]}")
    return output


def preloaded_failure(processes: int, *args: object, timeout: float = 300) -> str:
    """As `preloaded`, of a run that must fail."""
    code, output = _server().run({"processes": processes, "args": list(map(str, args)), "timeout": timeout})
    assert code != 0, output[-4000:]
    return output


class _Server:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded"],
            env=environment(), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        atexit.register(self.process.kill)

    def run(self, job: dict[str, Any]) -> tuple[int, str]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["code"], answer["output"]


@cache
def _server() -> _Server:
    return _Server()


def serve() -> None:
    sys.argv = [str(EXAMPLE)]
    runpy.run_path(str(EXAMPLE), run_name="preloaded")
    for name in LATER:
        __import__(name)
    for line in sys.stdin:
        job = json.loads(line)
        read, write = os.pipe()
        launcher = os.fork()
        if launcher == 0:
            os.close(read)
            _launch(job, write)
        os.close(write)
        with os.fdopen(read, errors="replace") as output:
            said = output.read()
        code = os.waitstatus_to_exitcode(os.waitpid(launcher, 0)[1])
        print(json.dumps({"code": code, "output": said}), flush=True)


def _launch(job: dict[str, Any], output: int) -> NoReturn:
    """In the launcher: a store, the ranks, and the end of all."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    world, deadline = job["processes"], time.monotonic() + job["timeout"]
    port, store = _store(world)
    ranks = [fork(lambda rank=rank: _rank(rank, world, port, job["args"])) for rank in range(world)]
    left, code = set(ranks), 0
    while left and code == 0:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            left.remove(pid)
            code = os.waitstatus_to_exitcode(status) and 1
        elif time.monotonic() > deadline:
            print(f"no end after {job['timeout']:g} s", flush=True)
            code = 1
        else:
            time.sleep(0.02)
    for pid in (*left, store):
        os.kill(pid, signal.SIGKILL)
    os._exit(code)


def _store(world: int) -> tuple[int, int]:
    """The port and the process of a store, in a process of its own: a launcher with threads could not fork."""
    from torch.distributed import TCPStore

    read, write = os.pipe()

    def hold() -> None:
        store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        os.close(write)
        signal.pause()

    process = fork(hold)
    os.close(write)
    return int(os.read(read, 16)), process


def _rank(rank: int, world: int, port: int, args: list[str]) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "GROUP_RANK": 0}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ |= {name: str(value) for name, value in (place | store | {"TORCHELASTIC_RUN_ID": "none"}).items()}
    sys.argv = [str(EXAMPLE), *args]
    runpy.run_path(str(EXAMPLE), run_name="__main__")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(EXAMPLE).parent))
    serve()
