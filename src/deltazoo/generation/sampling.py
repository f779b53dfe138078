"""Sampling of the next token from logits, on the device alone: no value is read back, so a CUDA graph can hold it."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["NO_TOKEN", "Sampling", "likeliest"]

NO_TOKEN = -1
"""In the place of a token, where the model computed NaN or infinity. So the fault travels with the tokens, and nothing
waits for the device to find it."""

_LOWEST = torch.finfo(torch.float32).tiny
"""Of temperatures: a device multiplies by the reciprocal, which is infinite for those below."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. The filters act in the order of the fields, as in transformers.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep this many of the likeliest tokens; None keeps all.
        top_p: keep the fewest tokens, likeliest first, whose probabilities add up to this; None keeps all.

    Raises:
        ValueError: a value out of its range, or filters with temperature 0, where they have no effect.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature must be 0 (take the likeliest token) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k or self.top_p):
            raise ValueError(
                "top_k and top_p choose among random draws, and temperature=0 makes none: raise temperature or leave "
                f"them out, got top_k={self.top_k}, top_p={self.top_p}"
            )

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The next tokens `[B]` int64 from logits `[B, vocabulary]`, drawn with `generator` of the same device.

        A row whose logits hold NaN or +inf, or are all -inf, gets `NO_TOKEN`.
        """
        logits = logits.float()
        if self.temperature == 0:
            return likeliest(logits)[:, 0]
        # Without the largest logit, no temperature is so low that two scores are infinite.
        probabilities = self.filter(logits - logits.amax(-1, keepdim=True)).softmax(-1)
        # The smallest of independent exponential variables with these rates: a draw without cumulative sums.
        return likeliest(probabilities / torch.empty_like(probabilities).exponential_(generator=generator))[:, 0]

    def filter(self, logits: Tensor) -> Tensor:
        """Logits `[B, vocabulary]` divided by the temperature, -inf for tokens that are not kept."""
        logits = logits / max(self.temperature, _LOWEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p is not None:
            ordered, indices = logits.sort(descending=True, stable=True)
            probabilities = ordered.softmax(-1)
            mass_before = probabilities.cumsum(-1) - probabilities
            dropped = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, mass_before >= self.top_p)
            logits = logits.masked_fill(dropped, -torch.inf)
        return logits


def likeliest(scores: Tensor) -> Tensor:
    """The index `[N, 1]` int64 of the largest of scores `[N, vocabulary]`; `NO_TOKEN` where that is NaN or infinite."""
    chosen = scores.argmax(-1, keepdim=True)  # NaN counts as largest
    largest = scores.gather(-1, chosen)
    return chosen.masked_fill((largest - largest).isnan(), NO_TOKEN)
