"""Two probes of recall within the context, for language models that were trained on text only.

**Pairs** of random tokens are shown, then the same pairs in another order. A pair's second token cannot be guessed; it
must be recalled. A model that was never trained on such a task rarely gives it the highest probability of all tokens,
so the probe also asks whether it is likelier than the second tokens of all other pairs. Recall within the context is
most of what separates linear attention from softmax attention (arXiv:2312.04927).

**Copying**: a passage of text is shown twice. The bits that its tokens save at the second showing come from the
context (induction, arXiv:2209.11895). Unlike random pairs, text is what the model was trained on.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltazoo.generation.nan_origin import origin_of_nan
from deltazoo.models.delta_layers import evaluation_mode
from deltazoo.training.validation_loss import as_trained

__all__ = ["Copying", "Recall", "cut_passages", "probe_copying", "probe_recall"]


@dataclass(frozen=True)
class Recall:
    """Results of the probe with pairs.

    Attributes:
        num_pairs: pairs per sequence.
        accuracy: share of the questions whose likeliest token is the right one.
        among_shown: share of the questions in which the right token is likelier than the second token of every other
            pair; one over ``num_pairs`` for a model that guesses.
        gain: mean cost of a pair's second token at the first showing minus that at the second, in nats.
        questions: number of predicted second tokens, at the second showing.
    """

    num_pairs: int
    accuracy: float
    among_shown: float
    gain: float
    questions: int


@dataclass(frozen=True)
class Copying:
    """Results of the copying probe.

    Attributes:
        length: tokens of a passage.
        first: bits per token at the first showing, without the passage's first token.
        second: the same at the second showing.
        copied: share of the tokens at the second showing, without the first, that are the likeliest prediction.
        passages: number of passages.
    """

    length: int
    first: float
    second: float
    copied: float
    passages: int


@torch.no_grad()
def probe_recall(
    model: PreTrainedModel, num_pairs: int, *, sequences: int = 64, reserved: int = 2, seed: int = 0
) -> Recall:
    """Show ``num_pairs`` random pairs twice, in two orders, and measure the predictions at the second showing.

    Args:
        model: any causal language model; the sequences are ``1 + 4 * num_pairs`` tokens long.
        num_pairs: pairs per sequence; their tokens are all different.
        sequences: number of sequences.
        reserved: special tokens at the start of the vocabulary, which no pair holds; token 0 begins a sequence.
        seed: of the random pairs; compared models need the same.

    Raises:
        ValueError: the vocabulary is too small for so many different tokens.
        FloatingPointError: the model computes NaN or infinite logits.
    """
    vocabulary = model.config.vocab_size
    if not 1 <= 2 * num_pairs <= vocabulary - reserved:
        raise ValueError(
            f"num_pairs must lie between 1 and {(vocabulary - reserved) // 2} for a vocabulary of {vocabulary}, "
            f"got {num_pairs}"
        )
    generator = torch.Generator().manual_seed(seed)
    shown = [_sequence(num_pairs, vocabulary, reserved, generator) for _ in range(sequences)]
    ids = torch.stack(shown).to(model.device)
    # Every second prediction is of a pair's second token; those in the second half can be recalled.
    asked, wanted = _predictions(model, ids)[:, 1::2], ids[:, 2::2]
    costs = _costs(asked, wanted)
    asked, (offered, wanted) = asked[:, num_pairs:], wanted.split(num_pairs, dim=1)
    scores = asked.gather(2, offered[:, None].expand(-1, num_pairs, -1))  # of all pairs' second tokens
    right = asked.gather(2, wanted[..., None])
    others = scores.masked_fill(offered[:, None] == wanted[..., None], -math.inf)
    return Recall(
        num_pairs=num_pairs,
        accuracy=(asked.argmax(-1) == wanted).float().mean().item(),
        among_shown=(right > others).all(-1).float().mean().item(),
        gain=(costs[:, :num_pairs].mean() - costs[:, num_pairs:].mean()).item(),
        questions=sequences * num_pairs,
    )


@torch.no_grad()
def probe_copying(model: PreTrainedModel, passages: Tensor, *, begin: int = 0) -> Copying:
    """Show every passage twice in a row, and compare the cost of its tokens.

    Args:
        model: any causal language model; the sequences are ``1 + 2 * T`` tokens long.
        passages: token ids ``[N, T]``, T at least 2, of text that the model was not trained on.
        begin: the token that begins a sequence.

    Raises:
        ValueError: there is no passage, or none with a token to predict.
        FloatingPointError: the model computes NaN or infinite logits.
    """
    count, length = passages.shape
    if not count or length < 2:
        raise ValueError(f"copying needs passages [N, T] with N of 1 and T of 2 at least, got {[count, length]}")
    beginnings = passages.new_full((count, 1), begin)
    ids = torch.cat([beginnings, passages, passages], dim=1).to(model.device)
    predicted, wanted = _predictions(model, ids), ids[:, 1:]
    # A passage's first token cannot be predicted from the passage.
    bits = _costs(predicted, wanted).unflatten(1, (2, length))[..., 1:] / math.log(2)
    right = (predicted.argmax(-1) == wanted).unflatten(1, (2, length))[..., 1:]
    return Copying(
        length=length,
        first=bits[:, 0].mean().item(),
        second=bits[:, 1].mean().item(),
        copied=right[:, 1].float().mean().item(),
        passages=count,
    )


def cut_passages(documents: Sequence[np.ndarray], length: int, count: int) -> Tensor:
    """At most ``count`` passages ``[N, length]`` of tokenized documents, int64, evenly spread over the text.

    A passage is part of one document and excludes its first and last token, which mark its beginning and end.

    Raises:
        ValueError: no document is long enough for one.
    """
    starts = [(document, start) for document in documents for start in range(1, len(document) - length, length)]
    if not starts:
        raise ValueError(f"none of the {len(documents)} documents holds a passage of {length} tokens")
    count = min(count, len(starts))
    chosen = (starts[index * len(starts) // count] for index in range(count))
    return torch.from_numpy(np.stack([document[start : start + length] for document, start in chosen]).astype(np.int64))


def _predictions(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits ``[N, T - 1, vocabulary]``, float32, for all tokens but the first of ``ids [N, T]``.

    Raises:
        FloatingPointError: they hold NaN or infinity, other than -inf beside finite ones.
    """
    with evaluation_mode(model):
        logits = as_trained(model)(input_ids=ids, use_cache=False).logits[:, :-1].float()
        rows = (~logits.amax(-1).isfinite()).any(1).tolist()
        if True in rows:
            row = rows.index(True)
            raise FloatingPointError(
                f"the model computed NaN or infinite logits for sequence {row}{origin_of_nan(model, ids[row, None])}"
            )
    return logits


def _costs(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cost in nats ``[N, T]`` of the tokens ``wanted [N, T]`` under ``logits [N, T, vocabulary]``."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)


def _sequence(num_pairs: int, vocabulary: int, reserved: int, generator: torch.Generator) -> Tensor:
    """The beginning token, the pairs, and the pairs in another order: ``[1 + 4 * num_pairs]``."""
    drawn = torch.randperm(vocabulary - reserved, generator=generator)[: 2 * num_pairs]
    pairs = (reserved + drawn).view(-1, 2)
    again = pairs[torch.randperm(num_pairs, generator=generator)]
    return torch.cat([torch.zeros(1, dtype=torch.long), pairs.flatten(), again.flatten()])
