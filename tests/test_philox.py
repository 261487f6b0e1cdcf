from __future__ import annotations

import pytest
import torch

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
