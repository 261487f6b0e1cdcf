from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_replay.ops import backend as backends

OP = "token_logprob"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Modules that are found; everything else is absent."""
    names: set[str] = set()
    monkeypatch.setattr(backends, "_installed", names.__contains__)
    return names


def test_every_op_has_a_reference() -> None:
    assert {"token_logprob", "grpo_loss", "priority_draw", "ragged_gather"} == set(backends.IMPLEMENTATIONS)
    for op, rows in backends.IMPLEMENTATIONS.items():
        assert backends.resolve(op, None, "cpu") == ("cpp" if "cpp" in rows else "reference")
        assert backends.resolve(op, "reference", torch.device("cpu")) == "reference"


def test_loads_the_named_module() -> None:
    assert callable(backends.load("token_logprob", "reference").token_logprob_backward)
    assert callable(backends.load("grpo_loss", "reference").grpo_loss_terms)


def test_import_errors_propagate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.IMPLEMENTATIONS, OP, {"reference": "megatron_replay.ops.not_there"})
    with pytest.raises(ModuleNotFoundError, match="not_there"):
        backends.load(OP, "reference")


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match=r"^op must be one of .*got 'softmax'"):
        backends.resolve("softmax", None, "cpu")
    with pytest.raises(ValueError, match=r"^backend must be one of .*got 'tritn'"):
        backends.resolve(OP, "tritn", "cpu")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_explicit_request_that_is_not_registered(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.IMPLEMENTATIONS, OP, {"reference": "x"})
    with pytest.raises(RuntimeError, match=rf"^backend {backend} cannot run {OP} on cuda: it is not registered"):
        backends.resolve(OP, backend, "cuda")


def test_explicit_request_on_the_wrong_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(RuntimeError, match=rf"^backend triton cannot run {OP} on cpu: it needs a CUDA device"):
        backends.resolve(OP, "triton", "cpu")


def test_interpreter_runs_on_request_only(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> None:
    installed.add("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backends.resolve(OP, "triton", "cpu") == "triton"
    assert backends.resolve(OP, None, "cpu") == "reference"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(RuntimeError, match="it needs a CUDA device"):
        backends.resolve(OP, "triton", "cpu")


def test_fastest_that_can_run(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert backends.resolve(OP, None, "cuda") == "reference"
    with pytest.raises(RuntimeError, match="the module triton is not installed"):
        backends.resolve(OP, "triton", "cuda")
    installed.add("triton")
    assert backends.resolve(OP, None, "cuda") == "triton"
    assert backends.resolve(OP, "reference", "cuda") == "reference"


def test_extension_before_triton(monkeypatch: pytest.MonkeyPatch, installed: set[str]) -> None:
    rows = {"reference": "x", "triton": "y", "cuda": "z"}
    monkeypatch.setitem(backends.IMPLEMENTATIONS, OP, rows)
    installed |= {"triton", "megatron_replay._C"}
    monkeypatch.setattr(backends, "_built_with_cuda", lambda: True)
    assert backends.resolve(OP, None, "cuda:1") == "cuda"


def test_the_compiled_op_runs_where_it_is_built(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.resolve("priority_draw", None, "cpu") == "reference"
    with pytest.raises(RuntimeError, match="the module megatron_replay._C is not installed"):
        backends.resolve("priority_draw", "cpp", "cpu")
    installed.add("megatron_replay._C")
    assert backends.resolve("priority_draw", None, "cpu") == "cpp"
    monkeypatch.setattr(backends, "_built_with_cuda", lambda: True)
    assert backends.resolve("priority_draw", None, "cuda") == "cuda"
    with pytest.raises(RuntimeError, match="backend cpp cannot run priority_draw on cuda: it needs a CPU device"):
        backends.resolve("priority_draw", "cpp", "cuda")


def test_an_extension_without_its_cuda_half_is_no_cuda_backend(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("megatron_replay._C")
    monkeypatch.setattr(backends, "_built_with_cuda", lambda: False)
    assert backends.resolve("priority_draw", None, "cuda") == "reference"
    assert backends.resolve("priority_draw", None, "cpu") == "cpp"
    with pytest.raises(RuntimeError, match="cuda cannot run priority_draw on cuda: .* built without CUDA"):
        backends.resolve("priority_draw", "cuda", "cuda")


@pytest.mark.parametrize(("architectures", "built"), [("", False), ("80;90", True)])
def test_the_extension_says_whether_it_has_a_cuda_half(
    architectures: str, built: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, "extension", lambda: SimpleNamespace(cuda_architectures=lambda: architectures))
    assert backends._built_with_cuda.__wrapped__() is built


def test_resolving_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    name = backends.IMPLEMENTATIONS["priority_draw"]["reference"]
    monkeypatch.delitem(sys.modules, name, raising=False)
    backends.resolve("priority_draw", None, "cpu")
    assert name not in sys.modules
