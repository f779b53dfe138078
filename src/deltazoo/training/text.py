"""Text sources: the Python standard library, files, or records of a dataset, read as named documents."""

import hashlib
import mimetypes
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from deltazoo.names import unknown
from deltazoo.training.config import STDLIB, DataConfig
from deltazoo.training.console import say
from deltazoo.training.hub import check_on_hub

RECORD_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
MAX_DOCUMENT = 2**20  # characters; a larger file comes as several documents, since each is tokenized as a whole
# Tests, third-party packages and build products are not the library's own prose and code.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}


class Document(NamedTuple):
    """One text, and the key that decides whether it is held out."""

    name: str
    text: str
    split_key: str


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 files, in the order of their paths relative to ``root``; split by relative path."""

    root: Path
    paths: tuple[Path, ...]
    description: str

    def documents(self) -> Iterator[Document]:
        """Read file after file. Files that are not UTF-8 text are left out and named in one message.

        Raises:
            ValueError: a file cannot be read, or none of them is text.
        """
        left_out: list[str] = []
        for path in self.paths:
            name = path.relative_to(self.root).as_posix()
            text = read_text(path)
            if text is None:
                left_out.append(name)
                continue
            begin = 0
            while begin < len(text):
                end = line_end(text, begin + MAX_DOCUMENT, begin) if len(text) - begin > MAX_DOCUMENT else len(text)
                yield Document(name, text[begin:end], split_key=name)
                begin = end
        if len(left_out) == len(self.paths):
            raise ValueError(f"there is no UTF-8 text in {self.description}")
        if left_out:
            more = f" and {len(left_out) - 5} more" if len(left_out) > 5 else ""
            say(
                f"left out {len(left_out)} of {len(self.paths)} files of {self.root}, which are no UTF-8 text: "
                f"{', '.join(left_out[:5])}{more}",
            )


def read_text(path: Path) -> str | None:
    """The text of a UTF-8 file; None if it holds something else.

    Raises:
        ValueError: the file cannot be read.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    try:
        return None if b"\0" in data else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def line_end(text: str, wanted: int, begin: int = 0) -> int:
    """The end of the last line that ends in ``text[begin:wanted]``; ``wanted`` if none does."""
    return text.rfind("\n", begin, wanted) + 1 or wanted


class Records:
    """One text column of a dataset read by ``datasets``; split by the text, so that duplicates stay together."""

    def __init__(self, data: DataConfig, path: str, **options: Any) -> None:
        self.description = f"column {data.text_field!r} of {data.text}"
        self._field = data.text_field
        self._streaming = data.streaming
        self._load = (path, options)
        self.left_out = 0  # other files in the folder, which are not read

    def documents(self) -> Iterator[Document]:
        """Record after record, empty ones left out."""
        if self.left_out:
            say(f"{self.description}: {self.left_out} other files are not read; data.pattern would choose them instead")
        return self.documents_of(self.open())

    def open(self) -> Any:
        """The ``datasets`` object behind the documents: ``Dataset``, or ``IterableDataset`` when streaming."""
        import datasets

        path, options = self._load
        if "data_files" not in options and not Path(path).exists():
            check_on_hub(path, "dataset")
        try:
            records = datasets.load_dataset(path, streaming=self._streaming, **options)
        except Exception as error:  # datasets raises many unrelated types for a file or a name that it cannot read
            cause = error.__cause__ or error
            raise ValueError(f"cannot read {self.description}: {type(cause).__name__}: {cause}") from error
        columns = records.column_names
        if columns is not None and self._field not in columns:
            raise ValueError(f"data.text_field: {unknown('column', self._field, sorted(columns))}")
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
        return _folder(data, path)
    if path.suffix in RECORD_FORMATS and path.is_file():
        return _record_files(data, [path])
    if path.is_file():
        _refuse(data, "a text file", "pattern", "subset", "split", "text_field", "streaming")
        return TextFiles(path.parent, (path,), data.text)
    # A name that looks like a path is not a name on the Hub (owner/name).
    file_name = path.suffix in RECORD_FORMATS or mimetypes.guess_type(path.name)[0] is not None
    if path.is_absolute() or data.text.startswith((".", "~")) or file_name:
        raise ValueError(f"there is no file or folder {data.text!r} (data.text)")
    _refuse(data, "a Hub dataset", "pattern")
    return Records(data, data.text, name=data.subset, split=data.split)


def standard_library() -> TextFiles:
    """The Python standard library's own source files, without tests and installed packages.

    About 12 MB of English prose and code, which every machine with Python has.
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
    """Whether a document is held out: a hash of its key decides, so other documents have no influence."""
    digest = hashlib.blake2b(split_key.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _folder(data: DataConfig, path: Path) -> TextFiles | Records:
    try:
        found = sorted(path.glob(data.pattern))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"data.pattern {data.pattern!r} is no glob below a folder: {error}") from error
    files = tuple(
        file
        for file in found
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise ValueError(f"the folder {data.text!r} holds no file that matches data.pattern {data.pattern!r}")
    # A .json among other files is usually a program's settings, not a data set.
    records = [file for file in files if file.suffix in (".jsonl", ".parquet")]
    if all(file.suffix == ".json" for file in files):
        records = list(files)
    if records and data.pattern == DataConfig.pattern:
        return _record_files(data, records, len(files) - len(records))
    _refuse(data, "a folder of text files", "subset", "split", "text_field", "streaming")
    return TextFiles(path, files, f"{len(files)} files of {data.text}")


def _record_files(data: DataConfig, files: list[Path], left_out: int = 0) -> Records:
    _refuse(data, "JSONL and Parquet files", "pattern", "subset", "split")
    formats = {RECORD_FORMATS[file.suffix] for file in files}
    if len(formats) > 1:
        raise ValueError(
            f"{data.text!r} holds both JSON and Parquet files: name one of them, or a folder with one kind"
        )
    records = Records(data, formats.pop(), data_files=[str(file) for file in files], split="train")
    records.left_out = left_out
    return records


def _refuse(data: DataConfig, kind: str, *names: str) -> None:
    """Raise if one of these keys is set, which have no effect on this kind of text."""
    for name in names:
        if getattr(data, name) != getattr(DataConfig, name):
            raise ValueError(f"data.{name} does not act on {kind} (data.text: {data.text})")
