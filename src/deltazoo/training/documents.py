"""The documents that a model is scored on, and the training text for the baselines. Imports no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltazoo.training.checkpoint_path import training_config_of
from deltazoo.training.config import DataConfig
from deltazoo.training.console import say
from deltazoo.training.corpus import DEFAULT_TOKENIZER_SAMPLE, first_documents, read_corpus
from deltazoo.training.text import Document, open_text


@dataclass(frozen=True)
class EvaluationDocuments:
    """What a model is scored on.

    Attributes:
        train: training documents, for the baselines that need them; empty if unknown.
        held_out: documents to score.
        description: where the held-out documents come from.
    """

    train: Sequence[Document]
    held_out: Sequence[Document]
    description: str


def choose_documents(path: str, text: DataConfig | None = None, max_bytes: int | None = None) -> EvaluationDocuments:
    """The held-out part of the text that a model was trained on, or a text of the caller's.

    Args:
        path: of the model, see `resolve_checkpoint`.
        text: all of this text instead; nothing of it is held out.
        max_bytes: stop reading ``text`` after this many bytes.

    Raises:
        ValueError: no ``text`` for a model that does not say what it was trained on, or there is no text.
    """
    config = training_config_of(path)
    source = None if text is None else open_text(text)
    if text is None and config is None:
        where = path if Path(path).expanduser().is_dir() else f"{path}, which is no folder here,"
        raise ValueError(f"{where} does not say what text it was trained on: name a text with --text")
    try:
        corpus = read_corpus(open_text(config.data), config.data, DEFAULT_TOKENIZER_SAMPLE) if config else None
    except ValueError as error:  # the model may have been trained on another machine
        if text is None:
            raise
        say(f"the baselines do without the training text: {error}")
        corpus = None
    if source is None:
        assert corpus is not None
        return EvaluationDocuments(corpus.train, corpus.validation, f"held-out part of {corpus.description}")
    held_out = first_documents(source, max_bytes)
    if not held_out:
        raise ValueError(f"{source.description} holds no text")
    return EvaluationDocuments(corpus.train if corpus else [], held_out, source.description)
