"""PromptEncoder: the tokens of a problem's prompt, with a chat template or without."""

from __future__ import annotations

import hashlib
from pathlib import Path

from megatron_replay.tasks.task import Problem
from megatron_replay.tokenizer import HuggingFaceTokenizer, Tokenizer


class PromptEncoder:
    """Token ids of a prompt.

    `chat_template` "none": a prompt is a string, encoded as it is. "model": the template of the tokenizer's folder,
    with the mark that the assistant speaks next; a string is one message of the user. Another value is a file that
    holds a Jinja template. `identity` is the template's SHA-256, None without one.
    Raises ValueError that names --rl-chat-template.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str = "none") -> None:
        self._tokenizer = tokenizer
        self._flag = f"--rl-chat-template {chat_template}"
        self._template: str | None = None
        self.identity: str | None = None
        if chat_template == "none":
            return
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ValueError(
                f"--rl-chat-template must be none for a tokenizer that has no chat templates "
                f"({type(tokenizer).__name__}), got {chat_template!r}"
            )
        if chat_template == "model":
            self._template = tokenizer.chat_template()
        else:
            try:
                self._template = Path(chat_template).read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"--rl-chat-template must be none, model, or a readable file, got {chat_template!r}: {error}"
                ) from error
        self.identity = hashlib.sha256(self._template.encode()).hexdigest()

    def __call__(self, problem: Problem) -> tuple[int, ...]:
        prompt = problem.prompt
        if self._template is None:
            if not isinstance(prompt, str):
                raise ValueError(
                    f"--rl-chat-template must be model or a file for prompts that are messages, as problem "
                    f"{problem.problem_id} has, got 'none'"
                )
            return tuple(self._tokenizer.encode(prompt))
        assert isinstance(self._tokenizer, HuggingFaceTokenizer)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        try:
            return tuple(self._tokenizer.encode_chat(messages, self._template))
        except ValueError as error:
            raise ValueError(f"{self._flag}: problem {problem.problem_id}: {error}") from error
