from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.replay_buffer import Draw
from megatron_replay.rollout import RolloutBatch
from megatron_replay.rollout_log import (
    ADVANTAGE_EDGES,
    AGE_EDGES,
    DRAWS_FILE,
    ROLLOUTS_FILE,
    RolloutLog,
    counts,
    rollout_lines,
    token_texts,
)
from megatron_replay.telemetry import drop_rows_from
from megatron_replay.tokenizer import NO_TEXT, SentencePieceTokenizer
from tests.buffers import buffer, rows
from tests.launch import ROOT
from tests.shards import run_ranks

STEPS = 6
KEYS = (
    *("step", "kind", "uid", "birth_step", "age", "reward", "advantage", "prompt", "tokens"),
    *("logprobs_birth", "logprobs_now"),
)


class Letters:
    """Id i reads as the i-th letter."""

    eos_id, vocab_size = 0, 64

    def encode(self, text: str) -> list[int]:
        return [ord(c) - 65 for c in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(65 + i) for i in ids)


class Bytes(Letters):
    """Id i is the byte i; id 256 ends a response and has no text."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def now(batch: RolloutBatch) -> Tensor:
    """Log-probs that a policy could have: a function of the tokens alone."""
    return -(batch.tokens % 7).float() / 4


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def run(folder: Path, group: DataParallelGroup, *, start_step: int = 0, per_step: int = 6, **config: Any) -> list[Draw]:
    """A run without training: the rollouts of a step are dealt out over the ranks; half as many are drawn again."""
    store = buffer(group=group, tau_max=3, **config)
    log = RolloutLog(
        folder, 2, per_step, tokenizer=Letters(), start_step=start_step, group=group, enabled=group.rank == 0
    )
    draws = []
    for step in range(STEPS):
        everyone = rows(12, step)
        fresh = everyone.select(torch.arange(group.rank, 12, group.size))
        store.evict(step)
        draw = store.draw(6 if step else 0, step, fresh)
        if step >= start_step:
            log.record(step, draw.batch, draw, store, now)
        store.push(fresh)
        draws.append(draw)
    return draws


def test_every_line_says_what_the_rollout_was(tmp_path: Path) -> None:
    run(tmp_path, DataParallelGroup())
    lines = read(tmp_path, ROLLOUTS_FILE)
    assert [line["step"] for line in lines] == [0] * 6 + [2] * 6 + [4] * 6
    assert all(tuple(line) == KEYS for line in lines)
    for line in lines:
        source = rows(12, line["birth_step"])
        (i,) = (source.uid == line["uid"]).nonzero()[0].tolist()
        one = source.select(torch.tensor([i]))
        assert line["age"] == line["step"] - line["birth_step"]
        assert line["reward"] == round(float(one.reward), 5) and line["advantage"] == round(float(one.advantage), 5)
        assert line["prompt"] == Letters().decode(one.tokens[:2].tolist())
        assert line["tokens"] == list(Letters().decode(one.tokens[2:].tolist()))
        assert line["logprobs_birth"] == [round(x, 5) for x in one.behavior_logprobs[2:].tolist()]
        assert line["logprobs_now"] == now(one)[2:].tolist()


def test_half_is_replay_and_a_kind_is_where_a_rollout_came_from(tmp_path: Path) -> None:
    draws = run(tmp_path, DataParallelGroup(), per_step=5)
    lines = read(tmp_path, ROLLOUTS_FILE)
    for step in (0, 2, 4):
        kinds = [line["kind"] for line in lines if line["step"] == step]
        assert kinds == (["fresh"] * 5 if step == 0 else ["fresh"] * 3 + ["replay"] * 2)
        drawn = {line["uid"] for line in lines if line["step"] == step and line["kind"] == "replay"}
        assert drawn <= set(draws[step].uids.tolist())
        assert all(line["age"] == 0 for line in lines if line["kind"] == "fresh")
        assert all(line["age"] > 0 for line in lines if line["kind"] == "replay")


@pytest.mark.parametrize("with_replacement", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_files_do_not_depend_on_the_layout(tmp_path: Path, ranks: int, with_replacement: bool) -> None:
    run(tmp_path / "one", DataParallelGroup(), with_replacement=with_replacement)
    run_ranks(ranks, lambda group: run(tmp_path / "many", group, with_replacement=with_replacement))
    for name in (ROLLOUTS_FILE, DRAWS_FILE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "many" / name).read_bytes()
    logged = [(line["step"], line["kind"], line["uid"]) for line in read(tmp_path / "one", ROLLOUTS_FILE)]
    assert len(set(logged)) == len(logged)


def test_other_rollouts_are_logged_at_other_steps(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path, 1, 3, tokenizer=Letters())
    batch, store = rows(12, 0), buffer()
    draw = Draw(batch, torch.empty(0, dtype=torch.int64), 0, fresh=12)
    for step in range(8):
        log.record(step, batch, draw, store, now)
    lines = read(tmp_path, ROLLOUTS_FILE)
    assert len({tuple(line["uid"] for line in lines if line["step"] == step) for step in range(8)}) == 8
    # nothing is stored, so there is nothing to say about draws
    assert not (tmp_path / DRAWS_FILE).exists()


@pytest.mark.parametrize("warm", [False, True])
def test_a_pool_without_a_draw_is_fresh(tmp_path: Path, warm: bool) -> None:
    store, fresh = buffer(), rows(6, 0)
    store.push(fresh)
    draw = store.draw(4 if warm else 0, 0)
    RolloutLog(tmp_path, 1, 4, tokenizer=Letters()).record(0, draw.batch if warm else fresh, draw, store, now)
    kinds = [line["kind"] for line in read(tmp_path, ROLLOUTS_FILE)]
    assert kinds == (["replay"] * 2 if warm else ["fresh"] * 4)


def test_draws_count_what_is_stored_and_what_was_drawn(tmp_path: Path) -> None:
    draws = run(tmp_path, DataParallelGroup())
    lines = read(tmp_path, DRAWS_FILE)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        step, draw = line["step"], draws[line["step"]]
        stored = RolloutBatch.cat([rows(12, birth) for birth in range(max(0, step - 3), step)])
        drawn = draw.batch.select(torch.arange(draw.fresh, len(draw.batch)))
        for part, batch in (("stored", stored), ("drawn", drawn)):
            row, size = line[part], batch.advantage.double().abs()
            assert row["rollouts"] == len(batch) == sum(row["advantage"]) == sum(row["age"])
            assert row["advantage_abs_mean"] == pytest.approx(float(size.mean()))
            for i, edge in enumerate(ADVANTAGE_EDGES):
                upper = ADVANTAGE_EDGES[i + 1] if i + 1 < len(ADVANTAGE_EDGES) else math.inf
                assert row["advantage"][i] == sum(edge <= a < upper for a in size.tolist())
            assert row["age"][:4] == [int((step - batch.birth_step == age).sum()) for age in range(4)]


def test_bins_have_a_lower_edge_and_the_last_has_no_upper() -> None:
    found = counts(torch.tensor([0.0, 0.2499, 0.25, 3.9999, 4.0, 1e9]), ADVANTAGE_EDGES)
    assert found.sum() == 6 and found[0] == 2 and found[1] == 1 and found[15] == 1 and found[16] == 2
    ages = counts(torch.tensor([0, 15, 16, 31, 32, 63, 64, 1000]), AGE_EDGES)
    assert ages.tolist() == [1] + [0] * 14 + [1, 2, 2, 2]


def test_what_is_no_number_is_null() -> None:
    batch = rows(1, 0)
    batch = batch.replace(advantage=torch.tensor([math.nan]), reward=torch.tensor([math.inf]))
    (line,) = rollout_lines(0, ["fresh"], batch, torch.tensor([0.0, 0.0, math.nan, -math.inf, -0.123456]), Letters())
    row = json.loads(line)
    assert row["advantage"] is None and row["reward"] is None
    assert row["logprobs_now"] == [None, None, -0.12346]
    assert "NaN" not in line and "Infinity" not in line


def test_a_resumed_run_takes_its_steps_again(tmp_path: Path) -> None:
    run(tmp_path / "whole", DataParallelGroup())
    run(tmp_path / "cut", DataParallelGroup())
    for name in (ROLLOUTS_FILE, DRAWS_FILE):
        path = tmp_path / "cut" / name
        path.write_text(path.read_text()[:-20])
    run(tmp_path / "cut", DataParallelGroup(), start_step=3)
    for name in (ROLLOUTS_FILE, DRAWS_FILE):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not list(tmp_path.glob("*/*.tmp"))


def test_damage_is_named(tmp_path: Path) -> None:
    path = tmp_path / ROLLOUTS_FILE
    for bad in ('{"step"', "3", "[]", "{}", '{"step": "x"}'):
        path.write_text('{"step": 0}\n' + bad + "\n")
        with pytest.raises(ValueError, match=r"rollouts.jsonl:2 is no row with a step"):
            drop_rows_from(path, 5)
        assert path.read_text().startswith('{"step": 0}\n')


@pytest.mark.parametrize("name", ["every_steps", "per_step"])
def test_a_count_below_one_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        RolloutLog(tmp_path, **{"every_steps": 1, "per_step": 1, name: 0}, tokenizer=Letters())


def test_only_the_enabled_rank_touches_the_folder(tmp_path: Path) -> None:
    log = RolloutLog(tmp_path / "run", 1, 2, tokenizer=Letters(), enabled=False)
    log.record(0, rows(2, 0), Draw(rows(2, 0), torch.empty(0, dtype=torch.int64), 0, fresh=2), buffer(), now)
    assert not (tmp_path / "run").exists()


def test_texts_of_tokens_add_up_to_the_text() -> None:
    text = "caf\N{LATIN SMALL LETTER E WITH ACUTE} \N{THINKING FACE}!"
    ids = [*text.encode(), 256]
    texts = token_texts(Bytes(), ids)
    assert "".join(texts) == text and len(texts) == len(ids)
    # the last byte of a character has it, and the end has none
    assert texts[3:5] == ["", "\N{LATIN SMALL LETTER E WITH ACUTE}"] and texts[6:10] == [
        "",
        "",
        "",
        "\N{THINKING FACE}",
    ]
    assert texts[-1] == ""
    # bytes that never become a character are not held back for ever
    broken = token_texts(Bytes(), [0x80] * 9 + [0x41])
    assert broken[-1].endswith("A") and sum(t.count(NO_TEXT) for t in broken) == 9 and all(broken[3::4])


def test_texts_of_a_real_tokenizer() -> None:
    tokenizer = SentencePieceTokenizer(str(ROOT / "examples/quickstart/model/tokenizer.model"))
    ids = [*tokenizer.encode("13579"), tokenizer.eos_id]
    assert token_texts(tokenizer, ids) == ["1", "3", "5", "7", "9", ""]
