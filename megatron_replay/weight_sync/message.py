"""The message that one sender sends for one bucket: its shards, then a trailer that says what they are.

    [shard | shard | ... | version, bucket, checksum of rows, checksum of columns]      bytes, trailer 4 x int64

The checksum is two sums of the payload's 64-bit words modulo 2^64, over rows of 512 words and over columns, weighted by
odd numbers that differ: a word that is lost, changed or in another place changes one of them. Sums run on the
device of the payload at the speed of its memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.transfer_plan import Bucket

TRAILER_WORDS = 4
TRAILER_BYTES = 8 * TRAILER_WORDS
ROW = 512  # words


def message_bytes(bucket: Bucket, sender: int) -> int:
    return bucket.payload_bytes(sender) + TRAILER_BYTES


def checksum(payload: Tensor) -> Tensor:
    """[2] int64 of a uint8 payload whose size is a multiple of 16 and whose memory is aligned to 8 bytes."""
    words = payload.view(torch.int64)
    whole = words.numel() // ROW * ROW
    rows, rest = words[:whole].view(-1, ROW), words[whole:]
    by_row = _weighted(rows.sum(1)) + 3 * _weighted(rest)
    by_column = _weighted(rows.sum(0)) + 5 * _weighted(rest)
    return torch.stack([by_row, by_column])


def seal(message: Tensor, version: int, bucket_index: int) -> None:
    """Write the trailer behind the payload that the message already holds."""
    payload, trailer = message[:-TRAILER_BYTES], message[-TRAILER_BYTES:].view(torch.int64)
    trailer[:2].copy_(torch.tensor([version, bucket_index]))
    trailer[2:].copy_(checksum(payload))


def open_sealed(message: Tensor, version: int, bucket_index: int, sender: int) -> Tensor:
    """The payload. Raises WeightSyncError unless the trailer names this push and bucket and the bytes are whole."""
    payload, trailer = message[:-TRAILER_BYTES], message[-TRAILER_BYTES:].view(torch.int64)
    *place, sum_rows, sum_columns = trailer.tolist()
    if place != [version, bucket_index]:
        raise WeightSyncError(
            f"bucket {bucket_index} of weight version {version} was expected from sender {sender}, "
            f"got bucket {place[1]} of version {place[0]}"
        )
    if checksum(payload).tolist() != [sum_rows, sum_columns]:
        raise WeightSyncError(
            f"bucket {bucket_index} of weight version {version} from sender {sender} arrived damaged (checksum)"
        )
    return payload


def _weighted(words: Tensor) -> Tensor:
    """Sum of words[i] * (2 i + 1), modulo 2^64."""
    odd = torch.arange(1, 2 * words.numel() + 1, 2, dtype=torch.int64, device=words.device)
    return (words * odd).sum()
