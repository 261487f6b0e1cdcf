"""Weights between the trainer's sharded Megatron layout and full Hugging Face names and shapes."""
