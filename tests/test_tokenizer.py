from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
import sentencepiece

from megatron_replay.tokenizer import Tokenizer, build_tokenizer

MODEL = Path(__file__).parents[1] / "examples/quickstart/model"


@pytest.fixture(params=["SentencePieceTokenizer", "HuggingFaceTokenizer"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return quickstart(request.param)


def quickstart(tokenizer_type: str) -> Tokenizer:
    path = MODEL / "tokenizer.model" if tokenizer_type == "SentencePieceTokenizer" else MODEL
    return build_tokenizer(tokenizer_type, str(path))


def test_no_bos_and_no_eos_are_added(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("83052=") == [12, 7, 4, 9, 6, 14]
    assert tokenizer.encode("") == []
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (3, 15)


def test_decode_skips_special_tokens_only(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([2, 4, 6, 7, 9, 12, 3, 0]) == "02358"
    assert tokenizer.decode([4, 1, 6]) == "0<unk>2"
    assert tokenizer.decode([]) == ""


def test_an_id_without_a_row_is_not_dropped(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([4, 15, 6, 99]) == "0\ufffd2\ufffd"
    with pytest.raises(ValueError, match="^ids must be at least 0, got -1"):
        tokenizer.decode([4, -1])


def test_the_twins_agree() -> None:
    a, b = quickstart("SentencePieceTokenizer"), quickstart("HuggingFaceTokenizer")
    rng = random.Random(0)
    texts = ["", "=", "0", "a1", "1 2", "  7", "12  ab\n3"]
    texts += ["".join(rng.choices("0123456789= x", k=rng.randrange(12))) for _ in range(200)]
    for text in texts:
        assert a.encode(text) == b.encode(text), text
        assert a.decode(a.encode(text)) == b.decode(b.encode(text)), text
    for text in ("83052=", "02358"):
        assert a.decode(a.encode(text)) == text


def test_unknown_type() -> None:
    with pytest.raises(ValueError, match="^--tokenizer-type must be one of .*SentencePiece.*, got 'GPT2BPETokenizer'"):
        build_tokenizer("GPT2BPETokenizer", str(MODEL))


@pytest.mark.parametrize(
    ("tokenizer_type", "name"),
    [("SentencePieceTokenizer", "none.model"), ("SentencePieceTokenizer", "."), ("HuggingFaceTokenizer", "none")],
)
def test_missing_path(tokenizer_type: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^--tokenizer-model .*{tokenizer_type}") as error:
        build_tokenizer(tokenizer_type, str(tmp_path / name))
    assert repr(str(tmp_path / name)) in str(error.value)


def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "x.model").write_text("hello")
    with pytest.raises(ValueError, match="^--tokenizer-model must name a SentencePiece model"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "x.model"))


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="^--tokenizer-model must name a folder with a Hugging Face tokenizer"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))


def test_a_model_without_eos(tmp_path: Path) -> None:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["0123"] * 9), model_writer=made, model_type="char", vocab_size=7,
        bos_id=1, eos_id=-1, unk_id=0, minloglevel=2,
    )  # fmt: skip
    (tmp_path / "x.model").write_bytes(made.getvalue())
    with pytest.raises(ValueError, match="^--tokenizer-model must define an end-of-sequence piece"):
        build_tokenizer("SentencePieceTokenizer", str(tmp_path / "x.model"))


def test_a_folder_without_eos(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (MODEL / name).read_text()
        (tmp_path / name).write_text(text.replace('"eos_token": "</s>",', ""))
    with pytest.raises(ValueError, match="^--tokenizer-model must define an end-of-sequence token"):
        build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
