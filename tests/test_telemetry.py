from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from megatron_replay.telemetry import PhaseTimer, RunLog, draw_curves, progress_text, read_metrics

METRICS = {
    "reward_mean": 0.25,
    "replay/age_mean": 3.0,
    "replay/draw_size": 8.0,
    "replay/draw_hash": "ab",
    "grad_norm": 1.0,
    "time/train": 0.5,
}
SUMMARY = {
    "accuracy_before": 0.1,
    "accuracy_after": 0.5,
    "seconds": 3.0,
    "fresh_rollouts": 10,
    "replayed_rollouts": 5,
    "tensor_parallel": 2,
    "pipeline_parallel": 1,
    "data_parallel": 1,
}


def test_phases_add_up_until_drained() -> None:
    timer = PhaseTimer()
    for _ in range(2):
        with timer.phase("draw"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timer.phase("train"):
        raise KeyError
    seconds = timer.drain()
    assert seconds.keys() == {"time/draw", "time/train"} and seconds["time/draw"] >= 0.02
    assert timer.drain() == {}


def log(folder: Path, start: int, stop: int) -> None:
    out = RunLog(folder, start_step=start, total_steps=6)
    for step in range(start, stop):
        out.update(step, 0, METRICS | {"value": float(10 * start + step)})
    out.close()


def test_a_resumed_run_drops_what_its_checkpoint_has_not_seen(tmp_path: Path) -> None:
    log(tmp_path, 0, 5)
    log(tmp_path, 3, 6)
    assert [(r["step"], r["value"]) for r in read_metrics(tmp_path)] == [
        (0, 0), (1, 1), (2, 2), (3, 33), (4, 34), (5, 35),
    ]  # fmt: skip


def test_tensorboard_shows_the_numbers_of_a_resumed_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(tmp_path, 0, 5)
    log(tmp_path, 3, 6)
    out = RunLog(tmp_path, start_step=6, total_steps=7)
    out.scalars(6, {"heldout/accuracy": 0.5})
    out.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = {name for name, value in METRICS.items() if not isinstance(value, str)}
    assert set(board.Tags()["scalars"]) == names | {"value", "heldout/accuracy"}
    assert [(e.step, e.value) for e in board.Scalars("value")] == [(0, 0), (1, 1), (2, 2), (3, 33), (4, 34), (5, 35)]
    assert [(e.step, e.value) for e in board.Scalars("heldout/accuracy")] == [(6, 0.5)]


def test_a_new_run_sets_an_earlier_one_aside(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        out = RunLog(tmp_path / "run", start_step=0, total_steps=1)
        out.update(0, 0, METRICS | {"value": value})
        out.close()
    found = {p.name: read_metrics(p)[0]["value"] for p in tmp_path.iterdir()}
    assert found == {"run.1": 1, "run.2": 2, "run": 3}


def test_a_line_cut_off_by_a_kill_is_left_out_and_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0}) + "\n" + '{"step": 1, "lo')
    assert read_metrics(tmp_path) == [{"step": 0}]
    path.write_text('{"step"\n' + json.dumps({"step": 1}) + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl:1 is not JSON"):
        read_metrics(tmp_path)
    assert read_metrics(tmp_path / "nowhere") == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    out = RunLog(tmp_path / "run", start_step=0, total_steps=1, enabled=False)
    out.update(0, 0, METRICS)
    out.say("hello")
    out.scalars(0, {"x": 1.0})
    out.close(SUMMARY)
    assert not (tmp_path / "run").exists()


def test_progress_shows_reward_replay_age_and_phases() -> None:
    text = progress_text(METRICS | {"replay/fraction": 1 / 3, "time/draw": 0.001})
    assert text == "reward 0.250, replay 33%, age 3.0, seconds: train 0.50"


@pytest.mark.parametrize(
    ("before", "after", "title", "points"),
    [
        (0.125, 0.5, "held-out accuracy 0.125 -> 0.500, 10 fresh", [[0, 0.125], [3, 0.5]]),
        (None, 0.5, "held-out accuracy none -> 0.500, 10 fresh", [[3, 0.5]]),
        (0.125, None, "held-out accuracy 0.125 -> none, 10 fresh", [[0, 0.125]]),
        (None, None, "10 fresh", []),
    ],
)
def test_curves_are_drawn_with_and_without_accuracy(
    tmp_path: Path,
    before: float | None,
    after: float | None,
    title: str,
    points: list[list[float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self) or save(self, *a, **k))
    rows = [METRICS | {"step": s} for s in range(4)]
    draw_curves(rows, SUMMARY | {"accuracy_before": before, "accuracy_after": after}, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    assert drawn[0].get_suptitle().startswith(title)
    found = [xy for collection in drawn[0].axes[0].collections for xy in collection.get_offsets().tolist()]
    assert found == points


def test_curves_are_drawn_without_a_row(tmp_path: Path) -> None:
    draw_curves([], SUMMARY, tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
