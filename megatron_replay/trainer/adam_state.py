"""Adam's state where megatron-core leaves it out: before the first update, and in a distributed optimizer that loads.

Transformer Engine's and apex's Adam count their updates in the parameter groups; torch's AdamW, which runs without
them, on a CPU and on CUDA, counts them for each parameter, in a tensor `step`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def allocate_adam_state(optimizer: MegatronOptimizer) -> None:
    """Moments 0 after 0 updates for every parameter that has no state yet; what is there stays as it is.

    Adam makes its state in its first update, and a checkpoint may be asked for before.
    """
    for part in parts_of(optimizer):
        part.init_state_fn(part.optimizer, part.config)
        if _is_of_torch(part):
            for state in part.optimizer.state.values():
                state.setdefault("step", torch.tensor(0.0))


def use_own_settings(saved: dict[str, Any], optimizer: MegatronOptimizer) -> None:
    """Put what this run's flags say of Adam into a saved state, which megatron-core would take or refuse as a whole.

    The rate and the weight decay of an update are the schedule's, which sets them after loading.
    """
    own = optimizer.param_groups[0]
    for group in saved["param_groups"]:
        group.update({name: own[name] for name in ("max_lr", "min_lr", "betas", "eps")})


def write_count_of_zero(saved: dict[str, Any], optimizer: MegatronOptimizer) -> None:
    """Put the count of updates into a saved state without one: megatron-core leaves a 0 out, and torch looks it up."""
    if "state" in saved and all(map(_is_of_torch, parts_of(optimizer))):
        saved["state"].setdefault("common_step", torch.tensor(0.0))


def parts_of(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers that megatron-core has chained."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def mend_distributed_load() -> None:
    """DistributedOptimizer.load_state_dict over torch's AdamW: `step` is looked up where it is not kept (KeyError),
    copied in place over a leaf view, and shared by all parameters, so that a resumed AdamW advances it once for each
    parameter. With Transformer Engine or apex there is no such `step`, and nothing changes. Twice is once."""
    cls = DistributedOptimizer
    set_states, load = cls._set_main_param_and_optimizer_states, cls.load_state_dict
    if distrib_optimizer.HAVE_APEX_OR_TE or hasattr(load, "__wrapped__"):
        return

    @torch.no_grad()
    def set_without_step(self: Any, param: Any, tensors: dict[str, Any]) -> Any:
        return set_states(self, param, {**tensors, "step": None})

    @functools.wraps(load)
    def load_with_own_steps(self: Any, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    cls._set_main_param_and_optimizer_states = set_without_step
    cls.load_state_dict = load_with_own_steps


def _is_of_torch(part: Any) -> bool:
    return isinstance(part.optimizer, (torch.optim.Adam, torch.optim.AdamW))
