"""Attention of the local layer spec: packed sequences without a mask over the whole pack.

Megatron's own local core attention builds a T x T mask and its unfused RoPE loops over the sequences of a
pack. Here RoPE is one gather by position, and softmax attention runs in torch's variable-length kernel where it
computes (`has_varlen_kernel`), and otherwise sequence by sequence: one SDPA call for each distinct length. With
Transformer Engine none of this is used.

Dims: T tokens of the pack, M members of its sequences (a shared prompt is a member of several), S sequence length,
B batch, h heads, g query groups, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from torch import Tensor


def has_varlen_kernel(device_type: str, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length attention computes there: it is FlashAttention, which has no float32."""
    return device_type == "cuda" and dtype in (torch.float16, torch.bfloat16)


@dataclass
class PackedSequences(PackedSeqParams):
    """PackedSeqParams with what is derived once for a pack and used by every layer."""

    position_ids: Tensor | None = None  # [T] int64
    # of [n, S] int64, token positions of equal-length sequences; none: the variable-length kernel takes the pack
    by_length: list[Tensor] = field(default_factory=list)
    inverse: Tensor | None = None  # [T] int64, where each token first stands in the concatenation of by_length

    @classmethod
    def build(
        cls,
        cu_seqlens: Tensor,
        position_ids: Tensor,
        max_seqlen: int,
        members: Tensor | None = None,
        *,
        dtype: torch.dtype,
    ) -> PackedSequences:
        """cu_seqlens [n+1] int32 over members [M] int64, positions in the pack; without them sequence by sequence.
        position_ids [T]; `dtype` of the activations. The variable-length kernel knows no shared members."""
        groups: list[Tensor] = []
        inverse = None
        device = cu_seqlens.device
        if not has_varlen_kernel(device.type, dtype):
            members = torch.arange(position_ids.numel(), device=device) if members is None else members.to(device)
            lengths, starts = cu_seqlens.diff(), cu_seqlens[:-1].long()
            groups = [
                members[starts[lengths == n][:, None] + torch.arange(n, device=device)]
                for n in torch.unique(lengths).tolist()
                if n > 0
            ]
            flat = torch.cat([at.flatten() for at in groups])
            inverse = torch.full_like(position_ids, flat.numel())
            inverse.scatter_reduce_(0, flat, torch.arange(flat.numel(), device=device), "amin")
        return cls(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
            position_ids=position_ids,
            by_length=groups,
            inverse=inverse,
        )


class PackedSelfAttention(SelfAttention):
    """SelfAttention that gathers the rotary embedding by position and hands the pack on as one row [T, 1, h, d]."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *args: Any,
        rotary_pos_emb: Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if packed_seq_params is not None:
            if rotary_pos_emb is not None:
                rotary_pos_emb = rotary_pos_emb[packed_seq_params.position_ids]  # [T, 1, 1, d]
            # "thd" would send q and k through the per-sequence RoPE loop
            packed_seq_params = replace(packed_seq_params, qkv_format="sbhd")  # type: ignore[call-arg] # of its base
        out: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states,
            attention_mask,
            *args,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **kwargs,
        )
        return out


class SdpaCoreAttention(torch.nn.Module):
    """Causal softmax(q k^T * scale) v on torch SDPA, for packs and for batches with a key-value cache."""

    def __init__(self, *, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        if config.context_parallel_size != 1:
            raise ValueError(f"context_parallel_size must be 1, got {config.context_parallel_size}")
        if config.attention_dropout != 0.0:
            raise ValueError(f"attention_dropout must be 0, got {config.attention_dropout}")
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> Tensor:
        """query [S, B, h, d], key and value [S_kv, B, g, d] -> [S, B, h*d]; a pack has B = 1 and S = T.

        Without a pack, query i sees keys up to i + S_kv - S: the cached prefix and itself.
        """
        if attention_mask is not None:
            raise ValueError(f"attention_mask must be None (attention is causal), got {list(attention_mask.shape)}")
        if packed_seq_params is not None:
            return self._packed(query.squeeze(1), key.squeeze(1), value.squeeze(1), packed_seq_params)
        s, s_kv = query.size(0), key.size(0)
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [B, heads, S, d]
        mask = None
        if 1 < s < s_kv:
            mask = torch.ones(s, s_kv, dtype=torch.bool, device=q.device).tril(s_kv - s)
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=s == s_kv and s > 1,
            scale=self.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, packed: PackedSequences) -> Tensor:
        """q [T, h, d], k and v [T, g, d] -> [T, 1, h*d]."""
        if not packed.by_length:
            from torch.nn.attention.varlen import varlen_attn

            cu, longest = packed.cu_seqlens_q, packed.max_seqlen_q
            gqa = q.size(1) != k.size(1)
            causal = (-1, 0)
            out = varlen_attn(q, k, v, cu, cu, longest, longest, scale=self.scale, window_size=causal, enable_gqa=gqa)
            assert isinstance(out, Tensor)
            return out.flatten(1)[:, None]
        parts = []
        for at in packed.by_length:  # [n, S]
            qs, ks, vs = (x[at].transpose(1, 2) for x in (q, k, v))  # [n, heads, S, d]
            out = F.scaled_dot_product_attention(
                qs, ks, vs, is_causal=True, scale=self.scale, enable_gqa=qs.size(1) != ks.size(1)
            )
            parts.append(out.transpose(1, 2).flatten(0, 1).flatten(1))  # [n*S, h*d]
        return torch.cat(parts)[packed.inverse][:, None]

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """No parameters."""
        return {}


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm with Megatron's mark for sequence parallelism, which its own wrapper refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
