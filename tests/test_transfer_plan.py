"""What is sent, in which buckets; and that an engine of another model refuses it."""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_replay.weight_sync.error import PlanRefusedError, WeightSyncError
from megatron_replay.weight_sync.hf_mapping import hf_names
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.transfer_plan import (
    ALIGNMENT,
    LOGPROBS_MODE,
    Entry,
    TransferPlan,
    local_entries,
    make_plan,
)
from tests.transfers import CONFIG, shape, shards

LAYOUTS = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)]


def plan_of(tensor_size: int, pipeline_size: int, bucket: int, tied: bool = False) -> TransferPlan:
    held = shards(shape(tied), tensor_size, pipeline_size)
    entries = [local_entries(w, rank) for rank, w in enumerate(held)]
    return make_plan(entries, held[0].shape, held[0].padded_vocab, bucket)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_sent_once_by_a_rank_that_holds_it(layout: tuple[int, int], tied: bool) -> None:
    held = shards(shape(tied), *layout)
    for bucket_bytes in (1, 5_000, 1 << 30):
        plan = plan_of(*layout, bucket_bytes, tied)
        check(plan, shape(tied))
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


# no deadline: it would fail on a machine that has other work
@settings(deadline=None)
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


def check(plan: TransferPlan, of: ModelShape, dtype: str = "float32", **changes: str) -> None:
    plan.check(of, dtype, **({"head_dtype": dtype, "logprobs_mode": LOGPROBS_MODE} | changes))


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
    check(plan, shape())
    for fault, words in faults:
        with pytest.raises(WeightSyncError, match=words):
            check(fault, shape())
    tied = replace(plan_of(1, 1, 1, tied=True), model=plan.model)
    with pytest.raises(WeightSyncError, match="lm_head"):
        check(tied, shape())
    assert "lm_head.weight" not in hf_names(shape(tied=True))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_theta": 1e6}, r"rope_theta must be 10000\.0, got 1000000\.0$"),
        ({"rms_norm_eps": 1e-5}, r"rms_norm_eps must be 1e-06, got 1e-05$"),
        # the same weights in the same shapes, cut into other heads
        (
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
            r"num_heads must be 4, got 8; num_kv_heads must be 2, got 4; head_dim must be 16, got 8$",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                              "original_max_position_embeddings": 8192}},
            r"rope_scaling_factor must be None, got 8\.0$",
        ),
        ({"max_position_embeddings": 4096}, None),
    ],
)  # fmt: skip
def test_an_engine_that_computes_another_function_of_the_weights_refuses_them(
    config: dict[str, Any], words: str | None
) -> None:
    plan = TransferPlan.from_json(json.loads(json.dumps(plan_of(1, 1, 1 << 30).to_json())))
    other = ModelShape.from_config(CONFIG | config, "config of a test")
    with pytest.raises(PlanRefusedError, match=f"model is not the trainer's: {words}") if words else nullcontext():
        check(plan, other)


def test_the_precision_of_the_head_and_what_log_probs_are_of_are_compared() -> None:
    (weights,) = shards(shape(), 1, 1)
    entries = [local_entries(weights, 0)]
    exact = make_plan(entries, shape(), weights.padded_vocab, 1, fp32_lm_head=True)
    check(exact, shape())
    half = [[dataclasses.replace(e, dtype="bfloat16") for e in entries[0]]]
    plain = make_plan(half, shape(), weights.padded_vocab, 1)
    check(plain, shape(), "bfloat16")
    exact = make_plan(half, shape(), weights.padded_vocab, 1, fp32_lm_head=True)
    check(exact, shape(), "bfloat16", head_dtype="float32")
    with pytest.raises(PlanRefusedError, match=r": head_dtype must be float32, got bfloat16$"):
        check(exact, shape(), "bfloat16")
    with pytest.raises(PlanRefusedError, match=r": head_dtype must be bfloat16, got float32$"):
        check(plain, shape(), "bfloat16", head_dtype="float32")
    with pytest.raises(PlanRefusedError, match=r": logprobs_mode must be processed_logprobs, got raw_logprobs$"):
        check(plain, shape(), "bfloat16", logprobs_mode="raw_logprobs")
    with pytest.raises(PlanRefusedError, match=r": dtype must be bfloat16, got float32; head_dtype must be"):
        check(plain, shape())
