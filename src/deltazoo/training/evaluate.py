"""Scores of language models on text: packed rows, whole documents beside compressors, single swapped layers."""

import gzip
import lzma
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltazoo.compat.transformers import accelerate
from deltazoo.compat.transformers.layer import AcceleratedLayer
from deltazoo.compat.transformers.packing import layers_over_neighbours
from deltazoo.diagnosis.rule_calls import delta_rule_layers
from deltazoo.generation.cache import CACHE
from deltazoo.generation.conditions import learned_positions, max_positions, origin_of_nan
from deltazoo.models import DeltaRuleConfig
from deltazoo.models.delta_layers import evaluation_mode
from deltazoo.swap.families import decoder_layers_of, family_of
from deltazoo.swap.surgery import swap_attention, unswap_attention
from deltazoo.training.console import console, track
from deltazoo.training.data import Records, TextFiles, first_texts, num_bytes
from deltazoo.training.folder import write_json
from deltazoo.training.loading import check_vocabulary
from deltazoo.training.tokens import IGNORED, Row, collate, collate_side_by_side, encode_documents, pack_in_order

_RANKED_AT_ONCE = 8  # rows of a forward pass
_BYTES_PER_TOKEN = 16  # more than any tokenizer has on ordinary text, so that enough text is read


@torch.no_grad()
def score_rows(
    model: PreTrainedModel,
    rows: Sequence[Row],
    rows_at_once: int,
    collate_rows: Callable[..., dict[str, Any]] = collate,
    empty_passes: Sequence[Row] = (),
) -> tuple[float, int]:
    """Total negative log-likelihood of packed rows in nats, and the number of predicted tokens.

    It is a sum over all tokens, so that the tokens of short rows do not weigh more.

    Args:
        model: the model, in training mode or not.
        collate_rows: function that makes a batch of rows.
        empty_passes: rows for further forward passes that do not count, one each.
    """
    nats, tokens = 0.0, 0
    passes = [rows[first : first + rows_at_once] for first in range(0, len(rows), rows_at_once)]
    with evaluation_mode(model):
        for scored in passes:
            batch = collate_rows(scored)
            nats += _packed_nats(model, batch)
            tokens += int((_targets(batch) != IGNORED).sum())
        for row in empty_passes[len(passes) :]:
            _packed_nats(model, collate_rows([row]))
    return nats, tokens


def _packed_nats(model: PreTrainedModel, batch: dict[str, Any]) -> float:
    """Negative log-likelihood in nats of a collated batch, or of a rank's piece of one, summed over its labels."""
    inputs = {name: tensor.to(model.device) for name, tensor in batch.items() if "labels" not in name}
    logits = _forward(model, **inputs, use_cache=False).logits
    return _nats(logits.flatten(0, 1), _targets(batch).flatten().to(model.device))


def _targets(batch: dict[str, Any]) -> torch.Tensor:
    """The label `[B, T]` of each token's prediction; a piece has `shift_labels`, whose last one another rank holds."""
    return batch["shift_labels"] if "shift_labels" in batch else F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def _nats(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """Negative log-likelihood of ``targets`` [T] under ``logits`` [T, vocabulary], in fp32, summed in fp64."""
    losses = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED, reduction="none")
    return float(losses.double().sum())


def _forward(model: PreTrainedModel, **inputs: Any) -> Any:
    """The output of the model's forward pass, with bf16 autocast on a GPU that supports it, as in training."""
    on_gpu = model.device.type == "cuda" and torch.cuda.is_bf16_supported()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=on_gpu):
        return model(**inputs)


@dataclass(frozen=True)
class Score:
    """Negative log-likelihood of the documents.

    Attributes:
        nats: total over all tokens after the beginning token, natural log.
        tokens: number of these tokens.
        bytes: UTF-8 bytes of the documents.
        documents: number of documents.
        seconds: wall-clock time of the forward passes.
    """

    nats: float
    tokens: int
    bytes: int
    documents: int
    seconds: float

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte: comparable between tokenizers, and with compressors."""
        return self.nats / math.log(2) / self.bytes

    @property
    def perplexity(self) -> float:
        """Perplexity per token: comparable only between models with the same tokenizer."""
        return math.exp(self.nats / self.tokens)

    @property
    def tokens_per_second(self) -> float:
        """Speed of the scoring."""
        return self.tokens / self.seconds


@torch.no_grad()
def score_documents(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    tokens_at_once: int = 8192,
) -> Score:
    """The score of whole documents, each after the beginning token.

    If the model supports packed sequences, documents are packed to ``tokens_at_once`` tokens; otherwise they are scored
    one by one. A longer document is read in pieces, with the model's cache carried from piece to piece; if the model
    has learned positions, in pieces of at most so many tokens, without a cache.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        texts: texts of the documents.
        tokens_at_once: tokens of a forward pass.

    Raises:
        ValueError: nothing to score, or the tokenizer has more entries than the model.
        FloatingPointError: the negative log-likelihood of a text is NaN or infinite.
    """
    check_vocabulary(model, tokenizer)
    if not texts:
        raise ValueError("there is no document to score")
    encoded = [ids.astype(np.int64) for ids in encode_documents(tokenizer, texts, "tokenizing held-out text")]
    limit = learned_positions(model)
    groups = _groups(encoded, tokens_at_once if packs_documents(model) else 0)
    nats = 0.0
    began = time.perf_counter()
    with evaluation_mode(model):
        for group in track(groups, "scoring held-out text"):
            if len(group) > 1:
                found = _packed_nats(model, collate([group]))
            else:
                found = _score_alone(model, group[0], min(tokens_at_once, limit or tokens_at_once), carried=not limit)
            if not math.isfinite(found):
                ids = np.concatenate(group)[: limit or tokens_at_once]
                origin = origin_of_nan(model, torch.from_numpy(ids).to(model.device)[None])
                raise FloatingPointError(
                    f"the model computed {found} as the negative log-likelihood of a text, so it has no score{origin}"
                )
            nats += found
    seconds = time.perf_counter() - began
    tokens, size = sum(len(ids) - 1 for ids in encoded), sum(map(num_bytes, texts))
    return Score(nats, tokens, size, len(texts), seconds)


def packs_documents(model: PreTrainedModel) -> bool:
    """Whether the model keeps packed documents apart, given ``cu_seqlens``."""
    if isinstance(model.config, DeltaRuleConfig):
        return True
    accelerated = any(isinstance(module, AcceleratedLayer) for module in model.modules())
    return accelerated and layers_over_neighbours(model.base_model.config) is None


def _groups(encoded: Sequence[np.ndarray], tokens_at_once: int) -> list[list[np.ndarray]]:
    """Groups of documents, sorted by length, of at most ``tokens_at_once`` tokens."""
    groups: list[list[np.ndarray]] = []
    size = 0
    for ids in sorted(encoded, key=len):
        if not groups or size + len(ids) > tokens_at_once:
            groups.append([])
            size = 0
        groups[-1].append(ids)
        size += len(ids)
    return groups


def _score_alone(model: PreTrainedModel, ids: np.ndarray, tokens_at_once: int, *, carried: bool) -> float:
    """Negative log-likelihood of one document in nats; the cache is `carried` from piece to piece, or none is used."""
    tokens = torch.from_numpy(ids).to(model.device)
    cache, nats = None, 0.0
    for first in range(0, len(tokens) - 1, tokens_at_once):
        piece = tokens[first : first + tokens_at_once]
        whole = first == 0 and len(tokens) - 1 <= tokens_at_once
        outputs = _forward(model, input_ids=piece[None], use_cache=carried and not whole, **{CACHE: cache})
        cache = getattr(outputs, CACHE)
        targets = tokens[first + 1 : first + 1 + len(piece)]
        nats += _nats(outputs.logits[0, : len(targets)], targets)
    return nats


@dataclass(frozen=True)
class Baseline:
    """A compressor on the held-out documents: its name, its score, and the text that it had read before."""

    name: str
    bits_per_byte: float
    has_seen: str


def baselines(train: Sequence[str], held_out: Sequence[str], *, primed: bool = False) -> list[Baseline]:
    """The scores of ``gzip -9`` and ``xz -9`` on the held-out texts, concatenated in this order.

    Args:
        train: training texts; empty if unknown.
        held_out: scored texts.
        primed: whether to measure xz also after the training text, if there is any (seconds per 10 MB).
    """
    data, known = (b"".join(text.encode() for text in part) for part in (held_out, train))
    with console.status("measuring the baselines"):
        found = [
            # gzip's window is 32 KiB, the dictionary of xz reaches back 64 MiB.
            Baseline("gzip -9", 8 * len(gzip.compress(data, compresslevel=9, mtime=0)) / len(data), "nothing"),
            Baseline("xz -9", 8 * len(lzma.compress(data, preset=9)) / len(data), "nothing"),
        ]
        if primed and known:
            added = len(lzma.compress(known + data, preset=9)) - len(lzma.compress(known, preset=9))
            found.append(Baseline("xz -9, primed", 8 * added / len(data), "the training text"))
    return found


@dataclass(frozen=True)
class Ranking:
    """Losses of a model with each layer swapped alone, in nats per token.

    Attributes:
        rule: rule of the new layers.
        loss: loss of the original model.
        tokens: number of predicted tokens.
        losses: one entry per layer, in the model's order.
    """

    rule: str
    loss: float
    tokens: int
    losses: tuple[float, ...]

    def best(self, count: int) -> list[int]:
        """Numbers of the ``count`` layers whose swap raises the loss least, in the model's order."""
        return sorted(self.order[:count])

    @property
    def order(self) -> list[int]:
        """Numbers of the layers, the smallest rise first and NaN last."""
        return sorted(range(len(self.losses)), key=lambda layer: (math.isnan(self.losses[layer]), self.losses[layer]))

    def save(self, path: Path) -> None:
        """Write the ranking as JSON; null where a loss is NaN."""
        layers = [{"layer": n, "loss": loss, "rise": loss - self.loss} for n, loss in enumerate(self.losses)]
        figures = {"rule": self.rule, "loss": self.loss, "tokens": self.tokens, "layers": layers}
        write_json(path, figures)


def ranking_rows(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, source: TextFiles | Records, max_tokens: int
) -> list[Row]:
    """The first ``max_tokens`` of a text in rows of at most 1024 tokens, no longer than the model's positions."""
    texts = first_texts(source, max_tokens * _BYTES_PER_TOKEN)
    row_length = min(1024, max_positions(model) or 1024, max_tokens)
    encoded = encode_documents(tokenizer, texts, "tokenizing the text to rank on")
    return pack_in_order(encoded, row_length)[: max_tokens // row_length]


def rank_layers(
    model: PreTrainedModel,
    rule: str,
    rows: Sequence[Row],
    **options: Any,
) -> Ranking:
    """The losses of a model with each layer swapped alone, after which the original is restored.

    Args:
        model: a model that is not swapped; it is unchanged afterwards.
        rows: packed rows of text, see ``deltazoo.training.tokens.pack_in_order``.
        options: further options of ``swap_attention``, such as ``init``.

    Raises:
        ValueError: there is no text, or the model cannot be swapped.
        FloatingPointError: the original model's loss is NaN or infinite.
    """
    if not rows:
        raise ValueError("there is no text to rank the layers on")
    num_layers = len(decoder_layers_of(model, family_of(model.config)))

    def loss() -> tuple[float, int]:
        nats, tokens = score_rows(model, rows, _RANKED_AT_ONCE, collate_side_by_side)
        return nats / tokens, tokens

    before, tokens = loss()
    if not math.isfinite(before):
        raise FloatingPointError(f"the original model's loss on this text is {before}: there is no rise to rank by")
    losses = []
    for layer in track(range(num_layers), "ranking the layers"):
        swap_attention(model, rule, layers=[layer], keep_teacher=True, **options)
        try:
            losses.append(loss()[0])
        finally:
            unswap_attention(model)
    return Ranking(rule, before, tokens, tuple(losses))


def run_harness(arguments: Sequence[str]) -> None:
    """Run the command `lm_eval` with these arguments, and a model type `deltazoo` that runs on our operators.

    `--model deltazoo` is `--model hf` whose delta-rule layers of transformers are accelerated. A model without a
    delta-rule layer raises ValueError, and NaN in logits raises FloatingPointError.
    """
    from lm_eval.__main__ import cli_evaluate

    _register_harness_model()
    with patch.object(sys, "argv", ["lm_eval", *arguments]):
        cli_evaluate()


@cache
def _register_harness_model() -> None:
    """Register `--model deltazoo` with the harness, which takes a name once."""
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM

    @register_model("deltazoo")
    class DeltazooLM(HFLM):
        def _create_model(self, *args: Any, **kwargs: Any) -> None:
            super()._create_model(*args, **kwargs)
            if not delta_rule_layers(self.model):  # our and swapped layers need no acceleration
                accelerate(self.model)

        def _model_call(self, *args: Any, **kwargs: Any) -> Any:
            logits = super()._model_call(*args, **kwargs)
            if bool(logits.isnan().any()):  # the harness would compare and average NaN
                raise FloatingPointError(
                    "the model computed NaN: deltazoo diagnose says in which module it comes first"
                )
            return logits
