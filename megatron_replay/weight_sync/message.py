"""The message that one sender sends for one bucket: its shards, then a trailer that says what they are.

    [shard | shard | ... | version, bucket, bytes of the payload, checksum]      trailer 4 x int64

The checksum is the sum, modulo 2^64, of the payload's rows of 64 words of 64 bits, each row's sum weighted by an odd
number of its own. A word that is lost, changed or in another row changes it; words that change places within 512 bytes
do not. It runs on the payload's device, at the speed of its memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.transfer_plan import Bucket

TRAILER_WORDS = 4
TRAILER_BYTES = 8 * TRAILER_WORDS
ROW = 64  # words


def message_bytes(bucket: Bucket, sender: int) -> int:
    return bucket.payload_bytes(sender) + TRAILER_BYTES


def checksum(payload: Tensor) -> Tensor:
    """int64 of a uint8 payload whose size is a multiple of 16 and whose memory is aligned to 8 bytes."""
    words = payload.view(torch.int64)
    whole = words.numel() // ROW * ROW
    return _weighted(words[:whole].view(-1, ROW).sum(1)) + 3 * _weighted(words[whole:])


def seal(message: Tensor, version: int, bucket_index: int) -> None:
    """Write the trailer behind the payload that the message already holds."""
    payload, trailer = message[:-TRAILER_BYTES], message[-TRAILER_BYTES:].view(torch.int64)
    trailer[:3].copy_(torch.tensor([version, bucket_index, payload.numel()]))
    trailer[3].copy_(checksum(payload))


def open_sealed(message: Tensor, version: int, bucket_index: int, sender: int) -> Tensor:
    """The payload. Raises WeightSyncError unless the trailer names this push and bucket and the bytes are whole."""
    payload, trailer = message[:-TRAILER_BYTES], message[-TRAILER_BYTES:].view(torch.int64)
    *place, size, expected = trailer.tolist()
    if place != [version, bucket_index]:
        raise WeightSyncError(
            f"bucket {bucket_index} of weight version {version} was expected from sender {sender}, "
            f"got bucket {place[1]} of version {place[0]}"
        )
    if size != payload.numel() or int(checksum(payload)) != expected:
        raise WeightSyncError(
            f"bucket {bucket_index} of weight version {version} from sender {sender} arrived damaged (checksum)"
        )
    return payload


def _weighted(words: Tensor) -> Tensor:
    """Sum of words[i] * (2 i + 1), modulo 2^64."""
    odd = torch.arange(1, 2 * words.numel() + 1, 2, dtype=torch.int64, device=words.device)
    return (words * odd).sum()
