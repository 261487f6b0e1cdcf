from __future__ import annotations

import random

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(1234)
    torch.manual_seed(1234)
