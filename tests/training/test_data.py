"""Text from every kind of source, with a split that keeps held-out text out of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from fake_hub import names_asked

from deltazoo.training.config import DataConfig
from deltazoo.training.data import Records, is_held_out, open_text, read_corpus, standard_library

TEXTS = [f"document number {i}, " + "words " * (i % 7) for i in range(60)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i, text in enumerate(TEXTS):
        path = tmp_path / f"part{i % 3}" / f"{i}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(TEXTS)))
    return path


@pytest.fixture
def parquet(tmp_path: Path) -> Path:
    path = tmp_path / "texts.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": TEXTS}), path, row_group_size=7)
    return path


def test_the_standard_library_is_real_text_without_tests_and_packages() -> None:
    source = standard_library()
    names = {document.split_key for document in source.documents()}
    assert {"argparse.py", "json/decoder.py"} <= names
    assert not [name for name in names if {"test", "tests", "site-packages"} & set(name.split("/"))]
    assert sum(path.stat().st_size for path in source.paths) > 5_000_000


def test_the_split_is_disjoint_complete_and_the_same_each_time(folder: Path) -> None:
    data = DataConfig(text=str(folder), validation_fraction=0.3)
    first, second = (read_corpus(data) for _ in range(2))
    assert first == second
    held_out, learned = (set(part) for part in (first.validation, first.train))
    assert not held_out & learned
    assert len(held_out | learned) == len(TEXTS)
    assert 0.1 < len(held_out) / len(TEXTS) < 0.5


def test_the_side_of_a_document_does_not_depend_on_the_others(folder: Path) -> None:
    data = DataConfig(text=str(folder), validation_fraction=0.3)
    before = set(read_corpus(data).validation)
    removed = {path: path.read_text() for path in sorted(folder.rglob("*.txt"))[::2]}
    for path in removed:
        path.unlink()
    assert set(read_corpus(data).validation) == before - {*removed.values()}


def test_duplicates_of_a_record_fall_on_one_side() -> None:
    assert len({is_held_out("the same text", 0.5) for _ in range(5)}) == 1


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_record_files_give_every_text(kind: str, streaming: bool, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(kind)
    data = DataConfig(text=str(path), streaming=streaming, max_validation_bytes=10_000)
    assert [document.text for document in open_text(data).documents()] == TEXTS


def test_a_folder_of_record_files_is_one_text(jsonl: Path) -> None:
    (jsonl.parent / "more.jsonl").write_text('{"text": "one more", "id": 60}\n')
    texts = [document.text for document in open_text(DataConfig(text=str(jsonl.parent))).documents()]
    assert sorted(texts) == sorted([*TEXTS, "one more"])


def test_a_dataset_name_goes_through_load_dataset(parquet: Path) -> None:
    # load_dataset takes a folder as it takes a Hub name, so this needs no network.
    data = DataConfig(text="owner/name", streaming=True, max_validation_bytes=10)
    source = open_text(data)
    assert isinstance(source, Records)
    assert (source._path, source._options) == ("owner/name", {"name": None, "split": "train"})
    local = Records(data, str(parquet.parent), name=None, split="train")
    assert [document.text for document in local.documents()] == TEXTS


def test_streaming_stops_once_both_samples_are_full(jsonl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltazoo.training.data.TOKENIZER_SAMPLE", 100)
    data = DataConfig(text=str(jsonl), streaming=True, max_validation_bytes=60, validation_fraction=0.3)
    corpus = read_corpus(data)
    assert 60 <= corpus.validation_bytes < 200
    assert 100 <= len("".join(corpus.train)) < 200


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataConfig(text="./nowhere"), "there is no file or folder"),
        (DataConfig(text="missing.py"), "there is no file or folder"),
        (DataConfig(text="missing.jsonl"), "there is no file or folder"),
        (DataConfig(pattern="*.md"), "data.pattern does not act on the standard library"),
        (DataConfig(text="owner/name", pattern="*.md"), "data.pattern does not act on a Hub dataset"),
    ],
)
def test_text_that_cannot_be_is_refused(data: DataConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_text(data)


WITHOUT_TEXT = r"record 2 holds nothing, and every record needs a text; data.text_field .* one of text, id"


@pytest.mark.parametrize(
    ("files", "changes", "message"),
    [
        ({}, {}, "holds no file"),
        ({"a.txt": ""}, {}, "holds no text"),
        (
            {"only.txt": "one document"},
            {"validation_fraction": 1e-9},
            r"too little text .*1 file of .*, 12 bytes; give more text, .* than 1e-09",
        ),
        (
            {"texts.jsonl": '{"text": "a"}'},
            {"text_field": "txt"},
            r"unknown column 'txt'; did you mean 'text'\?.*--text-field",
        ),
        ({"texts.jsonl": '{"text": "a", "id": 0}'}, {"text_field": "id"}, "record 1 holds int 0, and every record"),
        ({"texts.jsonl": '{"text": "fine", "id": 2}\n{"id": 3}\n'}, {}, WITHOUT_TEXT),
        ({"texts.jsonl": '{"text": "fine", "id": 2}\n{"text": null, "id": 3}\n'}, {}, WITHOUT_TEXT),
        ({"bad.jsonl": '{"text": "fine"}\n{"text": broken\n'}, {}, r"cannot read column 'text' of "),
    ],
    ids=str,
)
def test_texts_that_are_refused(files: dict[str, str], changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_corpus(DataConfig(text=str(tmp_path), **changes))


def test_the_tail_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    text = "".join(f"line {i}, äöü\n" for i in range(1000))
    (tmp_path / "input.txt").write_text(text)
    for fraction, limit in ((0.05, None), (0.9, None), (0.5, 300)):
        data = DataConfig(text=str(tmp_path / "input.txt"), validation_fraction=fraction, max_validation_bytes=limit)
        corpus = read_corpus(data)
        [train], [tail] = corpus.train, corpus.validation
        assert train + tail == text
        assert train.endswith("\n"), "cut between two lines"
        wanted = min(fraction * len(text.encode()), limit or float("inf"))
        assert abs(corpus.validation_bytes - wanted) < 0.02 * wanted + 20, (
            "off by a line, and by characters of two bytes"
        )


def test_the_tail_of_a_few_files_is_held_out_where_their_hashes_hold_out_none(tmp_path: Path) -> None:
    for name in ("a.py", "b.py", "c.py"):
        (tmp_path / name).write_text(f"# {name}\n" + "x = 1\n" * 100)
    data = DataConfig(text=str(tmp_path), validation_fraction=0.05)
    assert not any(is_held_out(document.split_key, 0.05) for document in open_text(data).documents())
    corpus = read_corpus(data)
    [tail] = corpus.validation
    assert [text.startswith("# ") for text in corpus.train] == [True] * 3
    assert (tmp_path / "c.py").read_text() == corpus.train[2] + tail
    total = len("".join(corpus.train)) + corpus.validation_bytes
    assert 0.05 * total <= corpus.validation_bytes < 0.06 * total


def test_a_large_file_comes_in_documents_that_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltazoo.training.data.MAX_DOCUMENT", 100)
    text = "twenty characters,,\n" * 12 + "x" * 250
    (tmp_path / "input.txt").write_text(text)
    found = [document.text for document in open_text(DataConfig(text=str(tmp_path / "input.txt"))).documents()]
    assert "".join(found) == text
    assert [len(piece) for piece in found] == [100, 100, 40, 100, 100, 50]


@pytest.mark.parametrize("content", [b"\x89PNG\xff\xfe", b"text\0 of another kind", "äöü".encode("latin-1")])
def test_files_of_a_folder_that_are_not_text_are_left_out_and_named(
    folder: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "picture.png").write_bytes(content)
    assert len(list(open_text(DataConfig(text=str(folder))).documents())) == len(TEXTS)
    assert f"left out 1 of 61 files of {folder}, which are no UTF-8 text: picture.png" in capsys.readouterr().err
    list(open_text(DataConfig(text=str(folder), pattern="**/*.txt")).documents())
    assert not capsys.readouterr().err
    with pytest.raises(
        ValueError, match=r"there is no UTF-8 text in .*picture.png: unpack it, or convert it, for example with iconv"
    ):
        list(open_text(DataConfig(text=str(folder / "picture.png"))).documents())


def test_a_json_file_in_a_folder_of_text_does_not_make_it_a_data_set(folder: Path) -> None:
    (folder / "package.json").write_text('{"name": "no data set"}')
    assert len(list(open_text(DataConfig(text=str(folder))).documents())) == len(TEXTS) + 1


def test_what_lies_beside_records_is_named(jsonl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (jsonl.parent / "README.md").write_text("about the records")
    assert len(list(open_text(DataConfig(text=str(jsonl.parent))).documents())) == len(TEXTS)
    assert "1 other files are not read; data.pattern would choose them instead" in capsys.readouterr().err


def test_a_name_that_is_nowhere_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets would ask for each file of the data set six times, for half a minute."""
    asked = names_asked(monkeypatch)
    with pytest.raises(ValueError, match=r"there is no file or folder 'texts/mine', and the Hub cannot be asked"):
        list(open_text(DataConfig(text="texts/mine")).documents())
    assert asked == ["texts/mine"]


def test_mixed_record_formats_are_refused(jsonl: Path, parquet: Path) -> None:
    with pytest.raises(ValueError, match="holds both JSON and Parquet files"):
        open_text(DataConfig(text=str(jsonl.parent)))
