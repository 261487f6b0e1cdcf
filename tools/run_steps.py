"""Run a list of steps one after the other and write what came of them into one JSON.

    run_steps.py OUT.json < STEPS

A line of STEPS is NAME SECONDS COMMAND, the seconds being its time limit; blank lines and lines that begin with # are
skipped. The command runs in bash in the project's folder; a JSON that it writes to "$RESULT" becomes its result. A
failed step does not keep later ones from running. Exit code 0 when all passed, 1 when one failed, 2 for bad input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TAIL = 12_000  # characters of a log that are kept


@dataclass(frozen=True)
class Step:
    name: str
    timeout: float  # seconds
    command: str


@dataclass
class Outcome:
    name: str
    passed: bool
    seconds: float
    exit_code: int | None  # None: it ran out of time
    command: str
    timeout: float
    result: Any  # what the step wrote to $RESULT, or None
    log_tail: str


def parse(text: str) -> list[Step]:
    """Raises ValueError, naming the line, for one that is no step, and for a name that stands twice."""
    steps: list[Step] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, _, rest = line.strip().partition(" ")
        seconds, _, command = rest.strip().partition(" ")
        named = name.replace("_", "a").isalnum()
        if not (named and seconds.isdecimal() and int(seconds) > 0 and command.strip()):
            raise ValueError(f"line {number} must be NAME SECONDS COMMAND, got {line!r}")
        if name in (s.name for s in steps):
            raise ValueError(f"line {number} must have a name of its own, got {name!r} again")
        steps.append(Step(name, float(seconds), command.strip()))
    if not steps:
        raise ValueError("the list of steps must not be empty, got no line")
    return steps


def run(step: Step, folder: Path) -> Outcome:
    log, result = folder / f"{step.name}.log", folder / f"{step.name}.json"
    begin = time.monotonic()
    exit_code = None
    with log.open("wb") as sink:
        process = subprocess.Popen(
            ["bash", "-c", step.command],
            cwd=ROOT,
            env=os.environ | {"RESULT": str(result)},
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(step.timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _end(process)
    seconds = time.monotonic() - begin
    found, complaint = _read(result)
    if exit_code is None:
        complaint = f"ended after its limit of {step.timeout:.0f} s"
    tail = log.read_bytes().decode(errors="replace")[-TAIL:]
    if complaint:
        tail = f"{tail}[{complaint}]\n"
    passed = exit_code == 0 and not complaint
    seconds = round(seconds, 2)
    return Outcome(step.name, passed, seconds, exit_code, step.command, step.timeout, found, tail)


def _end(process: subprocess.Popen) -> None:
    """End the step's whole process group: what it left behind would disturb the next measurement."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _read(path: Path) -> tuple[Any, str | None]:
    """The result, and what is wrong with it."""
    if not path.exists():
        return None, None
    try:
        return json.loads(path.read_text()), None
    except ValueError as error:
        return None, f"$RESULT is no JSON: {error}"


def write(path: Path, outcomes: list[Outcome], total: int) -> None:
    """Replace the file in one step: a reader never sees half of it."""
    complete = len(outcomes) == total
    data = {
        "passed": complete and all(o.passed for o in outcomes),
        "complete": complete,
        "seconds": round(sum(o.seconds for o in outcomes), 2),
        "summary": {o.name: "passed" if o.passed else "failed" for o in outcomes},
        "steps": [asdict(o) for o in outcomes],
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(json.dumps(data, indent=1) + "\n")
    beside.replace(path)


def main() -> int:
    try:
        if len(sys.argv) != 2:
            raise ValueError(f"arguments must be OUT.json, got {sys.argv[1:]}")
        target = Path(sys.argv[1]).resolve()
        if not target.parent.is_dir():
            raise ValueError(f"OUT.json must be in a folder that exists, got {sys.argv[1]}")
        steps = parse(sys.stdin.read())
    except ValueError as error:
        print(f"run_steps.py: {error}", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="run_steps_") as folder:
        for step in steps:
            print(f"{step.name}: at most {step.timeout:.0f} s", flush=True)
            outcome = run(step, Path(folder))
            outcomes.append(outcome)
            # after each step, so that a run which is cut keeps what it has
            write(target, outcomes, len(steps))
            print(f"{step.name}: {'passed' if outcome.passed else 'FAILED'} after {outcome.seconds:.1f} s", flush=True)
            if not outcome.passed:
                print("\n".join(f"  {line}" for line in outcome.log_tail.splitlines()[-20:]), flush=True)
    passed = all(o.passed for o in outcomes)
    print(f"{'passed' if passed else 'FAILED'}: {target}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
