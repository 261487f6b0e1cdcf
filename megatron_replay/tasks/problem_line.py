r"""ProblemLine: how one line of a JSONL file becomes a prompt and its answer.

The prompt is the field that --rl-prompt-key names, or the first of `prompt`, `messages`, `problem`, `question` that
the line has: a string, or a list of {"role", "content"}. The answer is the field that --rl-answer-key names, or the
first of `answer`, `reward_model.ground_truth` (DAPO), `ground_truth`, `solution`: a string. A dot leads into an object.
A field named `solution` (MATH) holds its answer in its last \boxed{...}. The other fields are the problem's `extra`.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_replay.tasks.math_grader import last_boxed
from megatron_replay.tasks.task import Problem

PROMPT_KEYS = ("prompt", "messages", "problem", "question")
ANSWER_KEYS = ("answer", "reward_model.ground_truth", "ground_truth", "solution")
ROLES = ("system", "developer", "user", "assistant", "tool")
_MISSING = object()


@dataclass(frozen=True)
class ProblemLine:
    """Reads lines by the rules above. A key that is None is looked for among the usual ones."""

    prompt_key: str | None = None
    answer_key: str | None = None

    def parse(self, line: bytes, problem_id: int) -> Problem:
        """Raises ValueError that names field and value."""
        row = _object(line)
        prompt_key, prompt = _field(row, self.prompt_key, PROMPT_KEYS, "--rl-prompt-key")
        answer_key, answer = _field(row, self.answer_key, ANSWER_KEYS, "--rl-answer-key")
        return Problem(
            prompt=_messages(prompt, prompt_key) if isinstance(prompt, list) else _text(prompt, prompt_key),
            answer=_answer(_text(answer, answer_key), answer_key),
            problem_id=problem_id,
            extra={name: value for name, value in row.items() if name not in (prompt_key, answer_key)},
        )


def same_prompt_key(problem: Problem) -> str:
    """Equal for prompts of equal text: Unicode's composed form, runs of white space as one space, none at the ends."""
    prompt = problem.prompt
    parts = [prompt] if isinstance(prompt, str) else [x for m in prompt for x in (m["role"], m["content"])]
    return json.dumps([" ".join(unicodedata.normalize("NFC", x).split()) for x in parts])


def _object(line: bytes) -> dict[str, Any]:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"must be UTF-8, got {error.object[error.start : error.end]!r} at byte {error.start}"
        ) from None
    try:
        row = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    except RecursionError:
        raise ValueError("not JSON: nested too deep") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be an object with a prompt and an answer, got {type(row).__name__}")
    return row


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"must name each key once, got {next(x for x in names if names.count(x) > 1)!r} twice")
    return made


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"not JSON: {text} is no JSON number")


def _field(row: Mapping[str, Any], key: str | None, usual: tuple[str, ...], flag: str) -> tuple[str, Any]:
    for name in usual if key is None else (key,):
        value = _look_up(row, name)
        if value is not _MISSING:
            return name, value
    wanted = f"one of {', '.join(usual)} ({flag} names another)" if key is None else f"{key} ({flag})"
    raise ValueError(f"must have {wanted}, got the keys {', '.join(row) or 'none'}")


def _look_up(row: Any, name: str) -> Any:
    if isinstance(row, dict) and name in row:
        return row[name]
    head, dot, rest = name.partition(".")
    if dot and isinstance(row, dict) and head in row:
        return _look_up(row[head], rest)
    return _MISSING


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, got {value!r:.100}")
    if not value.strip():
        raise ValueError(f"{name} must not be blank, got {value!r:.100}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name} must be text, got half a character {value[error.start]!a}") from None
    return value


def _messages(value: list[Any], name: str) -> tuple[dict[str, str], ...]:
    if not value:
        raise ValueError(f"{name} must have at least one message, got []")
    for i, message in enumerate(value):
        if not isinstance(message, dict) or message.keys() != {"role", "content"}:
            raise ValueError(f"{name}[{i}] must be an object with role and content alone, got {message!r:.100}")
        if message["role"] not in ROLES:
            raise ValueError(f"{name}[{i}].role must be one of {', '.join(ROLES)}, got {message['role']!r:.100}")
        _text(message["content"], f"{name}[{i}].content")
    if value[-1]["role"] == "assistant":
        raise ValueError(f"{name} must end with a message that the model answers, got role 'assistant'")
    return tuple(value)


def _answer(text: str, name: str) -> str:
    if name.rpartition(".")[2] != "solution":
        return text
    boxed = last_boxed(text)
    if boxed is None or not boxed.strip():
        raise ValueError(f"{name} must hold its answer in \\boxed{{...}}, got {text[-100:]!r}")
    return boxed
