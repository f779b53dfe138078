"""Rank a model's layers by the loss added when the attention of one layer is swapped, on the user's text."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltazoo.generation.position_limit import max_positions
from deltazoo.swap.families import decoder_layers_of, family_of
from deltazoo.swap.surgery import swap_attention, unswap_attention
from deltazoo.training.folder import as_json
from deltazoo.training.config import DataConfig
from deltazoo.training.console import track
from deltazoo.training.data import DEFAULT_TOKENIZER_SAMPLE, first_documents, read_corpus
from deltazoo.training.tokens import collate_side_by_side, pack_in_order
from deltazoo.training.data import open_text
from deltazoo.training.tokens import encode_documents
from deltazoo.training.validation_loss import score_rows

__all__ = ["LayerScore", "Ranking", "check_best", "rank_layers", "ranking_rows"]

_BYTES_PER_TOKEN = 16  # more than with any tokenizer on ordinary text, so that enough text is read


@dataclass(frozen=True)
class LayerScore:
    """A model with one layer swapped: its ``loss`` in nats per token, and the ``rise`` over the original model's."""

    layer: int
    loss: float
    rise: float


@dataclass(frozen=True)
class Ranking:
    """The loss with each layer swapped alone.

    Attributes:
        rule: of the new layers.
        loss: of the original model, in nats per token.
        tokens: number of predicted tokens.
        layers: one entry per layer, in the model's order.
    """

    rule: str
    loss: float
    tokens: int
    layers: tuple[LayerScore, ...]

    def best(self, count: int) -> list[int]:
        """The ``count`` layers whose swap raises the loss least, in the model's order.

        Raises:
            ValueError: the model has fewer layers.
        """
        check_best(count, len(self.layers))
        return sorted(score.layer for score in self.ordered[:count])

    @property
    def ordered(self) -> list[LayerScore]:
        """The layers, the smallest rise first and NaN last."""
        return sorted(self.layers, key=lambda score: (math.isnan(score.rise), score.rise, score.layer))

    def save(self, path: Path) -> None:
        """Write the ranking as JSON; null where a loss is NaN."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_json(asdict(self), indent=1) + "\n", encoding="utf-8")


def check_best(count: int, num_layers: int) -> None:
    """Raise ValueError unless a model has as many layers as are asked for."""
    if not 1 <= count <= num_layers:
        raise ValueError(f"best:{count} asks for {count} of {num_layers} layers")


def ranking_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DataConfig, held_out: bool, max_tokens: int
) -> list[dict[str, np.ndarray]]:
    """The beginning of a text, packed into rows no longer than the model's longest position.

    Args:
        model: the model to rank.
        tokenizer: the model's own.
        data: the text.
        held_out: take only the documents that a conversion with this ``data`` holds out.
        max_tokens: upper limit of tokens.
    """
    source = open_text(data)
    if held_out:
        documents = read_corpus(source, data, DEFAULT_TOKENIZER_SAMPLE).validation
    else:
        documents = first_documents(source, max_tokens * _BYTES_PER_TOKEN)
    row_length = min(1024, max_positions(model) or 1024, max_tokens)
    encoded = encode_documents(tokenizer, documents, "tokenizing the text to rank on")
    return pack_in_order(encoded, row_length)[: max_tokens // row_length]


def rank_layers(
    model: PreTrainedModel,
    rule: str,
    rows: Sequence[dict[str, np.ndarray]],
    *,
    rows_at_once: int = 8,
    **options: Any,
) -> Ranking:
    """Swap each layer alone, measure the loss, and restore the original.

    Args:
        model: not swapped; unchanged afterwards.
        rule: of the new layers.
        rows: packed rows of text, as ``deltazoo.training.packed_rows.pack_in_order`` makes them.
        rows_at_once: rows in one forward pass.
        options: further options of ``swap_attention``, such as ``init``.

    Raises:
        ValueError: there is no text, or the model cannot be swapped.
        FloatingPointError: the original model's loss is NaN or infinite.
    """
    if not rows:
        raise ValueError("there is no text to rank the layers on")
    num_layers = len(decoder_layers_of(model, family_of(model.config)))

    def loss() -> tuple[float, int]:
        nats, tokens = score_rows(model, rows, rows_at_once, collate_side_by_side)
        return nats / tokens, tokens

    before, tokens = loss()
    if not math.isfinite(before):
        raise FloatingPointError(f"the original model's loss on this text is {before}: there is no rise to rank by")
    scores = []
    for layer in track(range(num_layers), "ranking the layers", total=num_layers):
        swap_attention(model, rule, layers=[layer], keep_teacher=True, **options)
        try:
            after, _ = loss()
        finally:
            unswap_attention(model)
        scores.append(LayerScore(layer, after, after - before))
    return Ranking(rule, before, tokens, tuple(scores))
