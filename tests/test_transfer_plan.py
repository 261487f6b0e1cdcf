"""What is sent, in which buckets; and that an engine of another model refuses it."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_replay.weight_sync.error import WeightSyncError
from megatron_replay.weight_sync.hf_mapping import hf_names
from megatron_replay.weight_sync.transfer_plan import ALIGNMENT, Entry, TransferPlan, local_entries, make_plan
from tests.transfers import shape, shards

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]


def plan_of(tensor_size: int, pipeline_size: int, bucket: int, tied: bool = False) -> TransferPlan:
    held = shards(shape(tied), tensor_size, pipeline_size)
    entries = [local_entries(w, rank) for rank, w in enumerate(held)]
    return make_plan(entries, held[0].padded_vocab, bucket)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_sent_once_by_a_rank_that_holds_it(layout: tuple[int, int], tied: bool) -> None:
    held = shards(shape(tied), *layout)
    for bucket_bytes in (1, 5_000, 1 << 30):
        plan = plan_of(*layout, bucket_bytes, tied)
        plan.check(shape(tied), "float32")
        entries = [e for b in plan.buckets for e in b.entries]
        assert len({e.name for e in entries}) == len(entries)
        for e in entries:
            for sender in e.senders:
                assert tuple(held[sender].parameters[e.name].shape) == e.shard_shape
        copies = [n for n in ("output_layer.weight",) if tied]
        replicated = {e.name for e in entries if len(e.senders) == 1 and layout[0] > 1}
        expected = sum(
            x.numel() * 4
            for rank, w in enumerate(held)
            for n, x in w.parameters.items()
            if n not in copies and not (n in replicated and rank % layout[0])
        )
        assert plan.nbytes == expected


def test_tied_embeddings_travel_once_although_the_last_stage_holds_a_copy() -> None:
    plan = plan_of(2, 2, 1 << 30, tied=True)
    embeddings = [e for b in plan.buckets for e in b.entries if "embedding" in e.name or "output_layer" in e.name]
    assert [(e.name, e.senders) for e in embeddings] == [("embedding.word_embeddings.weight", (0, 1))]


@given(bucket=st.integers(1, 40_000), layout=st.sampled_from(LAYOUTS))
def test_buckets_are_bounded_and_a_larger_parameter_goes_alone(bucket: int, layout: tuple[int, int]) -> None:
    plan = plan_of(*layout, bucket)
    for b in plan.buckets:
        size = sum(b.payload_bytes(s) for s in b.senders)
        assert size <= bucket or len(b.entries) == 1
    order = [e.name for b in plan.buckets for e in b.entries]
    assert order == [e.name for b in plan_of(*layout, 1 << 30).buckets for e in b.entries]
    assert max(b.payload_bytes(s) for b in plan.buckets for s in b.senders) == max(
        plan.largest_payload(s) for s in range(plan.senders)
    )


def test_parameters_begin_where_any_dtype_may() -> None:
    plan = plan_of(2, 1, 1 << 30)
    for sender in (0, 1):
        offsets = plan.buckets[0].offsets(sender)
        assert all(at % ALIGNMENT == 0 for at in offsets.values())
        ends = [offsets[e.name] + e.shard_bytes for e in plan.buckets[0].entries if sender in e.senders]
        assert all(end <= at for end, at in zip(ends, list(offsets.values())[1:], strict=False))
        assert ends[-1] <= plan.buckets[0].payload_bytes(sender)
    norms = {e.name for e in plan.buckets[0].entries if "norm" in e.name}
    assert norms and not norms & set(plan.buckets[0].offsets(1)), "the first rank of a stage sends what all hold"


def test_the_plan_survives_json() -> None:
    plan = plan_of(2, 2, 5_000)
    assert TransferPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def changed(plan: TransferPlan, name: str, *new: Entry) -> TransferPlan:
    buckets = tuple(
        dataclasses.replace(b, entries=tuple(x for e in b.entries for x in (new if e.name == name else (e,))))
        for b in plan.buckets
    )
    return dataclasses.replace(plan, buckets=buckets)


QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


def test_another_model_is_refused_by_name() -> None:
    plan = plan_of(2, 1, 1 << 30)
    (entry,) = [e for b in plan.buckets for e in b.entries if e.name == QKV]
    replace = dataclasses.replace
    faults = [
        (changed(plan, QKV), r"sends no model\.layers\.1\.self_attn\.k_proj\.weight, and 2 more are missing"),
        (changed(plan, QKV, entry, entry), r"sends model\.layers\.1\.self_attn\.k_proj\.weight twice"),
        (changed(plan, QKV, replace(entry, dtype="bfloat16")), r"linear_qkv\.weight is bfloat16 .* float32 in the eng"),
        (changed(plan, QKV, replace(entry, shard_shape=(32, 32))), r"is \[64, 32\] in the .* needs \[128, 32\]"),
        (changed(plan, QKV, replace(entry, senders=(0,))), r"is \[64, 32\] in the trainer"),
        (changed(plan, QKV, replace(entry, name="decoder.layers.9.mlp.linear_fc1.weight")), r"layers\.9\.mlp"),
        (changed(plan, QKV, replace(entry, name="decoder.layers.1.mlp.bogus.weight")), r"engine's model lacks.*bogus"),
        (replace(plan, padded_vocab=48), r"embedding\.word_embeddings\.weight is \[40, 32\] .* needs \[48, 32\]"),
    ]
    plan.check(shape(), "float32")
    for fault, words in faults:
        with pytest.raises(WeightSyncError, match=words):
            fault.check(shape(), "float32")
    with pytest.raises(WeightSyncError, match="lm_head"):
        plan_of(1, 1, 1, tied=True).check(shape(), "float32")
    assert "lm_head.weight" not in hf_names(shape(tied=True))
