"""JsonlTask: prompts and answers from a file, one JSON object a line."""

from __future__ import annotations

import json

from megatron_replay.tasks.task import Problem, check_index

FIELDS = ("prompt", "answer")


class JsonlTask:
    """Problems of a JSONL file; its number is the order in the file, blank lines not counted.

    A line is {"prompt": str, "answer": str}; other keys are ignored. Training and held-out problems are two files.
    Raises ValueError that begins with PATH:LINE for a line that does not fit, and for a file without problems.
    """

    def __init__(self, path: str) -> None:
        self._problems: list[Problem] = []
        try:
            with open(path, encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        self._problems.append(_parse(line, f"{path}:{number}", len(self._problems)))
        except OSError as error:
            raise ValueError(f"data_path must name a readable JSONL file, got {path!r}: {error}") from error
        if not self._problems:
            raise ValueError(f"data_path must name a file with at least one problem, got {path!r}")
        self.size: int = len(self._problems)

    def problem(self, index: int) -> Problem:
        check_index(index, self.size)
        return self._problems[index]

    def score(self, problem: Problem, response: str) -> float:
        """1 where response and answer are equal, white space at both ends left out, else 0."""
        return float(response.strip() == problem.answer.strip())


def _parse(line: str, where: str, problem_id: int) -> Problem:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be an object with {' and '.join(FIELDS)}, got {type(row).__name__}")
    for name in FIELDS:
        if not isinstance(row.get(name), str):
            raise ValueError(f"{where}: {name} must be a string, got {row.get(name, 'nothing')!r}")
    return Problem(prompt=row["prompt"], answer=row["answer"], problem_id=problem_id)
