"""The text of a run as documents: their sources, and the choice of held-out ones. This module imports no torch."""

import hashlib
import math
import mimetypes
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from deltazoo.names import unknown
from deltazoo.training.config import STDLIB, DataConfig
from deltazoo.training.console import say, track
from deltazoo.training.loading import check_on_hub, nearest_path, training_config_of

RECORD_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
MAX_DOCUMENT = 2**20  # characters; a larger file becomes several documents, since each is tokenized as a whole
TOKENIZER_SAMPLE = 50_000_000  # bytes of a stream that a tokenizer is trained on
# Tests, third-party packages and build products are not the library's own prose and code.
NOT_LIBRARY = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "lib-dynload"}


class Document(NamedTuple):
    """One text, and the key that decides whether it is held out."""

    text: str
    split_key: str


class TextFiles:
    """UTF-8 files, in the order of their paths relative to ``root``; split by relative path."""

    def __init__(self, root: Path, paths: Sequence[Path], name: str) -> None:
        self.root, self.paths, self._name = root, paths, name
        self._left_out: list[str] = []

    @property
    def description(self) -> str:
        """The place of the text, and the number of its files that have been read."""
        count = len(self.paths) - len(self._left_out)
        if self.paths == [Path(self._name).expanduser()]:
            return self._name
        return f"{count} {'file' if count == 1 else 'files'} of {self._name}"

    def documents(self) -> Iterator[Document]:
        """The documents, file after file. Files that are not UTF-8 text are left out and named in one message.

        Raises:
            ValueError: a file cannot be read, or none of them is text.
        """
        self._left_out = []
        for path in self.paths:
            name = path.relative_to(self.root).as_posix()
            try:
                text = path.read_bytes().decode("utf-8")
            except OSError as error:
                raise ValueError(f"cannot read {path}: {error.strerror}") from error
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                self._left_out.append(name)
                continue
            begin = 0
            while begin < len(text):
                end = line_end(text, begin + MAX_DOCUMENT, begin) if len(text) - begin > MAX_DOCUMENT else len(text)
                yield Document(text[begin:end], split_key=name)
                begin = end
        count = len(self._left_out)
        if count == len(self.paths):
            raise ValueError(
                f"there is no UTF-8 text in {self._name}: unpack it, or convert it, for example with iconv -f latin1 "
                "-t utf-8"
            )
        if count:
            more = f" and {count - 5} more" if count > 5 else ""
            say(
                f"left out {count} of {len(self.paths)} files of {self.root}, which are no UTF-8 text: "
                f"{', '.join(self._left_out[:5])}{more}"
            )


class Records:
    """A text column of a data set read by ``datasets``; split by the text, so that duplicates stay together."""

    def __init__(self, data: DataConfig, path: str, left_out: int = 0, **options: Any) -> None:
        """``path`` and ``options`` are those of ``datasets.load_dataset``; ``left_out`` other files are not read."""
        self.description = f"column {data.text_field!r} of {data.text}"
        self.data, self._path, self._options, self._left_out = data, path, options, left_out

    def documents(self) -> Iterator[Document]:
        """The documents, record after record, without empty ones."""
        if self._left_out:
            say(
                f"{self.description}: {self._left_out} other files are not read; data.pattern would choose them instead"
            )
        return self.documents_of(self.open())

    def open(self) -> Any:
        """The ``datasets`` object behind the documents: ``Dataset``, or ``IterableDataset`` when streaming."""
        import datasets

        if "data_files" not in self._options and not Path(self._path).exists():
            check_on_hub(self._path, "dataset")
        try:
            records = datasets.load_dataset(self._path, streaming=self.data.streaming, **self._options)
        except OSError as error:
            if error.errno is not None:  # an error of its cache, such as a full disk
                raise
            raise ValueError(f"cannot read {self.description}: {error}") from error
        except Exception as error:  # datasets raises many unrelated types for a file or a name that it cannot read
            cause = error.__cause__ or error
            raise ValueError(f"cannot read {self.description}: {type(cause).__name__}: {cause}") from error
        columns = records.column_names
        if columns is not None and self.data.text_field not in columns:
            raise ValueError(
                f"{self.data.text}: {unknown('column', self.data.text_field, sorted(columns))}; data.text_field "
                "(or --text-field) names the column of the text"
            )
        return records

    def documents_of(self, records: Any) -> Iterator[Document]:
        """The documents of an opened data set, whose position may have been restored."""
        for index, record in enumerate(records):
            text = record.get(self.data.text_field)
            if not isinstance(text, str):
                found = "nothing" if text is None else f"{type(text).__name__} {str(text)[:40]}"
                raise ValueError(
                    f"{self.description}: record {index + 1} holds {found}, and every record needs a text; "
                    f"data.text_field (or --text-field) names their column, one of {', '.join(record)}"
                )
            if text:
                yield Document(text, split_key=text)


def open_text(data: DataConfig) -> TextFiles | Records:
    """The text that ``data.text`` names, not yet read.

    Raises:
        ValueError: nothing readable there, or keys that do not act on this kind of text.
    """
    path, of_records = Path(data.text).expanduser(), ("subset", "split", "text_field", "streaming")
    if data.text == STDLIB:
        _refuse(data, "the standard library", "pattern", *of_records)
        return standard_library()
    if path.is_dir():
        return _folder(data, path)
    if path.suffix in RECORD_FORMATS and path.is_file():
        return _record_files(data, [path])
    if path.is_file():
        _refuse(data, "a text file", "pattern", *of_records)
        return TextFiles(path.parent, [path], data.text)
    # A name that looks like a path is not a name on the Hub (owner/name).
    file_name = path.suffix in RECORD_FORMATS or mimetypes.guess_type(path.name)[0] is not None
    if path.is_absolute() or data.text.startswith((".", "~")) or file_name:
        raise ValueError(f"there is no file or folder {data.text!r} (data.text){nearest_path(path)}")
    _refuse(data, "a Hub dataset", "pattern")
    return Records(data, data.text, name=data.subset, split=data.split)


def standard_library() -> TextFiles:
    """The Python standard library's own source files, without tests and installed packages.

    About 12 MB of English prose and code, which every machine with Python has.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [
        path
        for path in sorted(root.rglob("*.py"))
        if not NOT_LIBRARY.intersection(path.relative_to(root).parts) and not path.name.startswith("_sysconfigdata")
    ]
    if not paths:
        raise ValueError(
            f"this Python keeps no source files of its standard library under {root}: set data.text instead"
        )
    return TextFiles(root, paths, "the Python standard library")


def _folder(data: DataConfig, path: Path) -> TextFiles | Records:
    try:
        found = sorted(path.glob(data.pattern))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(f"data.pattern {data.pattern!r} is no glob below a folder: {error}") from error
    visible = (file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts))
    files = [file for file in visible if file.is_file()]
    if not files:
        raise ValueError(f"the folder {data.text!r} holds no file that matches data.pattern {data.pattern!r}")
    # A .json among other files is usually a program's settings, not a data set.
    records = [file for file in files if file.suffix in (".jsonl", ".parquet")]
    if all(file.suffix == ".json" for file in files):
        records = files
    if records and data.pattern == DataConfig.pattern:
        return _record_files(data, records, len(files) - len(records))
    _refuse(data, "a folder of text files", "subset", "split", "text_field", "streaming")
    return TextFiles(path, files, data.text)


def _record_files(data: DataConfig, files: list[Path], left_out: int = 0) -> Records:
    _refuse(data, "JSONL and Parquet files", "pattern", "subset", "split")
    formats = {RECORD_FORMATS[file.suffix] for file in files}
    if len(formats) > 1:
        raise ValueError(
            f"{data.text!r} holds both JSON and Parquet files: name one of them, or a folder with one kind"
        )
    return Records(data, formats.pop(), left_out, data_files=[str(file) for file in files], split="train")


def _refuse(data: DataConfig, kind: str, *names: str) -> None:
    """Raise ValueError if one of these keys is set, which have no effect on this kind of text."""
    for name in names:
        if getattr(data, name) != getattr(DataConfig, name):
            raise ValueError(f"data.{name} does not act on {kind} (data.text: {data.text})")


@dataclass(frozen=True)
class Corpus:
    """The texts of both parts. For a streamed text, ``train`` holds a sample from the beginning.

    Attributes:
        train: texts to train on.
        validation: held-out texts.
        description: the source of the texts, in words.
        source: the source of both parts; None if they have none in common.
    """

    train: list[str]
    validation: list[str]
    description: str
    source: TextFiles | Records | None = field(default=None, compare=False)

    @property
    def validation_bytes(self) -> int:
        """Size of the held-out part in UTF-8 bytes."""
        return sum(map(num_bytes, self.validation))

    @property
    def digest(self) -> str:
        """Hash of all texts in their order."""
        digest = hashlib.blake2b(digest_size=16)
        for text in [*self.train, *self.validation]:
            digest.update(text.encode("utf-8"))
        return digest.hexdigest()


def read_corpus(data: DataConfig) -> Corpus:
    """Both parts of a text, in memory; of a stream ``TOKENIZER_SAMPLE`` bytes to train on, and all the held-out text.

    A hash of each document's key decides its part. If that leaves one part empty (a single file, a few
    files), the last ``validation_fraction`` of the text is held out.

    Raises:
        ValueError: nothing readable there, no text, or too little to hold anything out.
    """
    source = open_text(data)
    parts: dict[bool, list[str]] = {True: [], False: []}
    room = {True: data.max_validation_bytes or math.inf, False: TOKENIZER_SAMPLE if data.streaming else math.inf}
    for document in track(source.documents(), f"reading {source.description}"):
        held_out = is_held_out(document.split_key, data.validation_fraction)
        if room[held_out] > 0:
            parts[held_out].append(document.text)
            room[held_out] -= num_bytes(document.text)
        elif room[not held_out] <= 0:
            break
    texts = [*parts[False], *parts[True]]
    if not texts:
        raise ValueError(f"{source.description} holds no text")
    if not data.streaming and not all(parts.values()):
        parts = _hold_out_end(texts, data)
    if not all(parts.values()):
        raise ValueError(
            f"too little text to train on one part and hold another out: {source.description}, "
            f"{sum(map(num_bytes, texts)):,} bytes; give more text, or another data.validation_fraction than "
            f"{data.validation_fraction:g}"
        )
    return Corpus(parts[False], parts[True], source.description, source)


def num_bytes(text: str) -> int:
    """Length in UTF-8 bytes."""
    return len(text.encode("utf-8"))


def is_held_out(split_key: str, fraction: float) -> bool:
    """Whether a document is held out: a hash of its key decides, so other documents have no influence."""
    digest = hashlib.blake2b(split_key.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64


def _hold_out_end(texts: list[str], data: DataConfig) -> dict[bool, list[str]]:
    """Both parts of a single file or a few: the end of the text, cut at the end of a line, is held out."""
    total = sum(map(len, texts))
    wanted = round(total * data.validation_fraction)
    if data.max_validation_bytes is not None:
        wanted = min(wanted, data.max_validation_bytes * total // sum(map(num_bytes, texts)))
    train = list(texts)
    validation: list[str] = []
    while train and wanted > 0:
        last = train.pop()
        cut = line_end(last, len(last) - wanted) if wanted < len(last) else 0
        if cut:
            train.append(last[:cut])
        validation.insert(0, last[cut:])
        wanted -= len(last) - cut
    return {False: train, True: validation}


def line_end(text: str, wanted: int, begin: int = 0) -> int:
    """The end of the last line that ends in ``text[begin:wanted]``; ``wanted`` if none does."""
    return text.rfind("\n", begin, wanted) + 1 or wanted


def first_texts(source: TextFiles | Records, max_bytes: int | None = None) -> list[str]:
    """The first ``max_bytes`` of a text, cut inside a document and at the end of a character; all of it if None.

    Raises:
        ValueError: there is no text.
    """
    texts: list[str] = []
    room = sys.maxsize if max_bytes is None else max_bytes
    for text, _ in source.documents():
        size = num_bytes(text)
        texts.append(text if size <= room else text.encode("utf-8")[:room].decode("utf-8", errors="ignore"))
        room -= size
        if room <= 0:
            break
    if not any(texts):
        raise ValueError(f"{source.description} holds no text{'' if max_bytes is None else ' in so few bytes'}")
    return [text for text in texts if text]


def choose_documents(
    path: str, text: str | None = None, text_field: str = DataConfig.text_field, max_bytes: int | None = None
) -> Corpus:
    """The text on which a model is scored, as ``validation``, and the text of its training, empty if unknown.

    The first is the held-out part of the second, or a text of the caller's.

    Args:
        path: path of the model, see `resolve_checkpoint`.
        text: a text (``data.text``) to score instead, the whole of it.
        text_field: the column of its records.
        max_bytes: bytes of ``text`` to read, from its beginning.

    Raises:
        ValueError: no ``text`` for a model without a record of its training, or there is no text.
    """
    config = training_config_of(path)
    source = None if text is None else open_text(DataConfig(text=text, text_field=text_field))
    if text is None and config is None:
        where = path if Path(path).expanduser().is_dir() else f"{path}, which is no folder here,"
        raise ValueError(f"{where} does not say what text it was trained on: name a text with --text")
    try:
        corpus = read_corpus(config.data) if config else None
    except ValueError as error:  # the model may have been trained on another machine
        if text is None:
            raise
        say(f"the baselines do without the training text: {error}")
        corpus = None
    if source is None:
        assert corpus is not None
        return replace(corpus, description=f"held-out part of {corpus.description}")
    held_out = first_texts(source, max_bytes)
    return Corpus(corpus.train if corpus else [], held_out, source.description)
