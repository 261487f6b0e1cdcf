"""Records of samples for tests."""

from __future__ import annotations

from megatron_replay.evaluation.sample_record import SampleRecord


def records(rewards: list[list[float | None]], *, first: int = 0, text: str | None = None) -> list[SampleRecord]:
    """A problem for each list; sample j of problem i has 10 (i + 1) + j tokens and is cut off where j is odd."""
    return [
        SampleRecord(first + i, j, reward, 10 * (i + 1) + j, truncated=j % 2 == 1, text=text)
        for i, row in enumerate(rewards)
        for j, reward in enumerate(row)
    ]
