"""A message that is not what its sender sealed is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.message import ROW, TRAILER_BYTES, checksum, open_sealed, seal

SIZES = [16, 16 * 255, 8 * ROW, 8 * ROW + 16, 3 * 8 * ROW, 3 * 8 * ROW + 16 * 7]


def sealed(size: int, seed: int = 0, version: int = 7, bucket: int = 3) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    message = torch.randint(0, 256, (size + TRAILER_BYTES,), dtype=torch.uint8, generator=g)
    seal(message, version, bucket)
    return message


@pytest.mark.parametrize("size", SIZES)
def test_what_was_sealed_is_opened(size: int) -> None:
    message = sealed(size)
    payload = open_sealed(message, 7, 3, sender=0)
    assert payload.numel() == size and payload.data_ptr() == message.data_ptr()


@given(size=st.sampled_from(SIZES), at=st.integers(0, 10**6), flip=st.integers(1, 255), seed=st.integers(0, 50))
def test_any_changed_byte_is_noticed(size: int, at: int, flip: int, seed: int) -> None:
    message = sealed(size, seed)
    message[at % (size + TRAILER_BYTES)] ^= flip
    with pytest.raises(WeightSyncError):
        open_sealed(message, 7, 3, sender=0)


@given(size=st.sampled_from(SIZES[1:]), first=st.integers(0, 10**6), second=st.integers(0, 10**6))
def test_words_that_changed_places_are_noticed(size: int, first: int, second: int) -> None:
    message = sealed(size)
    words = message[:size].view(torch.int64)
    i, j = first % words.numel(), second % words.numel()
    if i // ROW != j // ROW:
        words[[i, j]] = words[[j, i]]
        with pytest.raises(WeightSyncError, match=r"bucket 3 of weight version 7 from sender 5 arrived damaged"):
            open_sealed(message, 7, 3, sender=5)


def test_another_push_or_bucket_is_named() -> None:
    message = sealed(64)
    with pytest.raises(WeightSyncError, match=r"bucket 3 of weight version 8 .* sender 1, got bucket 3 of version 7"):
        open_sealed(message, 8, 3, sender=1)
    with pytest.raises(WeightSyncError, match=r"bucket 4 of .* got bucket 3 of version 7"):
        open_sealed(message, 7, 4, sender=1)


def test_sums_wrap_as_64_bit_words_do() -> None:
    """Against plain integers modulo 2^64, as the module's docstring says."""
    payload = sealed(8 * ROW * 2 + 32)[:-TRAILER_BYTES]
    words = [int(w) for w in payload.view(torch.int64)]
    rows = [sum(words[i : i + ROW]) for i in range(0, 2 * ROW, ROW)]

    def weighted(values: list[int]) -> int:
        return sum(v * (2 * i + 1) for i, v in enumerate(values))

    assert (weighted(rows) + 3 * weighted(words[2 * ROW :])) % 2**64 == int(checksum(payload)) % 2**64
