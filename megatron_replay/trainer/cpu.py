"""CPU portability: what megatron-core needs to run where torch has no CUDA.

`install()` runs before the first model is built. With CUDA it changes nothing. Without CUDA it mends the
places listed in MENDS, each of which says what breaks there; `torch.cuda.is_available()` stays False and
every tensor stays on the CPU. The places were read in one version, so any other version is refused.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import queue
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

TESTED_MEGATRON_CORE = ("0.19.2",)
CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Check the megatron-core version, then mend it for the CPU if there is no CUDA. Safe to call twice."""
    global _installed
    check_version(importlib.metadata.version("megatron-core"))
    if _installed or torch.cuda.is_available():
        return
    for mend in MENDS:
        mend()
    _installed = True


def check_version(version: str) -> None:
    """Raise RuntimeError unless this megatron-core version was tested with the trainer."""
    if version not in TESTED_MEGATRON_CORE:
        raise RuntimeError(
            f"megatron-core {version} is untested with this trainer; install megatron-core=={TESTED_MEGATRON_CORE[-1]}"
        )


def _core(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _jit_fuser() -> None:
    """`@jit_fuser` of megatron/core/jit.py is torch.compile, which loads inductor when megatron.core is imported,
    seconds on every rank, and needs a C++ compiler when such a function first runs. Here they run as written."""
    compiler = torch.compile
    torch.compile = lambda model=None, **_: (lambda fn: fn) if model is None else model  # type: ignore[assignment]
    try:
        _core("jit").disable_jit_fuser()
    finally:
        torch.compile = compiler


def _unconditional_triton_import() -> None:
    """transformer/moe/ops/paged_stash.py imports triton even for dense models; where it is missing, a module
    whose kernels raise takes its place."""
    if importlib.util.find_spec("triton") is not None:
        return
    stub = types.ModuleType("megatron.core.transformer.moe.ops.paged_stash")

    def unavailable(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("the mixture-of-experts paged-stash kernels need triton")

    stub.__dict__.update(
        GLOBAL_BLOCK_SIZE=1024, paged_stash_copy_kernel=unavailable, paged_stash_pop_kernel=unavailable
    )
    sys.modules[stub.__name__] = stub


def _current_device() -> None:
    """`device=torch.cuda.current_device()` in tensor_parallel/{mappings,layers}, utils, transformer/attention,
    rotary_pos_embedding, p2p_communication, param_and_grad_buffer, distrib_optimizer and the checkpoint writers."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]


def _synchronize() -> None:
    """`torch.cuda.synchronize()` around pipeline sends in pipeline_parallel/p2p_communication."""
    torch.cuda.synchronize = lambda device=None: None


def _current_stream() -> None:
    """`torch.cuda.current_stream()` in distributed/param_and_grad_buffer: there is one order of execution."""

    class OneOrder:
        def wait_stream(self, _stream: Any) -> None: ...

        def wait_event(self, _event: Any) -> None: ...

        def synchronize(self) -> None: ...

    torch.cuda.current_stream = lambda device=None: OneOrder()  # type: ignore[assignment,return-value]


def _rng_tracker() -> None:
    """tensor_parallel/random keeps named streams of the CUDA generator: here of the CPU generator."""
    random = _core("tensor_parallel.random")

    class CpuRNGStatesTracker(random.CudaRNGStatesTracker):  # type: ignore[name-defined,misc]
        def add(self, name: str, seed: int) -> None:
            if seed in self.seeds_ or name in self.states_:
                raise ValueError(f"rng stream {name!r} with seed {seed} exists already")
            self._is_initialized = True
            self.seeds_.add(seed)
            self.states_[name] = torch.Generator().manual_seed(seed).get_state()

        @contextlib.contextmanager
        def fork(self, name: str = random._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
            outer = torch.get_rng_state()
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()
                torch.set_rng_state(outer)

    random.CudaRNGStatesTracker = CpuRNGStatesTracker
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)


class _TorchOnCpu(types.ModuleType):
    """`torch` as one module sees it: factories asked for device="cuda" allocate on the CPU."""

    FACTORIES = frozenset(("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like"))

    def __getattr__(self, name: str) -> Any:
        real = getattr(torch, name)
        if name not in self.FACTORIES:
            return real

        @functools.wraps(real)
        def factory(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device")).startswith("cuda"):
                kwargs["device"] = CPU
            return real(*args, **kwargs)

        return factory


def _literal_cuda_device() -> None:
    """`device="cuda"` written out in these modules of megatron/core."""
    for name in (
        "pipeline_parallel.schedules",
        "transformer.utils",
        "optimizer.optimizer",
        "optimizer.clip_grads",
        "optimizer.grad_scaler",
        "utils",
        "dist_checkpointing.exchange_utils",
        "dist_checkpointing.strategies.state_dict_saver",
    ):
        _core(name).torch = _TorchOnCpu("torch")


def _while_running(fn: Callable[..., Any], method: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """fn, with torch.Tensor.<method> replaced while it runs and put back afterwards."""

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        real = getattr(torch.Tensor, method)
        setattr(torch.Tensor, method, replacement)
        try:
            return fn(*args, **kwargs)
        finally:
            setattr(torch.Tensor, method, real)

    return wrapped


def _type_names() -> None:
    """`tensor.type() == "torch.cuda.FloatTensor"` in optimizer/{clip_grads,distrib_optimizer,optimizer}."""
    real_type = torch.Tensor.type

    def cuda_type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        out = real_type(self, *args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if isinstance(out, str) else out

    optimizer, distributed = _core("optimizer.optimizer"), _core("optimizer.distrib_optimizer")
    optimizer.clip_grad_by_total_norm_fp32 = _while_running(
        optimizer.clip_grad_by_total_norm_fp32, "type", cuda_type_name
    )
    for cls in (optimizer.Float16OptimizerWithFloat16Params, distributed.DistributedOptimizer):
        cls.__init__ = _while_running(cls.__init__, "type", cuda_type_name)


def _tied_embedding_cuda_call() -> None:
    """`weight.data.cuda()` for tied embeddings under PP > 1 in models/common/language_module."""
    language_module = _core("models.common.language_module.language_module").LanguageModule
    language_module.setup_embeddings_and_output_layer = _while_running(
        language_module.setup_embeddings_and_output_layer, "cuda", lambda self, *args, **kwargs: self
    )


def _checkpoint_results_queue() -> None:
    """dist_checkpointing/strategies/filesystem_async.py starts a process on the first save, only to hold a queue;
    it imports the whole training script again, which takes longer than the quickstart's save. A save that is not
    asynchronous writes in threads of this process, for which a plain queue does."""
    writer = _core("dist_checkpointing.strategies.filesystem_async")
    writer._results_queue = queue.Queue()


MENDS: tuple[Callable[[], None], ...] = (
    _unconditional_triton_import,
    _jit_fuser,
    _current_device,
    _synchronize,
    _current_stream,
    _rng_tracker,
    _literal_cuda_device,
    _type_names,
    _tied_embedding_cuda_call,
    _checkpoint_results_queue,
)
