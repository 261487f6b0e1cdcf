"""The mend of megatron-core's distributed optimizer: where it is made, and what makes it needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.optimizer import distrib_optimizer

from tests.single_rank import groups  # noqa: F401 - prepares megatron-core for a machine without CUDA

from megatron_replay.trainer import adam_state  # isort: skip

CLASS = distrib_optimizer.DistributedOptimizer


@pytest.fixture
def unmended(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
        """Gives all parameters one count, as megatron-core does."""
        for state in self.optimizer.state.values():
            state["step"] = state_dict["step"]

    monkeypatch.setattr(CLASS, "load_state_dict", load_state_dict)
    # put back after the test
    monkeypatch.setattr(CLASS, "_set_main_param_and_optimizer_states", CLASS._set_main_param_and_optimizer_states)


class Loaded:
    """What the mended method looks at."""

    def __init__(self) -> None:
        self.optimizer = self
        self.state: dict[str, dict[str, torch.Tensor]] = {"a": {}, "b": {}}


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_it_depends_on_whose_adam_runs_and_not_on_cuda(
    cuda: bool, fused: bool, unmended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", fused)
    before = CLASS.load_state_dict
    adam_state.mend_distributed_load()
    mended = CLASS.load_state_dict
    assert (mended is before) == fused
    adam_state.mend_distributed_load()
    assert CLASS.load_state_dict is mended
    loaded = Loaded()
    CLASS.load_state_dict(loaded, {"step": torch.tensor(3.0)})  # type: ignore[arg-type]
    first, second = (state["step"] for state in loaded.state.values())
    first += 1
    assert float(second) == (4.0 if fused else 3.0)
