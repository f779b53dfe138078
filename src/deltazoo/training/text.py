"""Where text comes from: the Python standard library, files, or records of a dataset, always as named documents."""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from deltazoo.training.config import STDLIB, DataConfig
from deltazoo.training.strict import unknown_name

RECORD_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
# Tests, third-party packages and byproducts of a build say nothing about the library's own prose and code.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}


class Document(NamedTuple):
    """One text and the key that decides on which side of the split it falls."""

    name: str
    text: str
    split_key: str


class TextSource(Protocol):
    """Documents in an order that never changes."""

    description: str

    def documents(self) -> Iterator[Document]:
        """All documents, always in the same order."""
        ...


@dataclass(frozen=True)
class TextFiles:
    """The UTF-8 files of a folder, in the order of their relative paths; split by relative path."""

    root: Path
    paths: tuple[Path, ...]
    description: str

    def documents(self) -> Iterator[Document]:
        """Read file after file; a file that is not UTF-8 raises instead of being skipped."""
        for path in self.paths:
            name = path.relative_to(self.root).as_posix()
            try:
                text = path.read_bytes().decode("utf-8")
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); choose files with data.pattern"
                ) from error
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from error
            if text:
                yield Document(name, text, split_key=name)


class Records:
    """One text column of a dataset read by ``datasets``; split by the text, so that duplicates fall on one side."""

    def __init__(self, data: DataConfig, path: str, **options: Any) -> None:
        self.description = f"column {data.text_field!r} of {data.text}"
        self._field = data.text_field
        self._streaming = data.streaming
        self._load = (path, options)

    def documents(self) -> Iterator[Document]:
        """Record after record, empty ones left out."""
        return self.documents_of(self.open())

    def open(self) -> Any:
        """The ``datasets`` object behind the documents: ``Dataset``, or ``IterableDataset`` when streaming."""
        import datasets

        path, options = self._load
        try:
            records = datasets.load_dataset(path, streaming=self._streaming, **options)
        except Exception as error:  # datasets raises a dozen unrelated types for a file or a name that it cannot read
            cause = error.__cause__ or error
            raise ValueError(f"cannot read {self.description}: {type(cause).__name__}: {cause}") from error
        columns = records.column_names
        if columns is not None and self._field not in columns:
            raise ValueError(f"data.text_field: {unknown_name('column', self._field, columns)}")
        return records

    def documents_of(self, records: Any) -> Iterator[Document]:
        """The documents of an already opened dataset (one whose position may have been restored)."""
        for index, record in enumerate(records):
            text = record.get(self._field)
            if not isinstance(text, str):
                raise ValueError(f"{self.description}: record {index} holds {type(text).__name__} instead of text")
            if text:
                yield Document(f"record {index}", text, split_key=text)


def open_text(data: DataConfig) -> TextFiles | Records:
    """The text that ``data.text`` names.

    Raises:
        ValueError: nothing readable there, or keys that do not act on this kind of text.
    """
    if data.text == STDLIB:
        _refuse(data, "the standard library", "pattern", "subset", "split", "text_field", "streaming")
        return standard_library()
    path = Path(data.text).expanduser()
    if path.is_dir():
        record_files = sorted(p for p in path.rglob("*") if p.suffix in RECORD_FORMATS and p.is_file())
        if record_files and data.pattern == DataConfig.pattern:
            return _record_files(data, record_files)
        return _folder(data, path)
    if path.suffix in RECORD_FORMATS and path.is_file():
        return _record_files(data, [path])
    if path.is_file():
        raise ValueError(
            f"data.text is the single text file {data.text!r}: nothing could be held out. Give a folder of files"
        )
    if path.is_absolute() or data.text.startswith((".", "~")) or path.suffix in {*RECORD_FORMATS, ".txt"}:
        raise ValueError(f"data.text names {data.text!r}, and there is no such file or folder")
    _refuse(data, "a Hub dataset", "pattern")
    return Records(data, data.text, name=data.subset, split=data.split)


def standard_library() -> TextFiles:
    """The Python standard library's own source files, without tests and installed packages.

    Every machine with Python has them: about 12 MB of English prose and code.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = tuple(
        path
        for path in sorted(root.rglob("*.py"))
        if not NOT_LIBRARY.intersection(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    )
    if not paths:
        raise ValueError(
            f"this Python keeps no source files of its standard library under {root}: set data.text instead"
        )
    return TextFiles(root, paths, f"the Python standard library ({len(paths)} files)")


def is_held_out(split_key: str, fraction: float) -> bool:
    """Whether a document belongs to the validation part: a hash of its key, so the answer never depends on the rest."""
    digest = hashlib.blake2b(split_key.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _folder(data: DataConfig, path: Path) -> TextFiles:
    _refuse(data, "a folder of text files", "subset", "split", "text_field", "streaming")
    files = tuple(
        file
        for file in sorted(path.glob(data.pattern))
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise ValueError(f"the folder {data.text!r} holds no file that matches data.pattern {data.pattern!r}")
    return TextFiles(path, files, f"{len(files)} files of {data.text}")


def _record_files(data: DataConfig, files: list[Path]) -> Records:
    _refuse(data, "JSONL and Parquet files", "pattern", "subset", "split")
    formats = {RECORD_FORMATS[file.suffix] for file in files}
    if len(formats) > 1:
        raise ValueError(
            f"{data.text!r} holds both JSON and Parquet files: name one of them, or a folder with one kind"
        )
    return Records(data, formats.pop(), data_files=[str(file) for file in files], split="train")


def _refuse(data: DataConfig, kind: str, *names: str) -> None:
    """A key that would not act is an error, not a decoration."""
    for name in names:
        if getattr(data, name) != getattr(DataConfig, name):
            raise ValueError(f"data.{name} does not act on {kind} (data.text: {data.text})")
