"""SortDigits: "83052=" is answered by "02358"."""

from __future__ import annotations

from megatron_replay.tasks.task import Problem, Split, check_index, permuted

DIGITS = 5
HELDOUT_SUM = 7  # held out: numbers whose digits add up to 7 modulo 10


class SortDigits:
    """Sort the digits of a five-digit number, leading zeros kept.

    A number is held out where its digits add up to 7 modulo 10: one in ten, whatever its first four digits.
    The sum does not depend on the order, so the splits share neither a prompt nor an answer, for any two seeds,
    and every digit is seen in every place. `seed` picks the order of the problems only.
    """

    def __init__(self, *, split: Split, seed: int) -> None:
        self._heldout = split == "heldout"
        self._seed = seed
        self.size: int = 10 ** (DIGITS - 1) * (1 if self._heldout else 9)

    def problem(self, index: int) -> Problem:
        check_index(index, self.size)
        drawn = permuted(index, self.size, self._seed)
        # the first four digits are free; the last is the held-out one, or one of the nine others
        first, step = (drawn, 0) if self._heldout else (drawn // 9, 1 + drawn % 9)
        digits = f"{first:0{DIGITS - 1}d}"
        last = (HELDOUT_SUM - sum(map(int, digits)) + step) % 10
        number = f"{digits}{last}"
        return Problem(prompt=f"{number}=", answer="".join(sorted(number)), problem_id=index)

    def score(self, problem: Problem, response: str) -> float:
        """1 for the exact answer, else 0."""
        return float(response == problem.answer)
