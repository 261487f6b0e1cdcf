"""JSONL data sets: which fields are read, what is left out and counted, and what a bad line is told."""

from __future__ import annotations

import hashlib
import json
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_replay.tasks import jsonl
from megatron_replay.tasks.jsonl import JsonlTask
from megatron_replay.tasks.task import Problem, build_task

ASKED = 'What is 1+1? Put your answer on its own line after "Answer:".'
DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": ASKED}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "2", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4-a1cb-49d1-8c1e-62eaf2f74079"},
}
MATH = {"problem": "What is $1+1$?", "level": "Level 1", "type": "Algebra", "solution": r"It is $\boxed{\text{two}}$."}


def read(path: Path, *rows: Any, **keys: str) -> JsonlTask:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlTask(str(path), **keys)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.jsonl"


def test_numbers_follow_the_file_and_blank_lines_do_not_count(path: Path) -> None:
    path.write_bytes('{"prompt": "1+1=", "answer": " 2", "source": "x"}\r\n\n{"prompt": "é", "answer": "7"}'.encode())
    task = build_task("jsonl", split="train", seed=0, data_path=str(path))
    assert task.size == 2
    assert task.problem(0).extra == {"source": "x"}
    assert task.problem(1) == Problem("é", "7", 1)
    assert [task.score(task.problem(0), r) for r in ("2\n", "2", "22", "")] == [1.0, 1.0, 0.0, 0.0]
    with pytest.raises(IndexError, match="^index"):
        task.problem(2)


def test_the_lines_of_dapo_and_of_math(path: Path) -> None:
    first, second = (read(path, DAPO, MATH).problem(i) for i in range(2))
    assert first.prompt == ({"role": "user", "content": ASKED},) and first.answer == "2"
    assert first.extra == {k: v for k, v in DAPO.items() if k != "prompt"}
    assert (second.prompt, second.answer) == ("What is $1+1$?", r"\text{two}")
    assert second.extra == {"level": "Level 1", "type": "Algebra"}


def test_usual_fields_in_their_order_and_fields_by_flag(path: Path) -> None:
    row = {"question": "q", "problem": "p", "solution": r"\boxed{s}", "answer": "a", "meta": {"gold": "g", "a.b": "c"}}
    assert read(path, row).problem(0) == Problem(
        "p", "a", 0, {"question": "q", "solution": r"\boxed{s}", "meta": row["meta"]}
    )
    task = build_task(
        "jsonl", split="train", seed=0, data_path=str(path), prompt_key="question", answer_key="meta.gold"
    )
    assert (task.problem(0).prompt, task.problem(0).answer) == ("q", "g")
    assert read(path, row, answer_key="meta.a.b").problem(0).answer == "c"
    assert read(path, row, answer_key="solution").problem(0).answer == "s"


def test_a_prompt_that_comes_again_is_left_out_and_counted(path: Path) -> None:
    same = ["a b", "  a\n b ", unicodedata.normalize("NFD", "é"), "é"]
    rows = [{"prompt": p, "answer": " 1 " if i % 2 else "1"} for i, p in enumerate(same)]
    task = read(path, *rows, {"prompt": "A b", "answer": "1"})
    assert [task.problem(i).prompt for i in range(task.size)] == ["a b", same[2], "A b"]
    assert task.counts == {"lines": 5, "problems": 3, "duplicates": 2, "conflicting": 0}
    assert task.report() == f"{path}: 3 problems of 5 lines; 2 lines left out that repeat a prompt"
    messages = [{"role": "user", "content": "a  b"}]
    assert read(path, {"messages": messages, "answer": "1"}, {"prompt": "a b", "answer": "2"}).size == 2


def test_prompts_with_differing_answers_are_left_out_and_named(path: Path) -> None:
    rows = [("a", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("a", "1"), ("c", "4")]
    task = read(path, *({"prompt": p, "answer": a} for p, a in rows))
    assert [task.problem(i) for i in range(task.size)] == [Problem("b", "2", 0), Problem("c", "4", 1)]
    assert task.counts == {"lines": 6, "problems": 2, "duplicates": 1, "conflicting": 3}
    assert task.conflicts == [f"{path}:1: '1', and line 3: '3'"]
    assert task.report().endswith(
        f"3 lines left out whose prompt has differing answers: {path}:1: '1', and line 3: '3'"
    )
    many = [{"prompt": str(i // 2), "answer": str(i)} for i in range(12)]
    assert read(path, *many, {"prompt": "b", "answer": "2"}).report().endswith("; and 3 more prompts")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "not JSON: Expecting property name"),
        (b'{"prompt": "x", "answer": "y"} {}', "not JSON: Extra data"),
        (b"[1]", "must be an object with a prompt and an answer, got list"),
        (b"\xef\xbb\xbf{}", "not JSON: Unexpected UTF-8 BOM"),
        (b'{"prompt": "\xff\xfe"}', r"must be UTF-8, got b'\xff' at byte 12"),
        (b'{"prompt": "x", "answer": NaN}', "not JSON: NaN is no JSON number"),
        (b'{"prompt": "x", "answer": "y", "weight": -Infinity}', "not JSON: -Infinity is no JSON number"),
        (b'{"prompt": "x", "prompt": "y", "answer": "z"}', "must name each key once, got 'prompt' twice"),
        (b'{"prompt": "x", "answer": "z", "a": {"b": 1, "b": 1}}', "must name each key once, got 'b' twice"),
        (b"[" * 100_000, "not JSON: nested too deep"),
        (b"{}", "must have one of prompt, messages, problem, question (--rl-prompt-key names another), got the keys n"),
        (
            b'{"prompt": "x", "target": "y"}',
            "must have one of answer, reward_model.ground_truth, ground_truth, solution (--rl-answer-key names another)"
            ", got the keys prompt, target",
        ),
        (b'{"prompt": "x", "answer": 3}', "answer must be a string, got 3"),
        (b'{"prompt": "x", "answer": null}', "answer must be a string, got None"),
        (b'{"prompt": "x", "answer": " "}', "answer must not be blank, got ' '"),
        (
            b'{"prompt": "x", "reward_model": {"ground_truth": ["72"]}}',
            "reward_model.ground_truth must be a string, got ['72']",
        ),
        (b'{"prompt": "x", "solution": "it is 3"}', r"solution must hold its answer in \boxed{...}, got 'it is 3'"),
        (b'{"prompt": null, "answer": "3"}', "prompt must be a string, got None"),
        (b'{"prompt": "", "answer": "3"}', "prompt must not be blank, got ''"),
        (b'{"prompt": "a\\ud800", "answer": "3"}', r"prompt must be text, got half a character '\ud800'"),
        (b'{"messages": [], "answer": "3"}', "messages must have at least one message, got []"),
        (b'{"prompt": ["x"], "answer": "3"}', "prompt[0] must be an object with role and content alone, got 'x'"),
        (b'{"prompt": [{"role": "user"}], "answer": "3"}', "prompt[0] must be an object with role and content alone"),
        (b'{"prompt": [{"role": "me", "content": "x"}], "answer": "3"}', "prompt[0].role must be one of system, "),
        (b'{"prompt": [{"role": "user", "content": 1}], "answer": "3"}', "prompt[0].content must be a string, got 1"),
        (
            b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": "3"}',
            "prompt must end with a message that the model answers, got role 'assistant'",
        ),
    ],
)  # fmt: skip
def test_a_bad_line_is_named(line: bytes, why: str, path: Path) -> None:
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n\n' + line + b"\n")
    with pytest.raises(ValueError) as error:
        build_task("jsonl", split="train", seed=0, data_path=str(path))
    assert str(error.value).startswith(f"{path}:3: {why}")
    assert "\n" not in str(error.value)


def test_a_field_that_a_flag_names_must_be_there(path: Path) -> None:
    for flag, keys in (("--rl-prompt-key", {"prompt_key": "ask"}), ("--rl-answer-key", {"answer_key": "a.b"})):
        (name,) = keys.values()
        with pytest.raises(ValueError, match=rf"^{path}:1: must have {name} \({flag}\), got the keys prompt, answer"):
            read(path, {"prompt": "x", "answer": "y"}, **keys)


def test_a_line_of_any_length_is_not_read_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MOST_LINE_BYTES", 40)
    row = b'{"prompt": "x", "answer": "y"}'
    path.write_bytes(row.ljust(39) + b"\n")
    assert JsonlTask(str(path)).size == 1
    path.write_bytes(row + b"\n" + row.ljust(41) + b"\n")
    with pytest.raises(ValueError, match=rf"^{path}:2: a line must have at most 40 bytes, got more"):
        JsonlTask(str(path))


def test_a_file_without_problems_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n \n")
    (tmp_path / "folder.jsonl").mkdir()
    words = {"empty": "at least one problem", "none": "a readable JSONL file", "folder": "a readable JSONL file"}
    for name, why in words.items():
        with pytest.raises(ValueError, match=f"^data_path must name .*{why}.*{name}.jsonl"):
            build_task("jsonl", split="train", seed=0, data_path=str(tmp_path / f"{name}.jsonl"))
    rows = [{"prompt": "x", "answer": a} for a in "ab"]
    with pytest.raises(ValueError, match="at least one problem.*2 lines left out whose prompt has differing answers"):
        read(tmp_path / "x.jsonl", *rows)


def test_the_identity_is_that_of_the_bytes(path: Path) -> None:
    task = read(path, DAPO, MATH)
    assert task.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_text("\n" + path.read_text())
    assert JsonlTask(str(path)).sha256 != task.sha256


WORDS = st.text("ab é", min_size=1, max_size=4).filter(str.strip)
ROWS = st.lists(st.tuples(WORDS, st.sampled_from("12"), st.booleans()), min_size=1, max_size=20)


@settings(deadline=None)
@given(ROWS)
def test_every_line_is_a_problem_or_is_counted_and_order_stays(rows: list[tuple[str, str, bool]]) -> None:
    """Against the plain definition: the first line of each prompt whose lines all have one answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        lines = [json.dumps({"prompt": p, "answer": a}, ensure_ascii=e) for p, a, e in rows]
        path.write_text("\n".join(lines), encoding="utf-8")
        answers: dict[str, set[str]] = {}
        for prompt, answer, _ in rows:
            answers.setdefault(" ".join(prompt.split()), set()).add(answer)
        expected: list[Problem] = []
        seen: set[str] = set()
        for prompt, answer, _ in rows:
            key = " ".join(prompt.split())
            if len(answers[key]) == 1 and key not in seen:
                seen.add(key)
                expected.append(Problem(prompt, answer, len(expected)))
        if not expected:
            with pytest.raises(ValueError, match="at least one problem"):
                JsonlTask(str(path))
            return
        task, again = JsonlTask(str(path)), JsonlTask(str(path))
        assert [task.problem(i) for i in range(task.size)] == expected
        assert [again.problem(i) for i in range(again.size)] == expected and again.sha256 == task.sha256
        c = task.counts
        assert c["lines"] == len(rows) == c["problems"] + c["duplicates"] + c["conflicting"]
        assert c["conflicting"] == sum(len(answers[" ".join(p.split())]) > 1 for p, _, _ in rows)


@settings(deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_problems_or_a_named_line(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.jsonl")
        path.write_bytes(b'{"prompt": "a", "answer": "b"}\n' + data)
        try:
            assert JsonlTask(str(path)).size >= 1
        except ValueError as error:
            assert str(error).startswith(f"{path}:")
