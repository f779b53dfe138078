"""Streamed rows: endless, and resumed at a saved position without reading earlier records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from deltazoo.training.config import DataConfig, TokenizerConfig
from deltazoo.training.data import Records, is_held_out, open_text
from deltazoo.training.tokens import Row, StreamedRows, build_tokenizer

TEXTS = [f"text {i} " + "ab" * (5 * i % 40) for i in range(25)]
ROW = 32


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer(TokenizerConfig(kind="byte"), [])


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataConfig(text=str(path), streaming=True, max_validation_bytes=100, validation_fraction=0.2)


def stream(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> StreamedRows:
    source = open_text(data)
    assert isinstance(source, Records)
    return StreamedRows(source, tokenizer, ROW, num_rows=10**6, remembered=20)


def first(rows: StreamedRows, count: int) -> list[Row]:
    return [rows[index] for index in range(count)]


def as_lists(rows: list[Row]) -> list[list[list[int]]]:
    return [[piece.tolist() for piece in row] for row in rows]


def test_rows_hold_the_training_documents_in_order_and_begin_again(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    training = [text for text in TEXTS if not is_held_out(text, data.validation_fraction)]
    assert 0 < len(training) < len(TEXTS)
    expected = "".join(training).encode() * 3
    rows = first(stream(data, tokenizer), len(expected) // ROW)
    ids = np.concatenate([piece for row in rows for piece in row])
    text_ids = ids[(ids != tokenizer.bos_token_id) & (ids != tokenizer.eos_token_id)]
    assert expected.decode().startswith(tokenizer.decode(text_ids.tolist()))
    assert len(text_ids) > 2 * len(expected) // 3 * 0.9, "the stream must have begun a third time"


@pytest.mark.parametrize("done", [1, 7, 30])
def test_a_saved_position_continues_with_the_same_rows(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, done: int
) -> None:
    unbroken = stream(data, tokenizer)
    rows = first(unbroken, done + 12)
    position = json.loads(json.dumps(unbroken.position_after(done)))
    resumed = stream(data, tokenizer)
    resumed.go_to(position)
    assert as_lists(first(resumed, 12)) == as_lists(rows[done:])
    assert json.loads(json.dumps(resumed.position_after(done + 12))) == json.loads(
        json.dumps(unbroken.position_after(done + 12))
    )


@pytest.mark.parametrize("held_out", [0.2, 0.9999])
def test_rows_longer_than_the_text_are_refused(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, held_out: float
) -> None:
    source = open_text(replace(data, validation_fraction=held_out))
    with pytest.raises(ValueError, match=r"row_length is 20,000, and the training text, from .*, has [\d,]+ tokens"):
        StreamedRows(source, tokenizer, 20_000, num_rows=1, remembered=20)[0]


def test_rows_of_other_processes_are_skipped(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = first(stream(data, tokenizer), 12)
    every_third = stream(data, tokenizer)
    assert as_lists([every_third[index] for index in range(1, 12, 3)]) == as_lists(rows[1::3])
    assert every_third.position_after(14)["num_rows"] == 14, "beyond the last row of its own"
    with pytest.raises(IndexError, match="row 3 of a stream was read before"):
        every_third[3]


def test_only_the_latest_positions_are_kept(data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = stream(data, tokenizer)
    first(rows, 40)
    with pytest.raises(KeyError):
        rows.position_after(19)
    assert rows.position_after(21)["num_rows"] == 21
