"""Split a text into training and held-out documents."""

from collections.abc import Iterator
from dataclasses import dataclass

from deltazoo.training.config import DataConfig
from deltazoo.training.console import track
from deltazoo.training.text import Document, Records, TextFiles, is_held_out, line_end

DEFAULT_TOKENIZER_SAMPLE = 50_000_000  # bytes of a stream that a tokenizer is trained on unless told otherwise


@dataclass(frozen=True)
class Corpus:
    """Documents of both parts. Of a streamed text, ``train`` holds a sample from the beginning.

    Attributes:
        train: training documents.
        validation: held-out documents.
        description: where they come from.
    """

    train: list[Document]
    validation: list[Document]
    description: str

    @property
    def validation_bytes(self) -> int:
        """Size of the held-out part in UTF-8 bytes."""
        return sum(num_bytes(document) for document in self.validation)


def num_bytes(document: Document) -> int:
    """Length of the document in UTF-8 bytes."""
    return len(document.text.encode("utf-8"))


def first_documents(source: TextFiles | Records, max_bytes: int | None = None) -> list[Document]:
    """The documents of a text from the first on, until they hold ``max_bytes``; all of them if None."""
    documents: list[Document] = []
    size = 0
    for document in source.documents():
        if max_bytes is not None and size >= max_bytes:
            break
        documents.append(document)
        size += num_bytes(document)
    return documents


def read_corpus(source: TextFiles | Records, data: DataConfig, train_sample_bytes: int | None = None) -> Corpus:
    """Read both parts into memory.

    A hash of each document's key decides which part it belongs to. If that leaves one part empty (a single file, a few
    files), the last ``validation_fraction`` of the text is held out.

    Args:
        source: the text.
        data: split and limits.
        train_sample_bytes: for a stream: stop once this much training text and all the held-out text is read.

    Raises:
        ValueError: one of the parts is empty.
    """
    limits = {True: data.max_validation_bytes, False: train_sample_bytes if data.streaming else data.max_train_bytes}
    parts: dict[bool, list[Document]] = {True: [], False: []}
    sizes = {True: 0, False: 0}
    for document in track(source.documents(), f"reading {source.description}"):
        held_out = is_held_out(document.split_key, data.validation_fraction)
        if limits[held_out] is not None and sizes[held_out] >= limits[held_out]:  # type: ignore[operator]
            if all(limits[part] is not None and sizes[part] >= limits[part] for part in parts):  # type: ignore[operator]
                break
            continue
        parts[held_out].append(document)
        sizes[held_out] += num_bytes(document)
    if not parts[False] and not parts[True]:
        raise ValueError(f"{source.description} holds no text")
    if not data.streaming and not all(parts.values()):
        parts = _hold_out_end([*parts[False], *parts[True]], data)
    if not parts[False]:
        raise ValueError(f"every document of {source.description} was held out: lower data.validation_fraction")
    if not parts[True]:
        raise ValueError(f"nothing of {source.description} was held out: raise data.validation_fraction")
    return Corpus(parts[False], parts[True], source.description)


def _hold_out_end(documents: list[Document], data: DataConfig) -> dict[bool, list[Document]]:
    """Hold out the end of the text, cut at the end of a line; for a single file, or a few."""
    total = sum(len(document.text) for document in documents)
    wanted = round(total * data.validation_fraction)
    if data.max_validation_bytes is not None:
        wanted = min(wanted, data.max_validation_bytes * total // max(1, sum(map(num_bytes, documents))))
    train = list(documents)
    validation: list[Document] = []
    while train and wanted > 0:
        last = train.pop()
        cut = line_end(last.text, len(last.text) - wanted) if wanted < len(last.text) else 0
        if cut:
            train.append(last._replace(text=last.text[:cut]))
        validation.insert(0, last._replace(text=last.text[cut:]))
        wanted -= len(last.text) - cut
    return {False: train, True: validation}


def training_documents(documents: Iterator[Document], data: DataConfig) -> Iterator[Document]:
    """The documents of a stream that belong to the training part."""
    return (document for document in documents if not is_held_out(document.split_key, data.validation_fraction))
