"""ChildProcess: nothing that it started outlives it or us, and no shared memory stays behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_replay.engines import child_process
from megatron_replay.engines.child_process import ChildProcess, clean_environment, free_port, reserve_port
from tests.processes import gone, wait_for

pytestmark = pytest.mark.slow
SHARED_MEMORY = Path("/dev/shm")

# a tree as vLLM's: ignores SIGTERM, has a child of its own, an orphan in another session, and shared memory
STUBBORN_TREE = """
import os, signal, subprocess, sys, time
from multiprocessing import resource_tracker, shared_memory
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(15, 1); time.sleep(600)"])
middle = "import subprocess as s; print(s.Popen(['sleep', '600'], start_new_session=True, stdout=-3, stderr=-3).pid)"
orphan = int(subprocess.run([sys.executable, "-c", middle], capture_output=True, text=True).stdout)
segment = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(segment._name, "shared_memory")
time.sleep(float(sys.argv[1]) if len(sys.argv) > 1 else 0)
print("ready", os.getpid(), child.pid, orphan, segment.name, flush=True)
time.sleep(600)
"""


def tree(log: Path) -> tuple[list[int], Path]:
    """Process ids and segment of a stubborn tree, once it wrote them."""
    words = wait_for(lambda: [line.split() for line in log.read_text().splitlines() if line.startswith("ready")])
    *pids, segment = words[0][1:]
    assert (SHARED_MEMORY / segment).exists()
    return [int(pid) for pid in pids], SHARED_MEMORY / segment


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def start(log: Path) -> Iterator[Callable[..., ChildProcess]]:
    started: list[ChildProcess] = []

    def run(*command: str) -> ChildProcess:
        started.append(ChildProcess(command, clean_environment(), log))
        return started[-1]

    yield run
    for process in started:
        process.stop(0)


def test_output_and_exit_code_are_those_of_the_command(start: Callable[..., ChildProcess], log: Path) -> None:
    log.write_text("kept\n")
    process = start(sys.executable, "-c", "import sys; print('to stdout', sys.stdin.read()); sys.exit('to stderr')")
    wait_for(lambda: not process.alive())
    assert process.returncode == 1
    process.stop()
    process.stop()
    assert process.returncode == 1
    assert sorted(log.read_text().splitlines()) == ["kept", "to stderr", "to stdout "]
    assert process.log_tail(1) in ("to stderr", "to stdout ")


def test_pid_is_the_command_in_a_session_of_its_own(start: Callable[..., ChildProcess]) -> None:
    process = start("sleep", "600")
    assert psutil.Process(process.pid).cmdline() == ["sleep", "600"]
    assert process.alive() and process.returncode is None
    assert os.getsid(process.pid) == process.pid
    process.stop()
    assert process.returncode == -signal.SIGTERM
    assert gone([process.pid])


@pytest.mark.parametrize(
    ("command", "kind", "words"),
    [
        ("no-such-program", FileNotFoundError, r"'no-such-program' did not start: .*No such file"),
        ("/etc/passwd", PermissionError, r"'/etc/passwd' did not start: .*Permission denied"),
    ],
)
def test_a_command_that_does_not_start_is_named(
    start: Callable[..., ChildProcess], command: str, kind: type[OSError], words: str
) -> None:
    with pytest.raises(kind, match=words):
        start(command)


def test_the_guardian_does_not_import_torch(start: Callable[..., ChildProcess]) -> None:
    process = start("sleep", "600")
    guardian = psutil.Process(process.pid).parent()
    assert guardian is not None and str(child_process.GUARDIAN) in guardian.cmdline()
    assert not [m.path for m in guardian.memory_maps() if "torch" in m.path]


def test_stop_ends_a_tree_that_ignores_sigterm_and_frees_its_shared_memory(
    start: Callable[..., ChildProcess], log: Path
) -> None:
    process = start(sys.executable, "-c", STUBBORN_TREE)
    pids, segment = tree(log)
    assert process.pid == pids[0]
    began = time.monotonic()
    process.stop(timeout=0.5)
    assert 0.4 < time.monotonic() - began < 5
    assert process.returncode == -signal.SIGKILL
    assert gone(pids)
    assert not segment.exists()
    assert f"freed {segment}" in log.read_text()


def test_what_a_crashed_command_leaves_is_ended_and_freed(start: Callable[..., ChildProcess], log: Path) -> None:
    process = start(sys.executable, "-c", STUBBORN_TREE, "0.5")
    pids, segment = tree(log)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.alive())
    assert process.returncode == -signal.SIGKILL
    wait_for(lambda: gone(pids) and not segment.exists())


# the module by itself: the package would take seconds to import
PARENT = """
import os, sys, time
sys.path.insert(0, sys.argv[4])
from child_process import ChildProcess, clean_environment
process = ChildProcess([sys.executable, "-c", sys.argv[2]], clean_environment(), sys.argv[1])
if sys.argv[3] == "fork" and os.fork() == 0:
    time.sleep(20)
    os._exit(0)
if sys.argv[3] != "exit":
    time.sleep(600)
while b"ready" not in open(sys.argv[1], "rb").read():
    time.sleep(0.02)
"""


@pytest.mark.parametrize("how", ["kill", "fork", "exit", "guardian-sigterm"])
def test_the_tree_ends_with_its_parent(how: str, log: Path) -> None:
    """Killed, killed while a forked child of it holds the pipe, at its own end; and where only the guardian is told."""
    folder = str(Path(child_process.__file__).parent)
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(log), STUBBORN_TREE, how, folder])
    try:
        wait_for(log.exists)
        pids, segment = tree(log)
        guardian = psutil.Process(pids[0]).ppid() if how != "exit" else 0
        if how == "guardian-sigterm":
            os.kill(guardian, signal.SIGTERM)
        elif how != "exit":
            parent.kill()
        wait_for(lambda: gone([*pids, guardian] if guardian else pids), 10)
        wait_for(lambda: not segment.exists())
    finally:
        parent.kill()
        parent.wait()


def test_a_killed_guardian_takes_the_command_along(start: Callable[..., ChildProcess]) -> None:
    process = start("sleep", "600")
    os.kill(psutil.Process(process.pid).ppid(), signal.SIGKILL)
    wait_for(lambda: gone([process.pid]) and not process.alive())
    assert process.returncode == -signal.SIGKILL


USES_SEGMENT = """
import mmap, sys, time
for name in sys.argv[1:]:
    f = open(name, "r+b")
    globals()[name] = mmap.mmap(f.fileno(), 0)
    f.close()
print("ready", flush=True)
time.sleep(600)
"""


def test_segments_of_others_are_left_alone(start: Callable[..., ChildProcess], log: Path, tmp_path: Path) -> None:
    """One that was there first, one in a folder, and one that a living process outside the tree uses."""
    before, folder = SHARED_MEMORY / f"before-{os.getpid()}", SHARED_MEMORY / f"folder-{os.getpid()}"
    shared, alone = SHARED_MEMORY / f"shared-{os.getpid()}", SHARED_MEMORY / f"alone-{os.getpid()}"
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.02)\n"
    outsider = None
    try:
        before.write_bytes(b"x" * 4096)
        names = [str(before), str(folder / "weights"), str(shared), str(alone)]
        process = start(sys.executable, "-c", waits + USES_SEGMENT, *names)
        folder.mkdir()
        for path in (folder / "weights", shared, alone):
            path.write_bytes(b"x" * 4096)
        go.touch()
        outsider = subprocess.Popen([sys.executable, "-c", USES_SEGMENT, str(shared)], stdout=subprocess.PIPE)
        assert outsider.stdout is not None and outsider.stdout.readline() == b"ready\n"
        wait_for(lambda: "ready" in log.read_text())
        process.stop()
        assert before.exists() and (folder / "weights").exists() and shared.exists()
        assert not alone.exists()
    finally:
        if outsider is not None:
            outsider.kill()
            outsider.communicate()
        for path in (before, folder / "weights", shared, alone):
            path.unlink(missing_ok=True)
        if folder.exists():
            folder.rmdir()


def test_clean_environment_has_nothing_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": "p", "OMP_NUM_THREADS": "3", "RANKING": "kept"})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        os.environ[name] = "1"
    for name in ("ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        os.environ[name] = "1"
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ASYNC_ERROR_HANDLING"):
        os.environ[name] = "1"
    assert clean_environment(MORE="m") == {"PATH": "p", "OMP_NUM_THREADS": "3", "RANKING": "kept", "MORE": "m"}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "::1"])
def test_a_reserved_port_is_given_to_nobody_and_can_be_served(host: str) -> None:
    with reserve_port(host) as reserved:
        port = reserved.getsockname()[1]
        with socket.socket(reserved.family) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((host, port))
            server.listen()
            with socket.create_connection(("localhost" if host == "0.0.0.0" else host, port)):
                server.accept()[0].close()
        with socket.socket(reserved.family) as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((host, port))


def test_free_ports_are_free() -> None:
    ports = [free_port("127.0.0.1") for _ in range(20)]
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))


def test_the_guardian_holds_what_is_reserved_until_the_end(log: Path) -> None:
    with reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
        process = ChildProcess(["sleep", "600"], clean_environment(), log, [reserved])
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))
    process.stop()
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
