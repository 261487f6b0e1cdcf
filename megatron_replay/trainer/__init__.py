"""The Megatron-core trainer: the only folder that imports megatron.core."""
