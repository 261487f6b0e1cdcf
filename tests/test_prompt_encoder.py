"""Prompts with a chat template and without, on the quickstart's tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_replay.tasks.prompt_encoder import PromptEncoder
from megatron_replay.tasks.prompts import PromptSource, heldout_prompts
from megatron_replay.tasks.task import Problem, build_task
from megatron_replay.tokenizer import Tokenizer, build_tokenizer

MODEL = Path(__file__).parents[1] / "examples/quickstart/model"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ 1 if m.role == 'system' else 2 }}{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
TURNS = ({"role": "system", "content": "78"}, {"role": "user", "content": "90"})


def ids(text: str) -> tuple[int, ...]:
    """Of "<s>", digits, "=" and "</s>"."""
    names = {"<s>": 2, "</s>": 3, "=": 14} | {str(d): 4 + d for d in range(10)}
    found = []
    while text:
        name = next(n for n in names if text.startswith(n))
        found.append(names[name])
        text = text[len(name) :]
    return tuple(found)


def tokenizer(folder: Path = MODEL) -> Tokenizer:
    return build_tokenizer("HuggingFaceTokenizer", str(folder))


def sentencepiece() -> Tokenizer:
    return build_tokenizer("SentencePieceTokenizer", str(MODEL / "tokenizer.model"))


@pytest.fixture
def chat_model(tmp_path: Path) -> Path:
    """The quickstart's tokenizer with a chat template of its own."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return tmp_path


@pytest.mark.parametrize("made", [tokenizer, sentencepiece])
def test_without_a_template_a_string_is_encoded_as_it_is(made: object) -> None:
    encode = PromptEncoder(made())  # type: ignore[operator]
    assert encode(Problem("83=", "", 0)) == ids("83=")
    assert encode.identity is None
    message = "^--rl-chat-template must be model or a file for prompts that are messages, as problem 7 has, got 'none'"
    with pytest.raises(ValueError, match=message):
        encode(Problem(TURNS, "", 7))


def test_the_models_template_and_one_from_a_file(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    own, given = PromptEncoder(tokenizer(chat_model), "model"), PromptEncoder(tokenizer(), str(path))
    for encode in (own, given):
        assert encode(Problem("34", "", 0)) == ids("<s>234</s>=")
        assert encode(Problem(TURNS, "", 0)) == ids("<s>178</s>290</s>=")
    assert own.identity == given.identity and own.identity is not None
    path.write_text(TEMPLATE + " ")
    assert PromptEncoder(tokenizer(), str(path)).identity != own.identity


def test_sources_use_the_template(chat_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "5"}], "answer": "3"}\n{"prompt": "666", "answer": "3"}\n'
    )
    task = build_task("jsonl", split="train", seed=0, data_path=str(path))
    settings = {"max_prompt_length": 5, "chat_template": "model", "filter_long": True}
    source = PromptSource(task, tokenizer(chat_model), seed=0, **settings)  # type: ignore[arg-type]
    assert [p.tokens for p in source.take(2)] == [ids("<s>25</s>=")] * 2
    assert source.identity["--rl-chat-template (sha256)"] is not None
    assert source.report() == (
        f"{path}: 2 problems of 2 lines\n--rl-filter-long-prompts: 1 of 2 prompts left out, longer than 5 tokens"
    )
    (found,) = heldout_prompts(task, tokenizer(chat_model), 1, 9, chat_template="model")
    assert found.tokens == ids("<s>25</s>=")


def test_what_has_no_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^--rl-chat-template must be none for a tokenizer .*Sentence.*, got 'model'"):
        PromptEncoder(sentencepiece(), "model")
    with pytest.raises(
        ValueError, match="^--rl-chat-template model needs a chat template in the folder .* got none in"
    ):
        PromptEncoder(tokenizer(), "model")
    with pytest.raises(
        ValueError, match=r"^--rl-chat-template must be none, model, or a readable file, got 'no.jinja'"
    ):
        PromptEncoder(tokenizer(), "no.jinja")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
        ("{{ missing.field }}", "is undefined"),
    ],
)
def test_a_template_that_refuses_names_flag_and_problem(template: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text(template)
    with pytest.raises(ValueError, match=f"^--rl-chat-template {path}: problem 4: the chat template: .*{words}"):
        PromptEncoder(tokenizer(), str(path))(Problem("1", "", 4))
