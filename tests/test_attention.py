"""Which attention a pack takes, and that the one without a kernel of its own works on any device.

What the two compute is in the tests of the policy and of the Hugging Face layouts.
"""

from __future__ import annotations

import pytest
import torch

from tests.single_rank import groups  # noqa: F401  # mends megatron-core before it is imported

from megatron_replay.trainer.attention import PackedSequences, SdpaCoreAttention, has_varlen_kernel  # isort: skip


@pytest.mark.parametrize(
    ("device_type", "dtype", "expected"),
    [
        ("cuda", torch.bfloat16, True),
        ("cuda", torch.float16, True),
        ("cuda", torch.float32, False),
        ("cuda", torch.float64, False),
        ("cpu", torch.bfloat16, False),
        ("cpu", torch.float32, False),
    ],
)
def test_the_variable_length_kernel_is_for_half_precision_on_cuda(
    device_type: str, dtype: torch.dtype, expected: bool
) -> None:
    assert has_varlen_kernel(device_type, dtype) is expected


def build(dtype: torch.dtype, members: torch.Tensor | None = None) -> PackedSequences:
    cu = torch.tensor([0, 3, 5, 8], dtype=torch.int32, device="cpu")
    positions = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2], device="cpu")
    return PackedSequences.build(cu, positions, 3, members, dtype=dtype)


@pytest.mark.parametrize("shared", [False, True])
def test_a_pack_is_grouped_where_it_lies(shared: bool) -> None:
    """Every tensor is made on the pack's device: here the default one holds no data, so one made there would raise."""
    members = torch.tensor([0, 1, 2, 3, 4, 0, 1, 7]) if shared else None
    expected = build(torch.float32, members)
    with torch.device("meta"):
        packed = build(torch.float32, members)
    assert [at.tolist() for at in packed.by_length] == [at.tolist() for at in expected.by_length]
    assert packed.inverse is not None and expected.inverse is not None
    assert packed.inverse.tolist() == expected.inverse.tolist()
    assert [tuple(at.shape) for at in packed.by_length] == [(1, 2), (2, 3)]


def test_a_pack_that_is_not_grouped_goes_to_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causal, with grouped queries, once for the whole pack; q and k are not looked at again."""
    from torch.nn.attention import varlen

    calls = []

    def kernel(q, k, v, cu_q, cu_k, longest_q, longest_k, **options):  # type: ignore[no-untyped-def]
        calls.append((cu_q.tolist(), cu_k.tolist(), longest_q, longest_k, options))
        return q

    monkeypatch.setattr(varlen, "varlen_attn", kernel)
    monkeypatch.setattr("megatron_replay.trainer.attention.has_varlen_kernel", lambda device, dtype: True)
    packed = build(torch.bfloat16)
    assert packed.by_length == []
    attention = SdpaCoreAttention.__new__(SdpaCoreAttention)
    torch.nn.Module.__init__(attention)
    attention.scale = 0.5
    q, kv = torch.randn(8, 1, 4, 16), torch.randn(8, 1, 2, 16)
    out = attention(q, kv, kv, None, packed_seq_params=packed)
    cu = [0, 3, 5, 8]
    assert calls == [(cu, cu, 3, 3, {"scale": 0.5, "window_size": (-1, 0), "enable_gqa": True})]
    assert torch.equal(out, q.flatten(2))
