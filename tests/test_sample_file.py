"""SampleFile: what is written, what a kill leaves behind at any byte, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_replay.evaluation.sample_file import SampleFile
from megatron_replay.evaluation.sample_record import SampleRecord
from tests.evaluation_records import records

SETTINGS = {"--seed": 1, "--samples": 2, "--rl-default-temperature": 0.6, "--rl-chat-template (sha256)": None}
# problems that a filter left: their numbers have gaps
PLAN = {"a": [0, 2, 3], "b": [7]}
A = [*records([[1.0, 0.0]]), *records([[None, 0.5], [1.0, 1.0]], first=2)]
B = records([[0.0, None]], first=7, text="2 + 2 = \u2084\nand so on")


def opened(path: Path, settings: dict[str, Any] = SETTINGS) -> SampleFile:
    return SampleFile(path, settings, PLAN, 2)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    file = opened(tmp_path / "whole" / "samples.jsonl")
    file.append("a", A[:4])
    file.append("a", A[4:])
    file.append("b", B)
    file.close()
    return file.path


def test_what_is_written_is_read_back(whole: Path) -> None:
    before = whole.read_bytes()
    file = opened(whole)
    assert file.records == {"a": A, "b": B}
    assert (file.done("a"), file.done("b")) == (3, 1)
    file.close()
    assert whole.read_bytes() == before and before.count(b"\n") == 9


def test_cut_at_any_byte_and_gone_on_with_it_is_the_whole_file(whole: Path, tmp_path: Path) -> None:
    text = whole.read_bytes()
    ends = {name: [] for name in PLAN}
    for size in range(len(text) + 1):
        cut = tmp_path / "cut.jsonl"
        cut.write_bytes(text[:size])
        file = opened(cut)
        for name, rows in (("a", A), ("b", B)):
            ends[name].append(file.done(name))
            if file.done(name) * 2 < len(rows):
                file.append(name, rows[file.done(name) * 2 :])
        file.close()
        assert cut.read_bytes() == text, size
    # nothing that was whole is done again
    assert ends["a"] == sorted(ends["a"]) and set(ends["a"]) == {0, 1, 2, 3} and ends["b"][-1] == 1


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("--seed", 2, "was written with --seed 1, got 2"),
        ("--rl-default-temperature", 1.0, "was written with --rl-default-temperature 0.6, got 1.0"),
        ("--rl-chat-template (sha256)", "ab", "was written with --rl-chat-template (sha256) None, got 'ab'"),
        ("--bf16", True, "was written with --bf16 None, got True"),
    ],
)
def test_other_settings_are_refused_by_name(whole: Path, name: str, value: object, words: str) -> None:
    before = whole.read_bytes()
    # the first that differs is named, not the last
    with pytest.raises(ValueError) as error:
        opened(whole, {**SETTINGS, name: value, "--z": 0})
    assert str(error.value) == f"{whole} {words}"
    assert whole.read_bytes() == before


def test_a_setting_that_is_gone_is_refused(whole: Path) -> None:
    with pytest.raises(ValueError, match="was written with --samples 2, got None"):
        opened(whole, {k: v for k, v in SETTINGS.items() if k != "--samples"})


def test_lines_of_something_else_are_named(whole: Path) -> None:
    lines = whole.read_bytes().splitlines(keepends=True)
    for number, line, words in (
        (1, b'{"step": 0}\n', ":1 holds no settings of an evaluation"),
        (3, b"no json\n", ":3: no record of a sample (JSONDecodeError"),
        (3, lines[1], ":3: must be (benchmark, problem, sample) ('a', 0, 1), got ('a', 0, 0)"),
        (4, lines[7], ":4: must be (benchmark, problem, sample) ('a', 2, 0), got ('b', 7, 0)"),
        (2, lines[1].replace(b"1.0", b"true"), ":2: no record of a sample, reward is True"),
        (2, lines[1].replace(b"1.0", b"NaN"), ":2: no record of a sample (ValueError: reward must be finite or None"),
        (2, lines[1].replace(b'"tokens"', b'"tokns"'), ":2: no record of a sample (TypeError"),
    ):
        whole.write_bytes(b"".join([*lines[: number - 1], line, *lines[number:]]))
        with pytest.raises(ValueError) as error:
            opened(whole)
        assert f"{whole}{words}" in str(error.value)
    whole.write_bytes(b"".join([*lines, lines[-1]]))
    with pytest.raises(ValueError, match=r":10: must be \(benchmark, problem, sample\) None"):
        opened(whole)


def test_only_the_next_problems_can_be_appended(tmp_path: Path) -> None:
    file = opened(tmp_path / "samples.jsonl")
    for rows in (A[2:4], A[:1], A[1::-1], [*A, SampleRecord(4, 0, 1.0, 1, False)]):
        with pytest.raises(ValueError, match="records must be the next of a"):
            file.append("a", rows)
    file.append("a", A[:2])
    with pytest.raises(ValueError, match="records must be the next of a"):
        file.append("a", A[:2])
    file.close()
    assert file.path.read_bytes().count(b"\n") == 3
