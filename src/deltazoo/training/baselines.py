"""Baselines of a language model on held-out documents: two compressors and an order-2 byte model."""

import gzip
import lzma
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from deltazoo.training.folder import as_json
from deltazoo.training.console import console
from deltazoo.training.data import Document

if TYPE_CHECKING:  # imports torch, which a command loads only after it has checked its arguments
    from deltazoo.training.score import Score

ALPHABET = 256
_COUNTED_AT_ONCE = 200  # documents per pass over the 256^3 table; a pass costs more than counting the documents


@dataclass(frozen=True)
class Baseline:
    """A baseline and its score.

    Attributes:
        name: of the compressor or model.
        bits_per_byte: on the held-out documents.
        has_seen: the text that it had seen before.
    """

    name: str
    bits_per_byte: float
    has_seen: str


def baselines(train: Sequence[Document], held_out: Sequence[Document], *, primed: bool = False) -> list[Baseline]:
    """Measure the baselines.

    Args:
        train: training documents; if empty, only the compressors are measured.
        held_out: scored documents; the compressors get them concatenated in this order.
        primed: also measure xz with the training text before the scored one (seconds per 10 MB).
    """
    pieces = [document.text.encode() for document in held_out]
    data = b"".join(pieces)
    nothing, everything = "nothing", "the training text"
    with console.status("measuring the baselines"):
        found = [
            Baseline("gzip -9", gzip_bits_per_byte(data), nothing),
            Baseline("xz -9", xz_bits_per_byte(data), nothing),
        ]
        if train:
            known = [document.text.encode() for document in train]
            if primed:
                found.append(Baseline("xz -9, primed", xz_bits_per_byte(data, b"".join(known)), everything))
            found.append(
                Baseline("order-2 byte model", ByteContextModel(2).fit(known).bits_per_byte(pieces), everything)
            )
    return found


def save_comparison(path: str | Path, model: str, text: str, score: "Score", others: Sequence[Baseline]) -> None:
    """Write a model's score and the baselines as JSON; ``model`` and ``text`` name what was measured."""
    figures = {
        "model": model,
        "text": text,
        "bits_per_byte": score.bits_per_byte,
        "perplexity": score.perplexity,
        "score": asdict(score),
        "baselines": [asdict(baseline) for baseline in others],
    }
    Path(path).write_text(as_json(figures, indent=1) + "\n", encoding="utf-8")


def gzip_bits_per_byte(data: bytes) -> float:
    """Bits per byte of ``gzip -9`` on ``data`` alone; its window is 32 KiB."""
    return 8 * len(gzip.compress(_not_empty(data), compresslevel=9, mtime=0)) / len(data)


def xz_bits_per_byte(data: bytes, primed_with: bytes = b"") -> float:
    """Bits per byte of ``xz -9`` on ``data``.

    Args:
        data: the scored bytes.
        primed_with: text compressed before ``data``, whose own size is subtracted. The dictionary reaches back 64 MiB.
    """
    size = len(lzma.compress(primed_with + _not_empty(data), preset=9))
    if primed_with:
        size -= len(lzma.compress(primed_with, preset=9))
    return 8 * size / len(data)


class ByteContextModel:
    """Predicts a byte from the two before it, interpolated with shorter contexts as Witten and Bell do.

    ``P(c | ctx) = (n(ctx, c) + d(ctx) P(c | shorter ctx)) / (n(ctx) + d(ctx))`` where n counts the training text and d
    is the number of distinct bytes seen after ctx. The empty context is interpolated with the uniform distribution; a
    context never seen gives the probabilities of the shorter one. Source: Witten and Bell 1991, the zero-frequency
    problem, method C.
    """

    def __init__(self, order: int = 2) -> None:
        if order not in (0, 1, 2):
            raise ValueError(f"order must be 0, 1 or 2 (a table of 256^(order + 1) counts), got {order}")
        self.order = order
        self._counts = [np.zeros(ALPHABET ** (n + 1), dtype=np.int32) for n in range(order + 1)]

    def fit(self, documents: Iterable[bytes]) -> "ByteContextModel":
        """Count the bytes of the training documents; contexts do not cross document boundaries."""
        documents = list(documents)
        for order, counts in enumerate(self._counts):
            for first in range(0, len(documents), _COUNTED_AT_ONCE):
                keys = np.concatenate(
                    [_ngrams(document, order) for document in documents[first : first + _COUNTED_AT_ONCE]]
                )
                counts += np.bincount(keys, minlength=len(counts)).astype(np.int32)
        return self

    def bits_per_byte(self, documents: Iterable[bytes]) -> float:
        """Mean cost of the documents' bytes; the first bytes of each are predicted from shorter contexts.

        Raises:
            ValueError: there is no byte to score.
        """
        tables = self._probabilities()
        bits, length = 0.0, 0
        for document in documents:
            for order in range(self.order):
                bits -= float(np.log2(tables[order][_ngrams(document[: order + 1], order)]).sum())
            bits -= float(np.log2(tables[self.order][_ngrams(document, self.order)]).sum())
            length += len(document)
        if not length:
            raise ValueError("there is no byte to score")
        return bits / length

    def _probabilities(self) -> list[np.ndarray]:
        tables = []
        shorter = np.full((1, ALPHABET), 1.0 / ALPHABET)
        for counts in self._counts:
            table = counts.reshape(-1, ALPHABET)
            distinct = np.count_nonzero(table, axis=1, keepdims=True)
            # The shorter context of (a, b) is (b), so the rows repeat for every value of a.
            backoff = np.tile(shorter, (len(table) // len(shorter), 1))
            seen = distinct > 0
            mixed = (table + distinct * backoff) / np.maximum(table.sum(axis=1, keepdims=True) + distinct, 1)
            shorter = np.where(seen, mixed, backoff)
            tables.append(shorter.reshape(-1))
        return tables


def _ngrams(document: bytes, order: int) -> np.ndarray:
    """For each byte with ``order`` bytes before it, these bytes and the byte as one number."""
    values = np.frombuffer(document, dtype=np.uint8).astype(np.int64)
    length = max(len(values) - order, 0)
    keys = np.zeros(length, dtype=np.int64)
    for offset in range(order + 1):
        keys = keys * ALPHABET + values[offset : offset + length]
    return keys


def _not_empty(data: bytes) -> bytes:
    if not data:
        raise ValueError("there is no byte to compress")
    return data
