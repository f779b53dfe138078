"""Scores of a trained model on the held-out stream: nats by file, recall of new identifiers.

The stream is cut into rows of one length; every row is read from an empty state. All tokens are scored but those
without bytes, which mark the beginning of a file, and the stream's end, which fills no row of the longest length.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.models import DeltaRuleForCausalLM
from experiments.loop import autocast
from experiments.text.corpus import TextCorpus
from experiments.text.models import TextRecipe

_NEAREST = 64
"""The first group of distances reaches so far; each further one is as long as all before it."""

_TOKENS_AT_ONCE = 2**17
_LOGITS_AT_ONCE = 2**13


def scored_tokens(corpus: TextCorpus, recipe: TextRecipe) -> int:
    """Tokens that are scored, at every length the same: whole rows of the longest.

    Raises:
        ValueError: the held-out part is shorter than one of them.
    """
    longest = recipe.scored_lengths[-1]
    count = (len(corpus.held_out) - 1) // longest * longest  # the last token of a row predicts the one after it
    if count == 0:
        raise ValueError(f"the held-out part has {len(corpus.held_out)} tokens, not one row of {longest} and a token")
    return count


def file_bytes(corpus: TextCorpus, recipe: TextRecipe) -> np.ndarray:
    """`[files]` int64: scored bytes of each held-out file; 0 for one beyond the scored tokens."""
    return _by_file(_target_bytes(corpus, recipe), corpus)


@torch.no_grad()
def score(
    model: DeltaRuleForCausalLM, corpus: TextCorpus, recipe: TextRecipe, lengths: Sequence[int] | None = None
) -> dict[str, dict[str, Any]]:
    """By row length, all of the recipe's or some; the model is in evaluation mode afterwards.

    Returns:
        `file_nats` of each held-out file, summed over its scored tokens; `recall` of identifiers that no training file
        has, by how often the row has had them before: "first", or for the second time a power of two that the distance
        to the first does not reach: how many, how many of them the model completes (every token after the first is its
        likeliest), the tokens that complete them; `recall_nats` of those tokens, summed.
    """
    model.eval()
    stream = torch.from_numpy(corpus.held_out.astype(np.int64)).to(model.device)
    return {
        str(length): _score_rows(model, stream, corpus, recipe, length) for length in lengths or recipe.scored_lengths
    }


def _score_rows(
    model: DeltaRuleForCausalLM, stream: Tensor, corpus: TextCorpus, recipe: TextRecipe, length: int
) -> dict[str, Any]:
    bytes_of = _target_bytes(corpus, recipe)
    rows = stream[: len(bytes_of)].view(-1, length)
    successors = stream[1 : len(bytes_of) + 1].view(-1, length)
    at_once = max(1, _TOKENS_AT_ONCE // length)
    parts = [
        _nats_and_hits(model, rows[first : first + at_once], successors[first : first + at_once])
        for first in range(0, len(rows), at_once)
    ]
    nats = np.where(bytes_of > 0, np.concatenate([part[0] for part in parts]), 0.0)
    if not np.isfinite(nats).all():
        raise ArithmeticError(f"the model computes NaN or infinity on the held-out part, in rows of {length} tokens")
    hits = np.concatenate([part[1] for part in parts])
    recall, recall_nats = _recall(nats, hits, corpus, length)
    return {
        "file_nats": [round(x, 1) for x in _by_file(nats, corpus).tolist()],
        "recall": recall,
        "recall_nats": {key: round(x, 1) for key, x in recall_nats.items()},
    }


def _nats_and_hits(model: DeltaRuleForCausalLM, rows: Tensor, successors: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Nats of each successor float64, and whether it was the likeliest token; flat."""
    nats, hits = [], []
    with autocast(model.device):
        hidden = model.model(input_ids=rows, use_cache=False).last_hidden_state.flatten(0, 1)
    for states, targets in zip(hidden.split(_LOGITS_AT_ONCE), successors.flatten().split(_LOGITS_AT_ONCE), strict=True):
        logits = F.linear(states.float(), model.lm_head.weight.float())  # in bfloat16 the likeliest tokens often tie
        nats.append(F.cross_entropy(logits, targets, reduction="none"))
        hits.append(logits.argmax(-1) == targets)
    return torch.cat(nats).double().cpu().numpy(), torch.cat(hits).cpu().numpy()


def _target_bytes(corpus: TextCorpus, recipe: TextRecipe) -> np.ndarray:
    """`[scored]` int64: bytes of the successor of each token."""
    return corpus.token_bytes[corpus.held_out[1 : scored_tokens(corpus, recipe) + 1]].astype(np.int64)


def _by_file(values: np.ndarray, corpus: TextCorpus) -> np.ndarray:
    """Sums over the tokens of each file; value `i` is about token `i + 1`."""
    files = np.searchsorted(corpus.file_starts, np.arange(1, len(values) + 1), side="right") - 1
    return np.bincount(files, weights=values, minlength=len(corpus.file_starts))


def _recall(
    nats: np.ndarray, hits: np.ndarray, corpus: TextCorpus, length: int
) -> tuple[dict[str, list[int]], dict[str, float]]:
    begins, completing, names = corpus.new_identifiers.T.astype(np.int64)
    last = begins + completing  # the last token; its row is the one in which it is predicted
    inside = (last < len(nats)) & (begins // length == (last - 1) // length)
    begins, completing, names, rows = (x[inside] for x in (begins, completing, names, begins // length))
    order = np.lexsort((begins, names, rows))
    begins, completing, names, rows = (x[order] for x in (begins, completing, names, rows))
    new = np.ones(len(begins), dtype=bool)
    new[1:] = (rows[1:] != rows[:-1]) | (names[1:] != names[:-1])
    second = np.zeros_like(new)
    second[1:] = new[:-1] & ~new[1:]
    ends = [_NEAREST * 2**power for power in range(64) if _NEAREST * 2**power < 2 * length]
    distance = np.diff(begins, prepend=0)
    groups = {"first": new}
    for low, high in zip([0, *ends], ends, strict=False):
        groups[str(high)] = second & (distance >= low) & (distance < high)
    # Token t is predicted at index t - 1.
    sums = np.concatenate([[0.0], np.cumsum(nats)])
    right = np.concatenate([[0], np.cumsum(hits)])
    completed = right[begins + completing] - right[begins] == completing
    cost = sums[begins + completing] - sums[begins]
    counts = {
        key: [int(group.sum()), int(completed[group].sum()), int(completing[group].sum())]
        for key, group in groups.items()
    }
    return counts, {key: float(cost[group].sum()) for key, group in groups.items()}
