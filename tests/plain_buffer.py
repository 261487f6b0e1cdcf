"""The replay buffer in plain Python: lists, integers and math.log. What the tests hold the real one to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

REPLAY_STREAM = 0x5250
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class Row:
    uid: int
    birth_step: int
    advantage: float
    tokens: tuple[int, ...]


@dataclass
class PlainBuffer:
    capacity: int
    arena: int
    tau_max: int
    alpha: float
    eps: float
    seed: int
    rows: list[Row] = field(default_factory=list)

    def push(self, new: list[Row]) -> None:
        for row in new:
            while len(self.rows) >= self.capacity or sum(len(r.tokens) for r in [*self.rows, row]) > self.arena:
                self.rows.pop(0)
            self.rows.append(row)

    def evict(self, step: int) -> None:
        self.rows = [r for r in self.rows if step - r.birth_step <= self.tau_max]

    def draw(self, n: int, step: int) -> list[Row]:
        def key(row: Row) -> float:
            weight = (abs(row.advantage) + self.eps) ** self.alpha
            return math.log(weight) - math.log(-math.log(uniform(self.seed, row.uid, step)))

        return sorted(self.rows, key=lambda r: (-key(r), r.uid))[:n]


def uniform(seed: int, uid: int, step: int, repeat: int = 0) -> float:
    """Philox4x32-10 (Salmon et al., SC 2011) as the paper writes it, and its first 53 bits as a number in (0, 1)."""
    c = [uid & WORD, uid >> 32 & WORD, step, repeat]
    k = [seed & WORD, (seed >> 32 & WORD) ^ REPLAY_STREAM]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k[0], p1 & WORD, p0 >> 32 ^ c[3] ^ k[1], p0 & WORD]
        k = [(k[0] + 0x9E3779B9) & WORD, (k[1] + 0xBB67AE85) & WORD]
    return ((c[0] << 21 | c[1] >> 11) + 0.5) * 2.0**-53
