"""The receiving end inside vLLM: a weight-transfer engine under vLLM's own API, found through its plugin entry point.

vLLM loads `register` in each of its processes (entry point `vllm.general_plugins`); an engine that is started with
`--weight-transfer-config '{"backend": "megatron_replay"}'` then takes weights from a WeightSender.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from megatron_replay.engines.vllm_options import BACKEND, PINNED_VLLM
from megatron_replay.weight_sync.error import PlanRefusedError, WeightSyncError
from megatron_replay.weight_sync.model_shape import ModelShape
from megatron_replay.weight_sync.receiver import WeightReceiver
from megatron_replay.weight_sync.transfer_plan import TransferPlan
from megatron_replay.weight_sync.transports.nccl import survive_failed_groups


def register() -> None:
    # a trainer that ends leaves the engine alive
    survive_failed_groups()
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, __name__, "MegatronReplayTransferEngine")


@dataclass
class InitInfo(WeightTransferInitInfo):
    plan: dict[str, Any]
    timeout: float
    addresses: list[dict[str, Any]] = field(default_factory=list)  # of the senders; none: the plan alone is looked at
    first_worker: int = 0  # number of this engine's first worker among the workers of all engines


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: int


class MegatronReplayTransferEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """One worker's end. A push that fails leaves the model whole in structure and mixed in content; only another, whole
    push makes it good."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not vllm.__version__.startswith(PINNED_VLLM + "."):
            raise RuntimeError(f"megatron_replay works with vLLM {PINNED_VLLM}, this is vLLM {vllm.__version__}")
        if self.model_config.quantization is not None:
            raise ValueError(
                f"weights cannot be pushed into a quantized engine, got {self.model_config.quantization!r}"
            )
        self._shape = ModelShape.from_config(self.model_config.hf_config.to_dict(), str(self.model_config.model))
        self._receiver: WeightReceiver | None = None
        self._whole = self._layerwise = False
        self.problem: str | None = None  # of the last call
        self.refused = False  # that problem is one of the plan

    def init_transfer_engine(self, info: InitInfo) -> None:
        with self._kept():
            self.shutdown()
            plan, parallel = TransferPlan.from_json(info.plan), self.parallel_config
            model = self.model_config
            plan.check(self._shape, _name(model.dtype), _name(model.head_dtype), model.logprobs_mode)
            if not info.addresses:
                return
            self._receiver = WeightReceiver(
                plan,
                info.addresses,
                shape=self._shape,
                worker=info.first_worker + parallel.data_parallel_index * parallel.world_size + parallel.rank,
                device=self.device,
                timeout=info.timeout,
            )

    def start_weight_update(self) -> None:
        self._whole = False
        self._layerwise = reads_packed_weights(self.model)
        if self._layerwise:
            # every layer is built again from what is loaded, and packed again
            initialize_layerwise_reload(self.model)

    def receive_weights(self, info: UpdateInfo) -> None:
        with self._kept():
            filled: set[str] = set()
            try:
                if self._receiver is None:
                    raise WeightSyncError("no trainer is connected")
                self._receiver.receive(info.version, lambda some: filled.update(self.model.load_weights(some) or ()))
                if self._shape.tied_embeddings:
                    # the embedding under its second name
                    filled.add("lm_head.weight")
                if lacking := {name for name, _ in self.model.named_parameters()} - filled:
                    raise WeightSyncError(f"{len(lacking)} parameters were not filled, the first is {min(lacking)}")
                self._whole = True
            except BaseException:
                # tells the trainer
                self.shutdown()
                raise

    def finish_weight_update(self) -> None:
        """Also after a push that failed: layers leave their half-loaded state, and the next push starts clean."""
        with self._kept():
            self._finalize()
            if not self._whole:
                raise WeightSyncError("the push was not whole: the engine holds a mixture of weights")

    @contextmanager
    def _kept(self) -> Iterator[None]:
        """What fails is kept for `TransferStatus` and not raised.

        Where one of several workers raises, vLLM leaves the others' replies unread and takes them for the answers to
        later calls.
        """
        self.problem, self.refused = None, False
        try:
            yield
        except Exception as error:
            self.problem = f"{type(error).__name__}: {error}"
            self.refused = isinstance(error, PlanRefusedError)

    def _finalize(self) -> None:
        if not self._layerwise:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        if self._shape.tied_embeddings:
            # vLLM reloads no tied head. Its parameter is the embedding's, but on a CPU its product reads a packed copy,
            # which would stay the old one
            head = self.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        self._receiver = None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def reads_packed_weights(model: torch.nn.Module) -> bool:
    """Whether some layer computes with a packed copy of its weight, made when it was loaded, and not with the weight.

    On a GPU none of an unquantized model does: `load_weights` then writes where the kernels read. On a CPU it depends
    on dtype and instructions: vLLM gives a layer a function that holds the packed copy, or one that holds nothing and
    takes the weight as it is.
    """
    products = [layer.cpu_linear for layer in model.modules() if hasattr(layer, "cpu_linear")]
    return any(getattr(product, "__closure__", None) for product in products)
