"""Tokenizer: text to ids and back, from a SentencePiece model or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

TOKENIZER_TYPES = ("SentencePieceTokenizer", "HuggingFaceTokenizer")
NO_TEXT = "\N{REPLACEMENT CHARACTER}"  # an id past the tokenizer's last row: no answer can match it


class Tokenizer(Protocol):
    """What tasks, engines and the loop need of a tokenizer.

    `eos_id` ends a response. `vocab_size` counts the ids that exist, 0 .. vocab_size - 1; a model may have more rows.
    """

    eos_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; no BOS or EOS is added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`. Special tokens are skipped; an id that does not exist reads U+FFFD. Negative: ValueError."""


class SentencePieceTokenizer:
    """A SentencePiece .model file."""

    def __init__(self, path: str) -> None:
        if not Path(path).is_file():
            raise ValueError(
                f"--tokenizer-model must name a .model file for --tokenizer-type SentencePieceTokenizer, got {path!r}"
            )
        from sentencepiece import SentencePieceProcessor

        try:
            self._model = SentencePieceProcessor(model_file=path)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"--tokenizer-model must name a SentencePiece model, got {path!r}: {error}") from error
        self.vocab_size: int = self._model.get_piece_size()
        self.eos_id: int = self._model.eos_id()
        if self.eos_id < 0:
            raise ValueError(f"--tokenizer-model must define an end-of-sequence piece, got none in {path!r}")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_bos=False, add_eos=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return _join(ids, self.vocab_size, lambda run: self._model.decode(run))


class HuggingFaceTokenizer:
    """A folder with tokenizer.json, read by transformers; the network is not asked."""

    def __init__(self, path: str) -> None:
        if not Path(path).is_dir():
            raise ValueError(
                f"--tokenizer-model must name a folder for --tokenizer-type HuggingFaceTokenizer, got {path!r}"
            )
        from transformers import AutoTokenizer

        try:
            self._model = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--tokenizer-model must name a folder with a Hugging Face tokenizer, got {path!r}: {error}"
            ) from error
        self.vocab_size: int = len(self._model)
        if self._model.eos_token_id is None:
            raise ValueError(f"--tokenizer-model must define an end-of-sequence token, got none in {path!r}")
        self.eos_id: int = self._model.eos_token_id

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False)
        return ids

    def chat_template(self) -> str:
        """The folder's own chat template. Raises ValueError where it has none, or several by name."""
        template = self._model.chat_template
        if not isinstance(template, str) or not template:
            raise ValueError(
                f"--rl-chat-template model needs a chat template in the folder of --tokenizer-model, got "
                f"{'several' if template else 'none'} in {self._model.name_or_path!r}"
            )
        return template

    def encode_chat(self, messages: Sequence[Mapping[str, str]], template: str) -> list[int]:
        """Ids of the messages in a Jinja template, with the mark that the assistant speaks next.

        Raises ValueError where the template is none, or refuses the messages.
        """
        from jinja2 import TemplateError

        try:
            ids: list[int] = self._model.apply_chat_template(
                [dict(m) for m in messages],
                chat_template=template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template: {error}") from error
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return _join(
            ids,
            self.vocab_size,
            lambda run: self._model.decode(run, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        )


def build_tokenizer(tokenizer_type: str, path: str) -> Tokenizer:
    """The tokenizer at `path`. Raises ValueError naming --tokenizer-type or --tokenizer-model and its value."""
    if tokenizer_type == "SentencePieceTokenizer":
        return SentencePieceTokenizer(path)
    if tokenizer_type == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(path)
    raise ValueError(f"--tokenizer-type must be one of {', '.join(TOKENIZER_TYPES)}, got {tokenizer_type!r}")


def _join(ids: Sequence[int], vocab_size: int, decode: Callable[[list[int]], str]) -> str:
    """Decode the runs of ids that exist, with U+FFFD for each id between them that does not."""
    text: list[str] = []
    run: list[int] = []
    for i in ids:
        if i < 0:
            raise ValueError(f"ids must be at least 0, got {i}")
        if i < vocab_size:
            run.append(i)
        else:
            text += [decode(run), NO_TEXT]
            run = []
    return "".join([*text, decode(run)])
