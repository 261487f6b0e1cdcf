from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
# float32 is compared as float32, also where NVIDIA's images turn TF32 on
torch.set_float32_matmul_precision("highest")


def asks_for_gpus(expression: str) -> bool:
    """Whether the expression of -m picks the tests of a GPU."""
    return re.search(r"(?<!\bnot )\bgpu\b", expression) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """GPUs are for `-m gpu`. All else compares float32 with results of a CPU, or starts more processes than there are
    GPUs, and runs on the CPU on every machine."""
    if not asks_for_gpus(config.option.markexpr):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # without a GPU the Triton kernels run in its interpreter, which triton decides on when it is imported
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        import tests.triton_interpreter  # noqa: F401


@pytest.fixture
def device() -> torch.device:
    """Where Triton kernels run: the GPU, or the CPU in the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN, or the largest integer, until something is written to them."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


# files whose tests share one vLLM server, which is started once for them
SHARE_A_SERVER = {"test_request_pool", "test_vllm_client", "test_vllm_command"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Files go whole to a process of pytest-xdist, where it is there: what a file's fixtures start is started once."""
    from xdist.scheduler import LoadScopeScheduling

    class WholeFiles(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "vllm-server" if Path(file).stem in SHARE_A_SERVER else file

    return WholeFiles(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The kernel tests are GPU tests where there is a GPU in view. Files with slow tests come first, not last."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if torch.cuda.is_available() and "device" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(1234)
    torch.manual_seed(1234)
