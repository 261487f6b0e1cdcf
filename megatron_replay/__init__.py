"""Rollout-level, advantage-prioritized experience replay for GRPO. Importing this package needs torch alone."""

from megatron_replay.advantage import GroupAdvantages, group_advantages, informative, with_group_advantages
from megatron_replay.algorithm import Engine, Policy, compose, replay_grpo
from megatron_replay.config import GrpoConfig, ReplayConfig, SamplingConfig
from megatron_replay.data_parallel import DataParallelGroup
from megatron_replay.ops.grpo_loss import GrpoLossOptions, grpo_loss, rollout_loss_weights
from megatron_replay.ops.grpo_loss_inputs import GrpoLossInputs
from megatron_replay.ops.grpo_stats import summarize_stats
from megatron_replay.ops.linear_grpo_loss import linear_grpo_loss, linear_token_logprob
from megatron_replay.ops.token_logprob import token_logprob
from megatron_replay.padded_rollouts import PaddedRollouts, pack_padded, pad_packed
from megatron_replay.replay_buffer import Draw, RolloutReplayBuffer
from megatron_replay.rollout import Completion, Prompt, RolloutBatch

__version__ = "0.1.0"
__all__ = [
    "Completion",
    "DataParallelGroup",
    "Draw",
    "Engine",
    "GroupAdvantages",
    "GrpoConfig",
    "GrpoLossInputs",
    "GrpoLossOptions",
    "PaddedRollouts",
    "Policy",
    "Prompt",
    "ReplayConfig",
    "RolloutBatch",
    "RolloutReplayBuffer",
    "SamplingConfig",
    "compose",
    "group_advantages",
    "grpo_loss",
    "informative",
    "linear_grpo_loss",
    "linear_token_logprob",
    "pack_padded",
    "pad_packed",
    "replay_grpo",
    "rollout_loss_weights",
    "summarize_stats",
    "token_logprob",
    "with_group_advantages",
]
