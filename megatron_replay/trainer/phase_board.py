"""PhaseBoard: every rank posts what it is doing, so that the run that fails or hangs can say which rank is the cause.

A collective that waits for a rank in vain says on the others that it waited, not for whom. A thread of each rank
posts, on the store of torch.distributed, a heartbeat and the phase that the rank is in; whoever fails posts why, and
reads what the others have posted. A store that is cut off may keep a call for ever, so no call runs on the thread that
trains.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
BEAT = 1.0  # seconds between two heartbeats
SILENCE = 5.0  # seconds without one, after which a rank has ended or stands still
ANSWER = 20.0  # seconds that the store may take for all that a report asks
MOST_NAMED = 8  # ranks that a report names
# these wait for engines and graders, which have limits of their own
PATIENT = frozenset(("generate", "sync", "reward", "evaluate"))


class PhaseBoard:
    """This rank's end of the board. `limit`: seconds after which a phase that only waits for ranks is reported.

    With one rank nothing is posted; an error still names the phase.
    """

    def __init__(self, store: dist.Store | None, rank: int, world: int, limit: float) -> None:
        self.rank, self.world, self.limit = rank, world, limit
        self.step = 0
        self._entered = 0  # phases so far: ranks enter the same ones in the same order
        self._phase, self._since = "start", time.monotonic()
        self._ended, self._news = threading.Event(), threading.Event()
        self._beats = 0
        self._store: dist.Store | None = None
        self._thread: threading.Thread | None = None
        if world > 1:
            assert store is not None, "several ranks need a store"
            self._store = dist.PrefixStore("phase_board", store)
            self._post(self._store)
            # a client of its own: a call that is kept holds the client's lock
            posting = dist.PrefixStore("phase_board", store.clone())  # type: ignore[attr-defined]
            self._thread = threading.Thread(target=self._watch, args=(posting,), name="phase-board", daemon=True)
            self._thread.start()

    @classmethod
    def build(cls, limit: float) -> PhaseBoard:
        """On the store of the default process group. Every rank calls it; it returns when all have posted."""
        world = dist.get_world_size()
        own: Any = dist.distributed_c10d._get_default_store()
        board = cls(own.clone() if world > 1 else None, dist.get_rank(), world, limit)
        dist.barrier()
        return board

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Post `name` while the body runs. An exception leaves with a note that says where this rank and the others
        are."""
        outer = self._phase
        self._enter(name)
        try:
            yield
        except Exception as error:
            error.add_note(self.report(f"{type(error).__name__}: {error}".splitlines()[0][:300]))
            raise
        self._phase, self._since = outer, time.monotonic()

    def close(self) -> None:
        self._ended.set()
        self._news.set()
        if self._thread is not None:
            self._thread.join(2 * BEAT)

    def others_are_gone(self) -> bool:
        """Whether some other rank has failed, ended or stopped; waits a few seconds to find out."""
        try:
            return self._store is not None and self._within(lambda: bool(self._silent() or self._failures()))
        except RuntimeError:
            # the store itself
            return True

    def report(self, failure: str = "") -> str:
        """Where this rank is, and the ranks that failed, fell silent, or are behind all others. The others will read
        `failure`, why this one fails."""
        here = f"rank {self.rank} is in phase {self._phase} of step {self.step}"
        if self._store is None:
            return here
        try:
            said = self._within(lambda: self._said_of_others(failure))
        except RuntimeError as error:
            return f"{here}; the store of the first node does not answer: {error}"
        if len(said) > MOST_NAMED:
            said = [*said[:MOST_NAMED], f"and {len(said) - MOST_NAMED} more"]
        return "; ".join([here, *(said or ["every other rank has come as far and is alive"])])

    def _said_of_others(self, failure: str) -> list[str]:
        assert self._store is not None
        self._post(self._store)
        if failure:
            self._store.set(f"failed/{self.rank}", json.dumps(failure))
        silent, failures = self._silent(), self._failures()
        posted = {rank: self._get(f"rank/{rank}") for rank in range(self.world)}
        said = [f"rank {rank} failed: {words}" for rank, words in failures.items()]
        said += [f"rank {rank} has ended or stands still, in {_where(posted[rank])}" for rank in silent]
        least = min(entered for entered, *_ in posted.values())
        if any(entered != least for entered, *_ in posted.values()):
            said += [
                f"rank {rank} is behind, in {_where(posted[rank])}"
                for rank, (entered, *_) in posted.items()
                if entered == least and rank not in silent and rank not in failures
            ]
        return said

    def _enter(self, name: str) -> None:
        self._entered += 1
        self._phase, self._since = name, time.monotonic()
        self._news.set()

    def _post(self, store: dist.Store) -> None:
        self._beats += 1
        store.set(f"rank/{self.rank}", json.dumps([self._entered, self.step, self._phase, self._beats]))

    def _watch(self, store: dist.Store) -> None:
        """The thread: posts, and says once of each phase that it takes long."""
        reported = -1
        while not self._ended.is_set():
            self._news.wait(BEAT)
            self._news.clear()
            try:
                self._post(store)
            except RuntimeError:
                # a store that is gone shows in the next collective
                return
            waits = time.monotonic() - self._since
            if waits > self.limit and self._phase not in PATIENT | {"start"} and self._entered != reported:
                reported = self._entered
                print(f"after {waits:.0f} s: {self.report()}", file=sys.stderr, flush=True)

    def _within(self, ask: Callable[[], T]) -> T:
        """ask() on a thread of its own. Raises RuntimeError where it fails or takes longer than ANSWER seconds."""
        answer: list[T] = []
        failure: list[Exception] = []

        def run() -> None:
            try:
                answer.append(ask())
            except Exception as error:
                failure.append(error)

        thread = threading.Thread(target=run, name="phase-board-report", daemon=True)
        thread.start()
        thread.join(ANSWER)
        if answer:
            return answer[0]
        raise RuntimeError(str(failure[0]) if failure else f"no answer within {ANSWER:g} s")

    def _silent(self) -> list[int]:
        """Other ranks that do not post any more."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        before = {rank: self._get(f"rank/{rank}") for rank in others}
        deadline = time.monotonic() + SILENCE
        while before and time.monotonic() < deadline:
            time.sleep(BEAT / 2)
            before = {rank: posted for rank, posted in before.items() if self._get(f"rank/{rank}") == posted}
        return sorted(before)

    def _failures(self) -> dict[int, str]:
        assert self._store is not None
        keys = {rank: f"failed/{rank}" for rank in range(self.world) if rank != self.rank}
        return {rank: self._get(key) for rank, key in keys.items() if self._store.check([key])}

    def _get(self, key: str) -> Any:
        assert self._store is not None
        return json.loads(self._store.get(key))


def end_with_the_others(board: PhaseBoard) -> None:
    """For a rank that was asked to stop: end at once where another rank is gone, since no step will be finished."""
    if board.others_are_gone():
        print(f"rank {board.rank}: another rank is gone, this one ends", file=sys.stderr, flush=True)
        os._exit(143)


def _where(posted: list[Any]) -> str:
    _, step, phase, _ = posted
    return f"phase {phase} of step {step}"
