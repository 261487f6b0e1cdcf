"""PhaseBoard: the rank that fails says who is late, who fell silent, and who failed first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from megatron_replay.trainer import phase_board
from megatron_replay.trainer.phase_board import PhaseBoard


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phase_board, "BEAT", 0.05)
    monkeypatch.setattr(phase_board, "SILENCE", 0.6)


@pytest.fixture
def boards() -> Iterator[list[PhaseBoard]]:
    """Three ranks' boards in one process."""
    store = dist.HashStore()
    made = [PhaseBoard(store, rank, 3, limit=60) for rank in range(3)]
    yield made
    for board in made:
        board.close()


def go(board: PhaseBoard, *names: str) -> None:
    for name in names:
        with board.phase(name):
            pass


def note_of(board: PhaseBoard, name: str) -> str:
    with pytest.raises(RuntimeError, match="timed out") as raised, board.phase(name):
        raise RuntimeError("timed out\nafter a while")
    return raised.value.__notes__[0]


def test_a_rank_that_is_behind_is_named(boards: list[PhaseBoard]) -> None:
    for board in boards:
        board.step = 7
        go(board, "generate")
    boards[1]._enter("reward")
    go(boards[2], "reward", "draw")
    go(boards[0], "reward", "draw")
    assert note_of(boards[0], "train") == (
        "rank 0 is in phase train of step 7; rank 1 is behind, in phase reward of step 7"
    )


def test_a_rank_that_ended_is_named(boards: list[PhaseBoard]) -> None:
    boards[2]._enter("train")
    boards[2].close()
    assert not boards[0]._silent() or boards[0]._silent() == [2]
    assert "rank 2 has ended or stands still, in phase train of step 0" in note_of(boards[0], "train")
    assert boards[1].others_are_gone()


def test_the_first_failure_is_in_the_others_reports(boards: list[PhaseBoard]) -> None:
    for board in boards:
        board._enter("train")
    assert not boards[1].others_are_gone()
    with pytest.raises(ValueError, match="bad"), boards[2].phase("draw"):
        raise ValueError("a bad number\nand more")
    said = note_of(boards[0], "draw")
    assert "rank 2 failed: ValueError: a bad number" in said and "and more" not in said
    assert boards[1].others_are_gone()


def test_nobody_is_blamed_where_all_are_alive_and_as_far(boards: list[PhaseBoard]) -> None:
    for board in boards:
        board._enter("train")
    assert boards[1].report() == ("rank 1 is in phase train of step 0; every other rank has come as far and is alive")


def test_a_long_wait_is_reported_once_and_engines_may_take_their_time(capfd: pytest.CaptureFixture[str]) -> None:
    board = PhaseBoard(dist.HashStore(), 0, 1, limit=0.1)
    assert board.report() == "rank 0 is in phase start of step 0"
    store = dist.HashStore()
    pair = [PhaseBoard(store, rank, 2, limit=0.3) for rank in range(2)]
    for phase in ("generate", "train"):
        with pair[0].phase(phase), pair[1].phase(phase if phase == "generate" else "draw"):
            time.sleep(2.0)
    said = capfd.readouterr().err.splitlines()
    for each in pair:
        each.close()
    assert sorted(line.split(": ", 1)[1].split(";")[0] for line in said) == [
        "rank 0 is in phase train of step 0", "rank 1 is in phase draw of step 0",
    ]  # fmt: skip


def test_one_rank_posts_nothing_and_still_names_the_phase() -> None:
    board = PhaseBoard(None, 0, 1, limit=1)
    assert board._thread is None and note_of(board, "draw") == "rank 0 is in phase draw of step 0"


def test_a_store_that_is_gone_is_said(boards: list[PhaseBoard], monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: object) -> bytes:
        raise RuntimeError("Connection reset by peer")

    class Gone:
        get = set = check = gone

    monkeypatch.setattr(boards[0], "_store", Gone())
    assert "the store of the first node does not answer: Connection reset" in note_of(boards[0], "train")
    assert boards[0].others_are_gone()


def test_a_store_that_keeps_a_call_does_not_keep_the_rank(
    boards: list[PhaseBoard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a client does whose cable is pulled."""
    released = threading.Event()

    class Cut:
        def get(self, *_: object) -> bytes:
            released.wait(30)
            return b""

        set = get

    monkeypatch.setattr(phase_board, "ANSWER", 0.5)
    monkeypatch.setattr(boards[0], "_store", Cut())
    began = time.monotonic()
    assert "the store of the first node does not answer: no answer within 0.5 s" in note_of(boards[0], "train")
    assert boards[0].others_are_gone() and time.monotonic() - began < 5
    released.set()
