"""Two probes of recall within the context, for language models that were trained on text and nothing else.

**Pairs** of random tokens, then the pairs again in another order. A pair's second token cannot be guessed, only looked
up. A model that never learned such a game rarely names the token outright, so the probe also asks whether it prefers
the right one to the other second tokens that it was shown. arXiv:2312.04927 shows why it matters: recall within the
context is most of what separates linear attention from softmax attention.

**Copying**: a passage of text, then the same passage again. What its tokens cost less the second time was found in the
context (induction, arXiv:2209.11895). Text, unlike random pairs, is what the model knows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltazoo.workbench.train.validation_loss import as_trained

__all__ = ["Copying", "Recall", "cut_passages", "probe_copying", "probe_recall"]


@dataclass(frozen=True)
class Recall:
    """What a model recalls of ``num_pairs`` pairs.

    Attributes:
        num_pairs: pairs to keep in mind.
        accuracy: share of the second showings in which the likeliest token is the right one.
        among_shown: share of them in which the right one is likelier than the second token of every other pair; one
            over ``num_pairs`` for a model that guesses.
        gain: nats that the second token costs less at the second showing than at the first, mean.
        questions: answers that were graded.
    """

    num_pairs: int
    accuracy: float
    among_shown: float
    gain: float
    questions: int


@dataclass(frozen=True)
class Copying:
    """What a second showing of a passage saves.

    Attributes:
        length: tokens of a passage.
        first: bits per token at the first showing, without the passage's first token.
        second: the same at the second showing.
        copied: share of the second showing's tokens, without the first, that are the likeliest there.
        passages: how many passages were shown.
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
    """Show ``num_pairs`` random pairs twice, in two orders, and grade the second showing.

    Args:
        model: any causal language model; the sequences are ``1 + 4 * num_pairs`` tokens long.
        num_pairs: pairs per sequence; their tokens are all different.
        sequences: how many sequences are drawn.
        reserved: the first ids of the vocabulary, special tokens, which no pair holds; the first begins a sequence.
        seed: of the draws; the same for every model compared.

    Raises:
        ValueError: the vocabulary is too small for so many different tokens.
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
    # Every second prediction is that of a pair's second token; the later half of those can be looked up.
    asked, wanted = _predictions(model, ids)[:, 1::2], ids[:, 2::2]
    costs = _costs(asked, wanted)
    asked, (offered, wanted) = asked[:, num_pairs:], wanted.split(num_pairs, dim=1)
    scores = asked.gather(2, offered[:, None].expand(-1, num_pairs, -1))  # of each question, those of all the answers
    right = asked.gather(2, wanted[..., None])
    rivals = scores.masked_fill(offered[:, None] == wanted[..., None], -math.inf)
    return Recall(
        num_pairs=num_pairs,
        accuracy=(asked.argmax(-1) == wanted).float().mean().item(),
        among_shown=(right > rivals).all(-1).float().mean().item(),
        gain=(costs[:, :num_pairs].mean() - costs[:, num_pairs:].mean()).item(),
        questions=sequences * num_pairs,
    )


@torch.no_grad()
def probe_copying(model: PreTrainedModel, passages: Tensor, *, begin: int = 0) -> Copying:
    """Show every passage twice in a row, and compare what its tokens cost.

    Args:
        model: any causal language model; the sequences are ``1 + 2 * T`` tokens long.
        passages: token ids ``[N, T]``, best of text that the model was not trained on; T at least 2.
        begin: the token that begins a sequence.

    Raises:
        ValueError: there is no passage, or none with a token to predict.
    """
    count, length = passages.shape
    if not count or length < 2:
        raise ValueError(f"copying needs passages [N, T] with N of 1 and T of 2 at least, got {[count, length]}")
    beginnings = passages.new_full((count, 1), begin)
    ids = torch.cat([beginnings, passages, passages], dim=1).to(model.device)
    predicted, wanted = _predictions(model, ids), ids[:, 1:]
    # No showing tells which token the other begins with.
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

    A passage lies within one document and leaves out its first and last token, which mark its beginning and its end.

    Raises:
        ValueError: no document is long enough for one.
    """
    places = [(document, start) for document in documents for start in range(1, len(document) - length, length)]
    if not places:
        raise ValueError(f"none of the {len(documents)} documents holds a passage of {length} tokens")
    count = min(count, len(places))
    chosen = (places[index * len(places) // count] for index in range(count))
    return torch.from_numpy(np.stack([document[start : start + length] for document, start in chosen]).astype(np.int64))


def _predictions(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits ``[N, T - 1, vocabulary]`` of all tokens but the first of ``ids [N, T]``, float32."""
    was_training = model.training
    model.eval()
    logits = as_trained(model)(input_ids=ids, use_cache=False).logits[:, :-1].float()
    model.train(was_training)
    return logits


def _costs(logits: Tensor, wanted: Tensor) -> Tensor:
    """Nats ``[N, T]`` that the tokens ``wanted [N, T]`` cost under ``logits [N, T, vocabulary]``."""
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)


def _sequence(num_pairs: int, vocabulary: int, reserved: int, generator: torch.Generator) -> Tensor:
    """The beginning token, the pairs, and the pairs in another order: ``[1 + 4 * num_pairs]``."""
    drawn = torch.randperm(vocabulary - reserved, generator=generator)[: 2 * num_pairs]
    pairs = (reserved + drawn).view(-1, 2)
    again = pairs[torch.randperm(num_pairs, generator=generator)]
    return torch.cat([torch.zeros(1, dtype=torch.long), pairs.flatten(), again.flatten()])
