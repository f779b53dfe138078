"""An associative-recall probe for language models: pairs of tokens, then the pairs again in another order.

A pair's second token cannot be guessed, only looked up: the pairs are drawn at random from the vocabulary. Nothing is
trained, so the probe asks what a model learned from text. arXiv:2312.04927 shows why it matters: recall within the
context is most of what separates linear attention from softmax attention.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from deltazoo.training.validation import as_trained

__all__ = ["Recall", "probe_recall"]


@dataclass(frozen=True)
class Recall:
    """What a model recalls of ``num_pairs`` pairs.

    Attributes:
        num_pairs: pairs to keep in mind.
        accuracy: share of the second showings in which the likeliest token is the right one.
        gain: nats that the second token costs less at the second showing than at the first, mean.
        questions: answers that were graded.
    """

    num_pairs: int
    accuracy: float
    gain: float
    questions: int


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
    was_training = model.training
    model.eval()
    shown = [_sequence(num_pairs, vocabulary, reserved, generator) for _ in range(sequences)]
    ids = torch.stack(shown).to(model.device)
    logits = as_trained(model)(input_ids=ids, use_cache=False).logits[:, :-1].float()
    # Every second prediction is that of a pair's second token; the later half of those can be looked up.
    asked, wanted = logits[:, 1::2], ids[:, 2::2]
    costs = F.cross_entropy(asked.flatten(0, 1), wanted.flatten(), reduction="none").view(wanted.shape)
    right = asked.argmax(-1) == wanted
    model.train(was_training)
    return Recall(
        num_pairs=num_pairs,
        accuracy=right[:, num_pairs:].float().mean().item(),
        gain=(costs[:, :num_pairs].mean() - costs[:, num_pairs:].mean()).item(),
        questions=sequences * num_pairs,
    )


def _sequence(num_pairs: int, vocabulary: int, reserved: int, generator: torch.Generator) -> Tensor:
    """The beginning token, the pairs, and the pairs in another order: ``[1 + 4 * num_pairs]``."""
    drawn = torch.randperm(vocabulary - reserved, generator=generator)[: 2 * num_pairs]
    pairs = (reserved + drawn).view(-1, 2)
    again = pairs[torch.randperm(num_pairs, generator=generator)]
    return torch.cat([torch.zeros(1, dtype=torch.long), pairs.flatten(), again.flatten()])
