"""Tasks: problems with verifiable answers, the prompts made of them, and the reward of a response."""
