"""How good a policy is, on prompts that it does not train on."""
