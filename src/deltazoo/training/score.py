"""Score a causal language model on held-out documents, every byte of which counts."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from deltazoo.generation.cache_argument import CACHE
from deltazoo.generation.nan_origin import origin_of_nan
from deltazoo.generation.position_limit import learned_positions
from deltazoo.models.delta_layers import evaluation_mode
from deltazoo.training.console import track
from deltazoo.training.tokens import collate
from deltazoo.training.data import Document
from deltazoo.training.tokens import encode_documents
from deltazoo.training.validation_loss import as_trained, nats_of, packed_nats


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
    documents: Sequence[Document],
    *,
    tokens_at_once: int = 8192,
) -> Score:
    """Score whole documents, each after the beginning token.

    If the model supports packed sequences, documents are packed to ``tokens_at_once`` tokens; otherwise they are scored
    one by one. A longer document is read in pieces, with the model's cache carried from piece to piece; if the model
    has learned positions, in pieces of at most so many tokens, without a cache.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        documents: the texts.
        tokens_at_once: tokens of a forward pass.

    Raises:
        ValueError: nothing to score, or the tokenizer has more entries than the model.
        FloatingPointError: the negative log-likelihood of a text is NaN or infinite.
    """
    check_vocabulary(model, tokenizer)
    if not documents:
        raise ValueError("there is no document to score")
    encoded = encode_documents(tokenizer, documents, "tokenizing held-out text")
    limit = learned_positions(model)
    groups = _groups(encoded, tokens_at_once if packs_documents(model) else 0)
    nats = 0.0
    began = time.perf_counter()
    with evaluation_mode(model):
        for group in track(groups, "scoring held-out text"):
            if len(group) > 1:
                found = _score_packed(model, group)
            else:
                found = _score_alone(model, group[0], min(tokens_at_once, limit or tokens_at_once), carried=not limit)
            if not math.isfinite(found):
                ids = np.concatenate(group)[: limit or tokens_at_once].astype(np.int64)
                origin = origin_of_nan(model, torch.from_numpy(ids).to(model.device)[None])
                raise FloatingPointError(
                    f"the model computed {found} as the negative log-likelihood of a text, so it has no score{origin}"
                )
            nats += found
    seconds = time.perf_counter() - began
    return Score(
        nats=nats,
        tokens=sum(len(ids) - 1 for ids in encoded),
        bytes=sum(document.num_bytes for document in documents),
        documents=len(documents),
        seconds=seconds,
    )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the tokenizer has tokens for which the model has no embedding."""
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} entries, the checkpoint's vocabulary only {model.config.vocab_size}: "
            "they do not belong together"
        )


def packs_documents(model: PreTrainedModel) -> bool:
    """Whether the model keeps packed documents apart, given ``cu_seqlens``."""
    from deltazoo.compat.transformers import keeps_documents_apart
    from deltazoo.models import DeltaRuleConfig

    return isinstance(model.config, DeltaRuleConfig) or keeps_documents_apart(model)


def _groups(encoded: Sequence[np.ndarray], tokens_at_once: int) -> list[list[np.ndarray]]:
    """Documents, sorted by length, in groups of at most ``tokens_at_once`` tokens."""
    groups: list[list[np.ndarray]] = []
    size = 0
    for ids in sorted(encoded, key=len):
        if not groups or size + len(ids) > tokens_at_once:
            groups.append([])
            size = 0
        groups[-1].append(ids)
        size += len(ids)
    return groups


def _score_packed(model: PreTrainedModel, group: Sequence[np.ndarray]) -> float:
    start = np.zeros(1, dtype=np.int64)
    return packed_nats(model, collate([{"input_ids": ids.astype(np.int64), "starts": start} for ids in group]))


def _score_alone(model: PreTrainedModel, ids: np.ndarray, tokens_at_once: int, *, carried: bool) -> float:
    """Negative log-likelihood of one document in nats; the cache is `carried` from piece to piece, or none is used."""
    tokens = torch.from_numpy(ids.astype(np.int64)).to(model.device)
    cache, nats = None, 0.0
    for first in range(0, len(tokens) - 1, tokens_at_once):
        piece = tokens[first : first + tokens_at_once]
        whole = first == 0 and len(tokens) - 1 <= tokens_at_once
        outputs = as_trained(model)(input_ids=piece[None], use_cache=carried and not whole, **{CACHE: cache})
        cache = getattr(outputs, CACHE)
        targets = tokens[first + 1 : first + 1 + len(piece)]
        nats += nats_of(outputs.logits[0, : len(targets)], targets)
    return nats
