from __future__ import annotations

import pytest
import torch

from megatron_replay.ops import philox
from megatron_replay.ops.philox import STREAM_REPLAY_DRAW, STREAM_SAMPLING, philox4x32, uniform

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    words = philox4x32(tuple(torch.tensor([c, c]) for c in counter), key)  # type: ignore[arg-type]
    assert [w.tolist() for w in words] == [[e, e] for e in expected]
    assert [int(w) for w in philox4x32(counter, key)] == list(expected)  # type: ignore[arg-type]


def test_uniform_is_a_function_of_each_of_its_arguments() -> None:
    a = torch.arange(1000)
    base = uniform(5, STREAM_SAMPLING, a, 3, 2)
    for other in (
        uniform(6, STREAM_SAMPLING, a, 3, 2),
        uniform(5 + 2**32, STREAM_SAMPLING, a, 3, 2),
        uniform(5, STREAM_REPLAY_DRAW, a, 3, 2),
        uniform(5, STREAM_SAMPLING, a + 2**32, 3, 2),
        uniform(5, STREAM_SAMPLING, a, 4, 2),
        uniform(5, STREAM_SAMPLING, a, 3, 1),
    ):
        assert not bool((base == other).any())
    assert torch.equal(base[500:], uniform(5, STREAM_SAMPLING, a[500:], 3, 2))
    assert torch.equal(base, uniform(5, STREAM_SAMPLING, a, torch.full((1000,), 3), torch.tensor(2)))


def test_uniform_is_inside_the_open_interval_and_flat() -> None:
    u = uniform(1, STREAM_SAMPLING, torch.arange(-50_000, 50_000), 0, 0)
    assert u.dtype == torch.float64 and float(u.min()) > 0 and float(u.max()) < 1
    counts = torch.histc(u.float(), 20, 0, 1)
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8  # 19 degrees of freedom, p = 0.001
    assert u.unique().numel() == u.numel()


@pytest.mark.parametrize("word", [0, philox.WORD])
def test_the_extreme_bits_give_neither_0_nor_1(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox, "philox4x32", lambda counter, key: (torch.full_like(counter[0], word),) * 4)
    u = uniform(0, STREAM_SAMPLING, torch.zeros(1, dtype=torch.int64), 0, 0)
    assert 0 < u.item() < 1 and torch.isfinite((-u.log()).log()).all()


def test_a_negative_a_is_its_two_words() -> None:
    a = torch.tensor([-1])
    word0, word1, _, _ = philox4x32((0xFFFFFFFF, 0xFFFFFFFF, 7, 2), (9, STREAM_SAMPLING))
    k = (int(word0) << 21) | (int(word1) >> 11)
    assert uniform(9, STREAM_SAMPLING, a, 7, 2).item() == (k + 0.5) * 2.0**-53
