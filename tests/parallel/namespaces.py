"""Nodes of a network on one machine: each has network, host name and process numbers of its own.

A cable leads from each node to a switch. What holds a node is its first process: with it all its processes end, and
it ends with the one that made it, in whatever way, so no test leaves a node behind, not even one that is killed.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
INTERFACE = "cable"
PORT = "port"  # of the switch, with the node's number
# with --mount-proc a node sees its own processes alone
HOLD = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
SET_UP = "ip link set lo up && mount -t tmpfs shm /dev/shm"
_libc = ctypes.CDLL(None, use_errno=True)


class Node:
    """Network, host name, processes and shared memory of its own, on this machine's files."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.holder = subprocess.Popen(
            [*HOLD, "sh", "-c", f"hostname {name} && {SET_UP} && exec sleep infinity"],
            preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
            stderr=subprocess.PIPE,
        )
        self.init = _child_that_sleeps(self.holder)

    def command(self, words: Sequence[str]) -> list[str]:
        """The words as they run inside, in the present folder."""
        inside = ["nsenter", "--target", str(self.init), "--net", "--uts", "--mount", "--pid", f"--wd={os.getcwd()}"]
        return [*inside, *words]

    def start(self, words: Sequence[str], env: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        with open(log, "wb") as sink:
            return subprocess.Popen(
                self.command(words),
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, *words: str) -> str:
        return subprocess.run(self.command(words), check=True, capture_output=True, text=True, timeout=30).stdout

    def vanish(self) -> None:
        """Every process inside ends at once, as if the power had gone; its network goes with it."""
        self.holder.kill()
        self.holder.wait()


class Network:
    """Nodes `address(0)`, `address(1)`, ... on a switch."""

    def __init__(self, nodes: int) -> None:
        self.nodes: list[Node] = []
        self.switch = Node("switch")
        self.switch.run("ip", "link", "add", "bridge", "type", "bridge")
        self.switch.run("ip", "link", "set", "bridge", "up")
        for number in range(nodes):
            self.nodes.append(self._join(number))

    @staticmethod
    def address(number: int) -> str:
        return f"10.77.0.{number + 1}"

    def replace(self, number: int) -> None:
        """A new node in the place of one that has vanished."""
        self.nodes[number] = self._join(number)

    def cable(self, number: int, state: str) -> None:
        """Pull the cable of a node out of the switch, or put it in again: state is down, or up."""
        self.switch.run("ip", "link", "set", f"{PORT}{number}", state)

    def close(self) -> None:
        for node in (*self.nodes, self.switch):
            node.vanish()

    def _join(self, number: int) -> Node:
        node = Node(f"node{number}")
        far = ["peer", "name", INTERFACE, "netns", str(node.init)]
        port = f"{PORT}{number}"
        # the far end of a node that has vanished takes its port along, in a moment
        subprocess.run(self.switch.command(["ip", "link", "del", port]), capture_output=True, timeout=30)
        # numbers of processes are those outside: the switch has its own /proc, so the call is made from outside
        _ip(self.switch, "link", "add", port, "type", "veth", *far)
        self.switch.run("ip", "link", "set", port, "master", "bridge", "up")
        node.run("ip", "address", "add", f"{self.address(number)}/24", "dev", INTERFACE)
        node.run("ip", "link", "set", INTERFACE, "up")
        return node


@contextmanager
def network(nodes: int) -> Iterator[Network]:
    """A network that is gone afterwards; the test is skipped, with the reason, where none can be made."""
    if missing := [x for x in ("unshare", "nsenter", "ip") if shutil.which(x) is None]:
        pytest.skip(f"network namespaces need the programs {', '.join(missing)}")
    probe = subprocess.run(
        [*HOLD, "ip", "link", "add", "x", "type", "veth"], capture_output=True, text=True, timeout=30
    )
    if probe.returncode != 0:
        pytest.skip(f"network namespaces cannot be made here: {probe.stderr.strip()}")
    made = Network(nodes)
    try:
        yield made
    finally:
        made.close()


def _ip(node: Node, *words: str) -> None:
    """`ip` in the node's network alone: it sees the processes of this machine."""
    subprocess.run(
        ["nsenter", "--target", str(node.init), "--net", "ip", *words], check=True, capture_output=True, timeout=30
    )


def _child_that_sleeps(holder: subprocess.Popen[bytes]) -> int:
    """The first process inside, by its number outside, once it is set up."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and holder.poll() is None:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep":
            return int(children[0])
        time.sleep(0.02)
    holder.kill()
    assert holder.stderr is not None
    raise RuntimeError(f"no namespace: {holder.stderr.read().decode().strip()}")
