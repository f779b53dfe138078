"""Measure the baselines on held-out documents, and save them with a model's score."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltazoo.training.baselines import ByteContextModel, gzip_bits_per_byte, xz_bits_per_byte
from deltazoo.training.checkpoint_files import as_json
from deltazoo.training.console import console
from deltazoo.training.text import Document

if TYPE_CHECKING:  # imports torch, which a command loads only after it has checked its arguments
    from deltazoo.training.score import Score


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
