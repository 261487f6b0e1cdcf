from __future__ import annotations

import pytest
import torch

from megatron_replay.ops.grpo_loss import GrpoLossOptions, grpo_loss_terms
from tests.numerics import random_case


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"behavior_logprobs": None}, r"^behavior_logprobs must be a tensor \[55\], got None"),
        ({"behavior_logprobs": torch.zeros(54)}, r"^behavior_logprobs must be \[55\] on cpu, got \[54\]"),
        ({"policy_logprobs": torch.zeros(55, dtype=torch.int64)}, r"^policy_logprobs must be floating point"),
        ({"advantage": torch.zeros(5)}, r"^cu_seqlens must be \[6\]"),
        ({"cu_seqlens": torch.zeros(7, dtype=torch.int64)}, r"^cu_seqlens must be torch.int32, got torch.int64"),
        ({"cu_seqlens": torch.tensor([0, 9, 5, 9, 9, 9, 55], dtype=torch.int32)}, r"^cu_seqlens must rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 0, 0, 0, 0, 0, 56], dtype=torch.int32)}, r"^cu_seqlens must rise from 0"),
        ({"cu_seqlens": torch.tensor([0, 0, 0, 0, 0, 0, 9], dtype=torch.int32)}, r"^loss_mask must be False past .* 9"),
        ({"loss_mask": torch.ones(55)}, r"^loss_mask must be torch.bool, got torch.float32"),
        ({"loss_weight": torch.ones(1)}, r"^loss_weight must be \[6\] on cpu, got \[1\]"),
        ({"importance_weight": torch.ones(7)}, r"^importance_weight must be \[6\]"),
        ({"age": torch.zeros(6)}, r"^age must be torch.int64, got torch.float32"),
        ({"age_buckets": 0}, r"^age_buckets must be at least 1, got 0"),
        ({"reference_logprobs": None, "options": GrpoLossOptions(kl_beta=0.1)}, r"^reference_logprobs must be given"),
        ({"entropy": None, "options": GrpoLossOptions(entropy_weight=0.1)}, r"^entropy must be given"),
    ],
)
def test_argument_errors(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        grpo_loss_terms(**random_case(GrpoLossOptions()).call(**changes))
