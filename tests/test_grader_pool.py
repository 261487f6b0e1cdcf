"""Grader processes that hang, crash, eat memory or are orphaned; what the pool makes of it, and what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_replay.tasks.grader_pool import Grade, GraderOptions, GraderPool
from tests.processes import alive, gone, wait_for

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 3.0
WORKERS = 2


def options(reward: str = "tests.graders:obey", **more: Any) -> GraderOptions:
    return GraderOptions(reward, **{"workers": WORKERS, "timeout": TIMEOUT, "memory_mib": 512} | more)


@pytest.fixture(scope="module")
def pool() -> Iterator[GraderPool]:
    with GraderPool(options(), os.environ) as pool:
        yield pool


def item(response: str, answer: str = "a") -> dict[str, Any]:
    return {"prompt": "p", "response": response, "answer": answer, "extra": {}}


def grades(pool: GraderPool, *responses: str) -> list[Grade]:
    return pool.grade([item(r) for r in responses])


def test_values_come_back_in_order(pool: GraderPool) -> None:
    assert [g.value for g in grades(pool, *(f"value {i}" for i in range(50)))] == list(range(50))
    assert grades(pool, "none", "value -2.5", "equal a") == [Grade(None), Grade(-2.5), Grade(1.0)]
    assert pool.grade([]) == []


def test_all_fields_arrive_as_they_are(pool: GraderPool) -> None:
    for prompt in ("é\ud800\x00", [{"role": "user", "content": "x" * 200_000}]):
        sent = {"prompt": prompt, "answer": "\n", "extra": {"a": [1, None, 2.5], "b": {"c": "d"}}}
        seen = repr((sent["prompt"], sent["answer"], sent["extra"]))
        assert pool.grade([sent | {"response": f"echo {seen}"}]) == [Grade(1.0)]


def test_a_hanging_grader_is_killed_and_the_others_are_judged(pool: GraderPool) -> None:
    before = {g.value for g in grades(pool, *["pid"] * 8)}
    began = time.monotonic()
    found = grades(pool, "value 1", "hang", "value 2", "compute", "value 3")
    assert [g.value for g in found] == [1, None, 2, None, 3]
    assert [g.failure for g in found] == ["", "timeout", "", "timeout", ""]
    assert found[1].words == "no grade within 3 s" and found[1].restarted and found[3].restarted
    assert time.monotonic() - began >= TIMEOUT
    after = {g.value for g in grades(pool, *["pid"] * 8)}
    assert len(before - after) == len(before)
    assert None not in before
    wait_for(lambda: gone(pid for pid in before if pid is not None))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("die 7", "the grader died, with exit code 7"),
        ("die 0", "the grader died, with exit code 0"),
        ("crash", "the grader died, by SIGSEGV"),
    ],
)
def test_a_grader_that_dies_is_replaced(pool: GraderPool, order: str, words: str) -> None:
    found = grades(pool, order, "value 1", "value 2", "value 3")
    assert found[0] == Grade(None, "error", words, restarted=True)
    assert [g.value for g in found[1:]] == [1, 2, 3]


def test_a_grader_that_wants_too_much_memory_gets_an_error(pool: GraderPool) -> None:
    found = grades(pool, "eat 64", "eat 4096", "value 1")
    assert (found[0].value, found[2].value) == (1.0, 1.0)
    assert found[1] == Grade(None, "error", "MemoryError")


def test_an_error_is_no_grade_and_the_process_stays(pool: GraderPool) -> None:
    found = grades(pool, "raise ouch", "leave", "nonsense")
    assert found[0] == Grade(None, "error", "ZeroDivisionError: ouch")
    assert found[1] == Grade(None, "error", "SystemExit: 3")
    assert found[2] == Grade(None, "error", "ValueError: response must be an order, got 'nonsense'")


@pytest.mark.parametrize(
    ("order", "words"), [("value nan", "float nan"), ("value inf", "float inf"), ("text 1", "str")]
)
def test_what_is_no_finite_number_is_named(pool: GraderPool, order: str, words: str) -> None:
    assert grades(pool, order) == [Grade(None, "bad", words)]


def test_threads_share_a_pool(pool: GraderPool) -> None:
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: grades(pool, f"value {i}", "hang" if i == 2 else "none"), range(6)))
    assert [f[0].value for f in found] == list(range(6))
    assert [f[1].failure for f in found] == ["", "", "timeout", "", "", ""]


def test_a_grader_inherits_neither_torch_nor_our_output(pool: GraderPool, capfd: pytest.CaptureFixture[str]) -> None:
    assert [g.value for g in grades(pool, "imported torch", "imported megatron_replay", "imported json")] == [0, 0, 1]
    assert grades(pool, "print") == [Grade(1.0)]
    assert len({g.value for g in grades(pool, *["hash"] * 8)}) == 1


def test_what_a_hung_grader_started_ends_with_it(pool: GraderPool) -> None:
    with GraderPool(options(workers=1), os.environ) as alone:
        (child,) = grades(alone, "child")
        assert child.value is not None and alive(child.value)
        grades(alone, "die 1")
        wait_for(lambda: gone([child.value]))


def test_close_leaves_no_process() -> None:
    alone = GraderPool(options(), os.environ)
    pids = {g.value for g in grades(alone, *["pid"] * 8)}
    alone.close()
    alone.close()
    assert not any(alive(pid) for pid in pids if pid is not None)
    with pytest.raises(RuntimeError, match="^the grader pool is closed"):
        grades(alone, "none")


def test_a_trainer_that_is_killed_leaves_no_grader() -> None:
    """Neither one that waits, nor one that sleeps, nor one whose interpreter is held by a computation."""
    code = """
import os, threading
from tests.test_grader_pool import GraderPool, grades, options
pools = [GraderPool(options(workers=1, timeout=300), os.environ) for _ in range(3)]
print(*(int(grades(pool, "pid")[0].value) for pool in pools), flush=True)
for pool, order in zip(pools, ("none", "hang", "compute")):
    threading.Thread(target=grades, args=(pool, order)).start()
"""
    trainer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert trainer.stdout is not None
    with trainer.stdout:
        graders = [int(pid) for pid in trainer.stdout.readline().split()]
    time.sleep(0.5)
    assert len(graders) == 3 and all(map(alive, graders))
    trainer.send_signal(signal.SIGKILL)
    trainer.wait()
    wait_for(lambda: gone(graders))


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("tests.no_such:f", "cannot be used: ModuleNotFoundError: No module named 'tests.no_such'"),
        ("tests.graders:no_such", "cannot be used: ValueError: tests.graders must define a function no_such, got None"),
        ("tests.graders:NO_FUNCTION", "must define a function NO_FUNCTION, got int"),
        ("tests.graders:few_arguments", r"must take (prompt=, response=, answer=, extra=), got (response: 'str', "),
        ("tests.graders:late", "tests.graders:late must return a number, got an async function"),
        ("no/such.py:f", "cannot be used: FileNotFoundError"),
    ],
)
def test_a_grader_that_cannot_be_called_is_named_at_the_start(reward: str, words: str) -> None:
    with pytest.raises(ValueError) as error:
        GraderPool(options(reward), os.environ)
    assert str(error.value).startswith(f"--rl-reward {reward} cannot be used: ") and words in str(error.value)


def test_a_grader_file_that_fails_or_dies_while_it_is_imported(tmp_path: Path) -> None:
    broken, deadly = tmp_path / "broken.py", tmp_path / "deadly.py"
    broken.write_text("1 / 0")
    deadly.write_text("import os\nos._exit(5)")
    with pytest.raises(ValueError, match=f"^--rl-reward {broken}:f cannot be used: ZeroDivisionError"):
        GraderPool(options(f"{broken}:f"), os.environ)
    with pytest.raises(RuntimeError, match=f"^--rl-reward {deadly}:f: a grader died at its start, with exit code 5"):
        GraderPool(options(f"{deadly}:f"), os.environ)


def test_a_grader_that_cannot_start_again_is_an_error_not_a_missing_grade(tmp_path: Path) -> None:
    once = tmp_path / "once.py"
    once.write_text(
        "import os, pathlib\n"
        f"mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "assert not mark.exists()\n"
        "def f(**item):\n    mark.touch()\n    os._exit(1)\n"
    )
    with GraderPool(options(f"{once}:f", workers=1), os.environ) as alone:
        assert grades(alone, "x")[0].failure == "error"
        with pytest.raises(ValueError, match=f"^--rl-reward {once}:f cannot be used: AssertionError"):
            grades(alone, "x")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"reward": "math"}, "^reward must be exact, math-verify or MODULE:FUNCTION, got 'math'"),
        ({"reward": ":f"}, "^reward must be"),
        ({"workers": 0}, "^workers must be at least 1, got 0"),
        ({"timeout": 0.0}, "^timeout must be a positive number of seconds, got 0.0"),
        ({"timeout": float("nan")}, "^timeout must be a positive number of seconds, got nan"),
        ({"memory_mib": 64}, "^memory_mib must be at least 128, got 64"),
    ],
)
def test_bad_options(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GraderOptions(**bad)
