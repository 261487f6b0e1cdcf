"""JsonlTask: prompts and answers from a file, one JSON object a line."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

from megatron_replay.tasks.problem_line import ProblemLine, same_prompt_key
from megatron_replay.tasks.task import Problem, check_index

MOST_LINE_BYTES = 16 << 20  # a longer line is another format, or a file without line ends
NAMED_CONFLICTS = 3  # how many the report names


class JsonlTask:
    """Problems of a JSONL file, numbered in the order of the file; problem_line.py says what a line holds.

    Blank lines do not count. Of lines with equal prompts (same_prompt_key) the first one stays; where their answers
    differ none does, since one of them would be rewarded wrongly. Training and held-out problems are two files.

    `counts`: lines, problems, duplicates (lines left out), conflicting (lines left out). `conflicts` names
    each prompt with differing answers. `sha256` is of the bytes that were read.
    Raises ValueError that begins with PATH:LINE for a line that does not fit, and for a file without problems.
    """

    def __init__(self, path: str, *, prompt_key: str | None = None, answer_key: str | None = None) -> None:
        self.path = path
        self.fields = ProblemLine(prompt_key, answer_key)
        self.conflicts: list[str] = []
        first: dict[str, tuple[int, Problem]] = {}
        conflicting: set[str] = set()
        lines, repeats = 0, dict[str, int]()
        digest = hashlib.sha256()
        try:
            for number, line in _lines(path, digest.update):
                try:
                    problem = self.fields.parse(line, problem_id=0)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: {error}") from error
                lines += 1
                key = same_prompt_key(problem)
                at, known = first.setdefault(key, (number, problem))
                if known is problem:
                    continue
                repeats[key] = repeats.get(key, 0) + 1
                if known.answer.strip() != problem.answer.strip() and key not in conflicting:
                    conflicting.add(key)
                    self.conflicts.append(
                        f"{path}:{at}: {known.answer!r:.50}, and line {number}: {problem.answer!r:.50}"
                    )
        except OSError as error:
            raise ValueError(f"data_path must name a readable JSONL file, got {path!r}: {error}") from error
        self.sha256: str = digest.hexdigest()
        self._problems = _numbered(problem for key, (_, problem) in first.items() if key not in conflicting)
        self.size: int = len(self._problems)
        dropped = sum(1 + repeats[key] for key in conflicting)
        self.counts: dict[str, int] = {
            "lines": lines,
            "problems": self.size,
            "duplicates": lines - self.size - dropped,
            "conflicting": dropped,
        }
        if not self._problems:
            raise ValueError(f"data_path must name a file with at least one problem, got {path!r}: {self.report()}")

    def problem(self, index: int) -> Problem:
        check_index(index, self.size)
        return self._problems[index]

    def score(self, problem: Problem, response: str) -> float:
        """1 where response and answer are equal, white space at both ends left out, else 0."""
        return float(response.strip() == problem.answer.strip())

    def report(self) -> str:
        """What was read and what was left out, for a person."""
        c = self.counts
        said = f"{self.path}: {c['problems']} problems of {c['lines']} lines"
        if c["duplicates"]:
            said += f"; {c['duplicates']} lines left out that repeat a prompt"
        if c["conflicting"]:
            said += f"; {c['conflicting']} lines left out whose prompt has differing answers: "
            said += "; ".join(self.conflicts[:NAMED_CONFLICTS])
            more = len(self.conflicts) - NAMED_CONFLICTS
            said += f"; and {more} more prompts" if more > 0 else ""
        return said


def _lines(path: str, read: Callable[[bytes], None]) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank; `read` is given every line.

    Raises ValueError for a line that is too long.
    """
    with open(path, "rb") as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                raise ValueError(f"{path}:{number}: a line must have at most {MOST_LINE_BYTES} bytes, got more")
            read(line)
            if line.strip():
                yield number, line


def _numbered(problems: Iterator[Problem]) -> list[Problem]:
    return [
        Problem(problem.prompt, problem.answer, index, extra=problem.extra) for index, problem in enumerate(problems)
    ]
