"""The text that ``deltazoo swap`` ranks layers on, and what it shows and saves."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltazoo.workbench.convert.conversion import ConversionResult
from deltazoo.workbench.convert.conversion_plots import draw_ranking
from deltazoo.workbench.convert.layer_ranking import Ranking
from deltazoo.workbench.train.checkpoint_files import whole_or_not_at_all
from deltazoo.workbench.train.config import DataConfig
from deltazoo.workbench.train.corpus import DEFAULT_TOKENIZER_SAMPLE, read_corpus
from deltazoo.workbench.train.packed_rows import pack_in_order
from deltazoo.workbench.train.text import open_text
from deltazoo.workbench.train.tokenizer import encode_documents

_BYTES_PER_TOKEN = 16  # more than any tokenizer makes of ordinary text, so that enough of it is read


def ranking_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, data: DataConfig, held_out: bool, max_tokens: int
) -> list[dict[str, np.ndarray]]:
    """The beginning of a text in rows no longer than the model was made for.

    Args:
        model: what will read it.
        tokenizer: the model's own.
        data: the text.
        held_out: take the part that a conversion with this ``data`` holds out, instead of all documents.
        max_tokens: how much of it at most.
    """
    source = open_text(data)
    if held_out:
        documents = read_corpus(source, data, DEFAULT_TOKENIZER_SAMPLE).validation
    else:
        documents = []
        size = 0
        for document in source.documents():
            documents.append(document)
            size += len(document.text)
            if size >= max_tokens * _BYTES_PER_TOKEN:
                break
    row_length = min(1024, getattr(model.config, "max_position_embeddings", None) or 1024, max_tokens)
    encoded = encode_documents(tokenizer, documents, "tokenizing the text to rank on")
    return pack_in_order(encoded, row_length)[: max_tokens // row_length]


def ranking_table(ranking: Ranking) -> Table:
    """The layers, the least missed first."""
    table = Table(title=f"one layer swapped for {ranking.variant} after transfer, {ranking.tokens:,} tokens")
    for heading in ("layer", "loss, nats per token", "rise"):
        table.add_column(heading, justify="right")
    for score in sorted(ranking.layers, key=lambda score: score.rise):
        table.add_row(str(score.layer), f"{score.loss:.4f}", f"{score.rise:+.4f}")
    table.add_row("none", f"{ranking.loss:.4f}", "", style="dim")
    return table


def save_ranking(ranking: Ranking, folder: Path, chosen: list[int]) -> Path:
    """Write the ranking as JSON and as a picture into ``folder``; returns the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ranking.json").write_text(json.dumps(asdict(ranking), indent=1) + "\n", encoding="utf-8")
    return draw_ranking(folder / "ranking.png", ranking, chosen)


def save_swapped(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    """Save a swapped model with its tokenizer, whole or not at all.

    Raises:
        ValueError: there is a model already.
    """
    target = folder / "model"
    if target.exists():
        raise ValueError(f"{target} exists already: choose another --output")
    with whole_or_not_at_all(target) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    return target


def conversion_table(result: ConversionResult) -> Table:
    """Held-out bits per byte from stage to stage."""
    names = {"original": "original", "transfer": "swapped, weights transferred"}
    gap = result.scores["transfer"] - result.scores["original"]
    table = Table(title="conversion")
    for heading in ("", "held-out bits per byte", "gap recovered", "tokens"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, bits in result.scores.items():
        stage: Any = result.stages.get(name)
        recovered = f"{(result.scores['transfer'] - bits) / gap:.1%}" if stage and gap > 0 else ""
        tokens = f"{stage.tokens:,}" if stage else ""
        table.add_row(names.get(name, f"after {name}"), f"{bits:.3f}", recovered, tokens)
    return table
