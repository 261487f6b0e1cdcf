"""WeightSender and WeightReceiver together: every weight, in one order, or an error and a pause that lasts."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from megatron_replay.weight_sync import sender as sender_module
from megatron_replay.weight_sync.error import PlanRefusedError, WeightSyncError
from megatron_replay.weight_sync.hf_mapping import hf_names
from megatron_replay.weight_sync.sender import WeightSender
from tests.transfers import CPU, KeepingEngine, hf_tensors, shape, shards

GOOD = ["pause", "start", "update", "finish", "version", "reset", "resume"]


def make(
    transport: str = "shared-memory", bucket: int = 9_000, tied: bool = False, timeout: float = 10.0
) -> WeightSender:
    (weights,) = shards(shape(tied), 1, 1)
    return WeightSender(weights, transport=transport, bucket_bytes=bucket, device=CPU, timeout=timeout)


@pytest.mark.parametrize("bucket", [1, 9_000, 1 << 30])
@pytest.mark.parametrize("transport", ["in-process", "shared-memory", "gloo"])
@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_ends_up_with_every_tensor_to_the_bit(transport: str, bucket: int, tied: bool) -> None:
    sender = make(transport, bucket, tied)
    engines = [KeepingEngine(shape(tied)) for _ in range(1 if transport == "in-process" else 2)]
    sender.connect(engines)
    for version, seed in enumerate((0, 1, 0)):
        sender.weights.parameters.update(shards(shape(tied), 1, 1, seed)[0].parameters)  # type: ignore[attr-defined]
        report = sender.push(version)
        assert report.nbytes == sender.plan.nbytes > 0 and report.seconds > 0
        for engine in engines:
            expected = hf_tensors(shape(tied), seed)
            assert set(engine.tensors) == set(expected) == hf_names(shape(tied))
            assert all(torch.equal(engine.tensors[n], expected[n]) for n in expected)
            assert engine.version == version
    sender.close()


def test_the_order_of_a_push() -> None:
    engine, sender = KeepingEngine(shape()), make()
    sender.connect([engine])
    sender.push(4)
    assert engine.calls == ["init", *GOOD]


def test_what_was_handed_over_outlives_the_memory_that_carried_it() -> None:
    """An engine may keep tensors until a layer is complete: they must not be views of a slot that is written again."""
    for transport in ("in-process", "shared-memory", "gloo"):
        engine, sender = KeepingEngine(shape()), make(transport, bucket=1)
        sender.connect([engine])
        sender.push(0)
        kept = dict(engine.tensors)
        for x in sender.weights.parameters.values():
            x.fill_(-3)
        sender.push(1)
        assert all(torch.equal(kept[n], x) for n, x in hf_tensors(shape()).items())


def test_a_refused_cache_reset_is_asked_for_again_and_then_fails_without_a_resume(monkeypatch: Any) -> None:
    monkeypatch.setattr(sender_module.time, "sleep", lambda _: None)
    engine, sender = KeepingEngine(shape(), answers={"reset": [False, False]}), make()
    sender.connect([engine])
    sender.push(0)
    assert engine.calls[-4:] == ["reset", "reset", "reset", "resume"]
    engine.answers["reset"] = False
    with pytest.raises(WeightSyncError, match=r"kept refuses to reset its prefix cache"):
        sender.push(1)
    assert engine.calls[-4:] == ["reset"] * 4, "and no resume"


@pytest.mark.parametrize(
    ("answers", "words", "last"),
    [
        ({"pause": RuntimeError("busy")}, "kept: busy", "pause"),
        ({"start": RuntimeError("twice")}, "kept: twice", "start"),
        ({"update": RuntimeError("no room")}, "kept: no room", "update"),
        ({"finish": RuntimeError("half")}, "kept: half", "finish"),
        ({"version": 12}, "kept: kept says weight version 12 after a push of version 3", "version"),
    ],
)
def test_a_failure_anywhere_is_raised_and_the_engine_stays_paused(answers: dict, words: str, last: str) -> None:
    sender, engine, other = make(), KeepingEngine(shape(), answers=answers), KeepingEngine(shape(), name="other")
    sender.connect([engine, other])
    with pytest.raises(WeightSyncError, match=re.escape(words)) as raised:
        sender.push(3)
    assert raised.value.engines == ("kept",), "the other's part ended because of this one"
    assert engine.calls[-1] == last and "resume" not in engine.calls
    with pytest.raises(WeightSyncError, match="call connect first"):
        sender.push(3)
    # a whole push makes any of them good
    engine.answers.clear()
    sender.connect([engine, other])
    sender.push(5)
    for e in (engine, other):
        assert [c for c in e.calls if c != "give up"][-7:] == GOOD and e.version == 5
        assert all(torch.equal(e.tensors[n], x) for n, x in hf_tensors(shape()).items())


def test_another_model_is_refused_before_a_byte_is_sent() -> None:
    sender = make()
    wrong = [
        (KeepingEngine(dataclasses.replace(shape(), ffn_size=64)), "ffn_size must be 48, got 64"),
        (KeepingEngine(shape(), dtype="bfloat16"), "dtype must be float32, got bfloat16"),
        (KeepingEngine(shape(tied=True)), "tied_embeddings must be False, got True"),
        (KeepingEngine(dataclasses.replace(shape(), num_layers=3)), "num_layers must be 2, got 3"),
    ]
    for engine, words in wrong:
        with pytest.raises(PlanRefusedError, match=re.escape(words)):
            sender.connect([engine])
        assert not engine.calls and not engine.tensors


def test_a_parameter_that_changed_since_the_plan_is_named() -> None:
    engine, sender = KeepingEngine(shape()), make()
    sender.connect([engine])
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    sender.weights.parameters[name] = torch.zeros(32, 40)  # type: ignore[index]
    with pytest.raises(WeightSyncError, match=re.escape(f"{name} is ((32, 40), 'float32') now, was ((32, 48)")):
        sender.push(0)
    assert "finish" not in engine.calls and "resume" not in engine.calls


def test_damage_on_the_way_is_noticed(monkeypatch: Any) -> None:
    engine, sender = KeepingEngine(shape()), make()
    sender.connect([engine])
    seal = sender_module.seal

    def spoil(message: torch.Tensor, version: int, bucket: int) -> None:
        seal(message, version, bucket)
        if bucket == 2:
            message[77] ^= 4

    monkeypatch.setattr(sender_module, "seal", spoil)
    with pytest.raises(WeightSyncError, match=r"bucket 2 of weight version 0 from sender 0 arrived damaged"):
        sender.push(0)
    assert "finish" not in engine.calls and "resume" not in engine.calls
