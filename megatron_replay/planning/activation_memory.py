"""Bytes that the backward pass of one microbatch needs on a rank: what autograd saves, tensor by tensor.

Dims: T tokens of a packed microbatch, H hidden; of one tensor-parallel rank: q rows of the query heads, k rows of the
key heads (and as many of the value heads), a and g the numbers of those heads, F rows of the feed-forward layer; d head
dimension; S the tensor-parallel size under sequence parallelism, else 1; e bytes of the dtype. The local layers on a
CPU are counted exactly. On a GPU a norm is one kernel, and attention keeps what its definition says: not measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from megatron_replay.weight_sync.model_shape import ModelShape

Device = Literal["cpu", "cuda"]
STATISTIC = 4  # bytes of a row's float32 statistic


@dataclass(frozen=True)
class ActivationModel:
    """What one rank saves, for one tensor-parallel size and dtype."""

    shape: ModelShape
    dtype: torch.dtype
    tensor: int = 1
    sequence_parallel: bool = False
    recompute: bool = False
    device: Device = "cuda"

    @property
    def split(self) -> int:
        return self.tensor if self.sequence_parallel else 1

    @property
    def query_rows(self) -> int:
        return self.shape.num_heads // self.tensor * self.shape.head_dim

    @property
    def key_rows(self) -> int:
        # with more ranks than key-value heads each rank attends to one of them
        return max(1, self.shape.num_kv_heads // self.tensor) * self.shape.head_dim

    @property
    def ffn_rows(self) -> int:
        return self.shape.ffn_size // self.tensor

    def saved(self, tokens: int, layers: int, *, first: bool, last: bool, longest: int) -> int:
        """Of a stage with `layers` layers, the embedding if `first`, the final norm if `last`. Without recomputation
        every tensor of every layer; with it each layer's input, and the rotary embedding of the `longest` sequence."""
        hidden = self.dtype.itemsize * self.shape.hidden_size * tokens // self.split
        total = layers * (hidden if self.recompute else self.layer(tokens))
        if first:
            # ids, and which of them lie in this rank's part of the vocabulary
            total += (8 + (self.tensor > 1)) * tokens
        if self.recompute:
            total += 4 * self.shape.head_dim * longest
        elif self.device == "cpu":
            # the positions that packed attention gathers by, and their inverse
            total += 2 * 8 * tokens
        if last:
            total += self._norm(tokens // self.split)
        else:
            # the stage's output, kept until its gradient comes back
            total += hidden
        return total

    def layer(self, tokens: int) -> int:
        """Of one layer: attention's norm and products, then those of the feed-forward layer."""
        e, hidden, rows = self.dtype.itemsize, self.shape.hidden_size, tokens // self.split
        linear_inputs = 2 * e * hidden * rows
        return 2 * self._norm(rows) + linear_inputs + self._attention(tokens) + self._feed_forward(tokens)

    def working(self, tokens: int) -> int:
        """The most that is alive at once inside a layer of a forward-only pass: around the feed-forward layer."""
        return self.dtype.itemsize * tokens * (2 * self.shape.hidden_size + 5 * self.ffn_rows)

    def cache(self, rows: int, length: int, layers: int) -> int:
        """Keys and values of a generation batch: allocated for `rows` sequences of `length`."""
        return layers * 2 * rows * length * self.key_rows * self.dtype.itemsize

    @property
    def _upcasts(self) -> bool:
        """torch's RMS norm on a CPU is a chain of operations in float32, on a GPU one kernel."""
        return self.device == "cpu"

    def _norm(self, rows: int, width: int | None = None) -> int:
        """Input and statistic of a row; on a CPU the float32 input, statistic and quotient."""
        width = width or self.shape.hidden_size
        if self._upcasts:
            return rows * (2 * 4 * width + STATISTIC)
        return rows * (self.dtype.itemsize * width + STATISTIC)

    def _attention(self, tokens: int) -> int:
        e, q, k, d = self.dtype.itemsize, self.query_rows, self.key_rows, self.shape.head_dim
        heads, key_heads = q // d, k // d
        # query, key, value and output of softmax attention, and its statistic for each head
        saved = e * (2 * q + 2 * k) + STATISTIC * heads
        # cosine and sine, for query and for key
        saved += 4 * e * d
        if self._upcasts:
            # the output in the order of the pack
            saved += e * q
        if self.shape.qk_norm:
            saved += self._norm(heads, d) + self._norm(key_heads, d)
        # a view of the fused query, key and value keeps all of it alive: on a CPU what a norm takes as it is, on a GPU
        # the value too; with one key head the query is a view as well
        takes_views = self.shape.qk_norm and (not self._upcasts or e == 4)
        views = takes_views * (k + (q if key_heads == 1 else 0)) + (0 if self._upcasts else k)
        if views:
            saved += e * (q + 2 * k - views)
        return tokens * saved

    def _feed_forward(self, tokens: int) -> int:
        """Gate and up in one, the activated gate, the copy of up that Megatron's offset makes, and their product."""
        return tokens * self.dtype.itemsize * 5 * self.ffn_rows
