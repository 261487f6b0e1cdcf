"""Where rollouts come from. Every engine takes prompts and returns completions with behavior log-probs."""
