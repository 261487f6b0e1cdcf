"""Pushes of weights into real vLLM engines, each beside the plain transfer of as many bytes."""
