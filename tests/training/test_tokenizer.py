"""Tokenizers restore every text, byte for byte, and are trained on no held-out text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from fake_hub import names_asked
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from deltazoo.training.config import TokenizerConfig
from deltazoo.training.data import standard_library
from deltazoo.training.tokens import BOS, EOS, build_tokenizer, encode_documents, train_bpe

HARD = "plain, \ttabs\r\n  indents, ünïcödé 語 🙂, \x00 control, <|bos|> and <|eos|> spelled out   "


@pytest.fixture(scope="module")
def library() -> list[str]:
    return [text for text, name in standard_library().documents() if name in ("ast.py", "textwrap.py")]


@pytest.fixture(scope="module")
def bpe(library: list[str]) -> PreTrainedTokenizerFast:
    return train_bpe(library, 600)


@pytest.fixture(scope="module")
def byte() -> PreTrainedTokenizerFast:
    tokenizer = build_tokenizer(TokenizerConfig(kind="byte"), [])
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.mark.parametrize("kind", ["bpe", "byte"])
def test_texts_come_back_unchanged(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(kind)
    (ids,) = encode_documents(tokenizer, [HARD])
    assert tokenizer.decode(ids[1:].tolist()) == HARD
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:], "a document that spells <|bos|> must not begin a new one"
    assert tokenizer.eos_token_id not in ids


def test_the_byte_tokenizer_has_one_token_per_byte(byte: PreTrainedTokenizerFast) -> None:
    assert len(byte) == 258
    (ids,) = encode_documents(byte, [HARD])
    assert len(ids) == 1 + len(HARD.encode())


def test_the_bpe_has_the_size_asked_for_and_compresses(bpe: PreTrainedTokenizerFast, library: list[str]) -> None:
    assert len(bpe) == 600
    (ids,) = encode_documents(bpe, library[:1])
    assert ids.dtype == np.uint16
    assert len(ids) < 0.6 * len(library[0])


def test_training_is_repeatable(bpe: PreTrainedTokenizerFast, library: list[str]) -> None:
    assert train_bpe(library, 600).get_vocab() == bpe.get_vocab()


def test_the_end_is_added_on_request(bpe: PreTrainedTokenizerFast) -> None:
    (with_end,) = encode_documents(bpe, ["abc"], with_end=True)
    (without,) = encode_documents(bpe, ["abc"])
    assert with_end.tolist() == [*without.tolist(), bpe.eos_token_id]


def test_it_saves_as_a_fast_tokenizer(bpe: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    bpe.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.is_fast
    assert loaded(HARD)["input_ids"] == bpe(HARD)["input_ids"]
    assert loaded("x")["input_ids"][0] == loaded.bos_token_id, "a prompt begins as every training document does"
    assert (loaded.bos_token, loaded.eos_token, loaded.padding_side) == (BOS, EOS, "left")
    pretrained = build_tokenizer(TokenizerConfig(kind="pretrained", path=str(tmp_path)), [])
    assert pretrained.get_vocab() == bpe.get_vocab()


def test_a_small_text_yields_a_small_vocabulary_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = train_bpe(["hello hello"], 5000)
    assert 259 < len(tokenizer) < 270
    said = f"the text yields a vocabulary of {len(tokenizer)}, which is taken in place of 5000"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("config", ["{}", '{"model_type": "gpt2"}', '{"model_type": "qwen3_next"}'])
def test_a_missing_pretrained_tokenizer_is_named(config: str, tmp_path: Path) -> None:
    """transformers makes one of special tokens alone for the latter two."""
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        build_tokenizer(TokenizerConfig(kind="pretrained", path=str(tmp_path)), [])


def test_a_tokenizer_that_is_nowhere_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = names_asked(monkeypatch)
    with pytest.raises(ValueError, match="there is no folder 'runs/tokenizer', and the Hub cannot be asked"):
        build_tokenizer(TokenizerConfig("pretrained", path="runs/tokenizer"), [])
    assert asked == ["runs/tokenizer"]
