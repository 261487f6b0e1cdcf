"""How many tokens the arena of a replay buffer's shard must hold."""

from __future__ import annotations

from megatron_replay.config import GrpoConfig
from megatron_replay.replay_buffer import MOST_TOKENS


def arena_tokens(config: GrpoConfig, seq_length: int, shards: int) -> int:
    """Tokens of one shard's arena: every rollout that it can hold at once, at full length.

    Raises ValueError, naming the flags, for more than an arena can have.
    """
    if not config.replay.enabled:
        return 1
    alive = (config.replay.tau_max + 1) * config.prompts_per_step * config.group_size
    tokens = min(config.replay.capacity, -(-alive // shards)) * seq_length
    if tokens > MOST_TOKENS:
        raise ValueError(
            f"--rl-replay-capacity {config.replay.capacity} must leave a rank fewer than 2^31 tokens of "
            f"--seq-length {seq_length}, got {tokens}"
        )
    return tokens
