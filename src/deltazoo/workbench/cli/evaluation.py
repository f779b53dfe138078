"""Which documents ``deltazoo eval`` scores, and the figures as JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from deltazoo.workbench.console import say
from deltazoo.workbench.evaluate.checkpoint_path import training_config_of
from deltazoo.workbench.evaluate.comparison import Baseline
from deltazoo.workbench.train.config import DataConfig
from deltazoo.workbench.train.corpus import DEFAULT_TOKENIZER_SAMPLE, num_bytes, read_corpus
from deltazoo.workbench.train.text import Document, open_text

if TYPE_CHECKING:  # it brings torch, which a wrong argument does not wait for
    from deltazoo.workbench.evaluate.score import Score


@dataclass(frozen=True)
class EvaluationDocuments:
    """What is scored, and the training text for the baselines that need one (empty if unknown)."""

    train: Sequence[Document]
    held_out: Sequence[Document]
    description: str


def choose_documents(path: str, text: str | None, text_field: str, max_bytes: int | None) -> EvaluationDocuments:
    """The held-out part of the text that the model in ``path`` was trained on, or all of ``text``.

    Raises:
        ValueError: no ``text`` for a model that does not say what it was trained on, options without effect, no text.
    """
    config = training_config_of(path)
    if text is None and (max_bytes is not None or text_field != DataConfig.text_field):
        raise ValueError("--max-bytes and --text-field act on --text only")
    if text is None and config is None:
        raise ValueError(f"{path} does not say what text it was trained on: name a text to score with --text")
    try:
        corpus = read_corpus(open_text(config.data), config.data, DEFAULT_TOKENIZER_SAMPLE) if config else None
    except ValueError as error:  # the model may come from another machine
        if text is None:
            raise
        say(f"the baselines do without the training text: {error}")
        corpus = None
    if text is None:
        assert corpus is not None
        return EvaluationDocuments(corpus.train, corpus.validation, f"held-out part of {corpus.description}")
    held_out: list[Document] = []
    size = 0
    source = open_text(DataConfig(text=text, text_field=text_field))
    for document in source.documents():
        if max_bytes is not None and size >= max_bytes:
            break
        held_out.append(document)
        size += num_bytes(document)
    if not held_out:
        raise ValueError(f"{source.description} holds no text")
    return EvaluationDocuments(corpus.train if corpus else [], held_out, source.description)


def write_json(path: str, model: str, text: str, score: "Score", others: Sequence[Baseline]) -> None:
    """Write everything that was measured to a file."""
    figures = {
        "model": model,
        "text": text,
        "bits_per_byte": score.bits_per_byte,
        "perplexity": score.perplexity,
        "score": asdict(score),
        "baselines": [asdict(baseline) for baseline in others],
    }
    Path(path).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
