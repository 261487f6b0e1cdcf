"""Philox4x32-10, a counter-based random number generator, in torch integer arithmetic.

A number is a function of (seed, stream, counter): nothing is consumed, so it does not depend on order, batch,
layout or device. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
STREAM_REPLAY_DRAW = 0x5250
STREAM_SAMPLING = 0x5347


def philox4x32(
    counter: tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words from a 4 x 32-bit counter and a 2 x 32-bit key.

    Words of the counter are int64 tensors of shapes that broadcast, or ints, with values in [0, 2^32); so are the
    four words of the result. The products wrap modulo 2^64, whose two halves are the ones the generator asks for.
    """
    c0, c1, c2, c3 = (torch.as_tensor(c, dtype=torch.int64) for c in counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD, (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, stream: int, a: Tensor, b: Tensor | int, c: Tensor | int) -> Tensor:
    """float64 in (0, 1), one for each element of `a` [...]: u = (k + 1/2) 2^-53 with 53 random bits k.

    Counter words: the low and high half of the int64 `a`, then `b` and `c` (in [0, 2^32)). Key words: the low
    half of the seed, and its high half xor the stream.
    """
    b, c = (torch.as_tensor(x, dtype=torch.int64, device=a.device).expand_as(a) for x in (b, c))
    word0, word1, _, _ = philox4x32((a & WORD, a >> 32 & WORD, b, c), (seed & WORD, (seed >> 32 & WORD) ^ stream))
    k = (word0 << 21) | (word1 >> 11)
    # (k + 1/2) 2^-53 rounds to 1 for the largest k alone
    return ((k.double() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-53)
