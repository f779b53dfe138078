"""The draw of the next token, for `deltazoo.generate` and for the server.

The random number of a token is a hash of its row's seed, of the position in the row and of the token's number in the
vocabulary. So a row draws the same tokens whatever the other rows hold, alone or in a batch, in any loop, and no
generator has a state to keep. No value is read back from the device, so a CUDA graph can hold a draw.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from deltazoo.ops.fused import takes_kernel

NO_TOKEN = -1
"""Number in place of a token for which the model computed NaN or infinity. The fault travels with the tokens, so
nothing waits for the device to find it."""

_LOWEST, _HIGHEST = torch.finfo(torch.float32).tiny, 1e30
"""Bounds of temperatures above 0; their reciprocals are finite, and values beyond give the same draws."""
_ALL = torch.iinfo(torch.long).max
_32_BITS = 0xFFFFFFFF


@dataclass(frozen=True)
class Sampling:
    """The settings of a row's draws. The filters act in the order of the fields, as in transformers.

    Attributes:
        temperature: divisor of the logits; 0 takes the likeliest token.
        top_k: number of the likeliest tokens to keep; None keeps all.
        top_p: least sum of the probabilities of the tokens to keep, likeliest first; None keeps all.

    Raises:
        ValueError: a value out of its range, or filters with temperature 0, where they have no effect.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be 0 (take the likeliest token) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        if self.top_k is not None and self.top_k % 1:
            raise ValueError(f"top_k must be a whole number, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k or self.top_p):
            raise ValueError(
                "top_k and top_p choose among random draws, and temperature=0 makes none: raise temperature or leave "
                f"them out, got top_k={self.top_k}, top_p={self.top_p}"
            )


class Way(IntEnum):
    """The part of the sampling that a batch needs. Every way that serves a row draws the same tokens."""

    GREEDY = 0
    """The likeliest token in every row."""
    DRAWN = 1
    """Some rows draw among all tokens."""
    FILTERED = 2
    """Some rows draw among the likeliest ones, for which the vocabulary is sorted."""

    @classmethod
    def of(cls, sampling: Sampling) -> "Way":
        """The least way that serves a row."""
        if sampling.temperature == 0:
            return cls.GREEDY
        return cls.DRAWN if sampling.top_k is None and sampling.top_p is None else cls.FILTERED


class Sampler:
    """Settings, seed and end of every row of a batch, in tensors that stay at their addresses, and the draws by them.

    Args:
        rows: number of rows of the batch. They are greedy until `put`.
        device: device of the logits.
        ends: tokens that end a row; rows that have ended get `pad`.
        pad: token after the end.

    Attributes:
        finished: `[rows, 1]` bool, True for rows that have ended.
    """

    def __init__(self, rows: int, device: torch.device, ends: Sequence[int] = (), pad: int = 0) -> None:
        self.temperature = torch.zeros(rows, 1, device=device)
        self.top_k = torch.full((rows, 1), _ALL, device=device)
        self.top_p = torch.ones(rows, 1, device=device)
        self.seed = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.finished = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self.ends = torch.tensor([*ends], dtype=torch.long, device=device)
        self.pad = pad

    def put(self, rows: int | slice, sampling: Sampling, seed: int) -> None:
        """Set settings and seed, of 64 bits, of a row or of several."""
        temperature = sampling.temperature
        self.temperature[rows].fill_(min(max(temperature, _LOWEST), _HIGHEST) if temperature else 0)
        self.top_k[rows].fill_(_ALL if sampling.top_k is None else min(sampling.top_k, _ALL))
        self.top_p[rows].fill_(1.0 if sampling.top_p is None else sampling.top_p)
        self.seed[rows].fill_(seed)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy settings, seed and end of some rows to others."""
        for x in (self.temperature, self.top_k, self.top_p, self.seed):
            for source, target in zip(sources, targets, strict=True):
                x[target].copy_(x[source])

    def choose(self, logits: Tensor, position: Tensor, way: Way, token: Tensor) -> None:
        """Draw the next tokens of the first rows; rows that have ended get padding.

        Args:
            logits: `[N, vocabulary]`.
            position: `[N, 1]` int64, positions of the tokens to draw in their rows.
            way: a way that serves all rows.
            token: `[N, 1]` int64, written; `NO_TOKEN` in rows whose logits hold NaN or +inf, or are all -inf.
        """
        finished = self.finished[: len(logits)]
        scores = logits if way is Way.GREEDY else self._scores(logits, position, way)
        if takes_kernel(None, scores):
            from deltazoo.ops.decoding.greedy_token import greedy_token

            return greedy_token(scores, self.ends, finished, self.pad, token)
        scores = scores.float()
        chosen = scores.argmax(-1, keepdim=True)  # NaN counts as largest
        largest = scores.gather(-1, chosen)
        chosen = chosen.masked_fill((largest - largest).isnan(), NO_TOKEN).masked_fill(finished, self.pad)
        # `isin` with many tokens can wait for the device, which a graph must not.
        finished.logical_or_((chosen == self.ends).any(-1, keepdim=True))
        token.copy_(chosen)

    def _scores(self, logits: Tensor, position: Tensor, way: Way) -> Tensor:
        """Numbers `[N, vocabulary]` whose largest is the draw: logits plus Gumbel noise, in greedy rows logits."""
        rows = len(logits)
        temperature, seed = self.temperature[:rows], self.seed[:rows]
        if way is Way.FILTERED:
            logits = logits.masked_fill(self._dropped(logits), -torch.inf)
        largest = logits.amax(-1, keepdim=True)
        if takes_kernel(None, logits):
            from deltazoo.ops.decoding.gumbel_scores import gumbel_scores

            return gumbel_scores(logits, largest, temperature, seed, position)
        numbers = uniform_numbers(seed, position, logits.shape[-1])
        scores = _over_temperature(logits, largest, temperature) - torch.log(-torch.log1p(-numbers))
        return torch.where(temperature == 0, logits.float(), scores)

    def _dropped(self, logits: Tensor) -> Tensor:
        """Mask `[N, vocabulary]` of the tokens that each row's filters exclude."""
        rows, vocabulary = logits.shape
        top_k, top_p = self.top_k[:rows].clamp(max=vocabulary), self.top_p[:rows]
        ordered, indices = logits.sort(descending=True, stable=True)
        beyond = ordered < ordered.gather(-1, top_k - 1)
        warm = _over_temperature(ordered, ordered[:, :1], self.temperature[:rows])
        # Whole numbers, since a GPU adds up one long row in an order that may change.
        mass = (warm.masked_fill(beyond, -torch.inf).softmax(-1) * 2**40).long()
        mass_before = mass.cumsum(-1) - mass
        most = (top_p.double() * 2**40).clamp(min=1)  # a top_p that float32 rounds to 0 keeps the likeliest token
        dropped = beyond | ((mass_before >= most) & (top_p < 1))
        return torch.zeros_like(dropped).scatter(-1, indices, dropped)


def _over_temperature(logits: Tensor, largest: Tensor, temperature: Tensor) -> Tensor:
    """Logits over their row's temperature, 1 in greedy rows; less the largest, so that no two are infinite."""
    return (logits.float() - largest.float()) / temperature.masked_fill(temperature == 0, 1)


def uniform_numbers(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Numbers between 0 and 1, both excluded, that are a function of their seed, position and index.

    Args:
        seed: `[N, 1]` int64.
        position: `[N, 1]` int64, at least 0.
        count: number of indices.

    Returns:
        `[N, count]` float32, of 32 random bits each; small numbers, which decide a draw, have float32's full precision.
    """
    key = _mixed((seed & _32_BITS) ^ 0x9E3779B9)
    key = _mixed(key ^ ((seed >> 32) & _32_BITS))
    key = _mixed(key ^ (position & _32_BITS))
    index = torch.arange(count, device=seed.device)
    bits = _mixed(_mixed((index + key) & _32_BITS) ^ _mixed(key ^ 0x85EBCA6B))
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def _mixed(x: Tensor) -> Tensor:
    """The image of 32-bit numbers, held in int64, under a bijection in which every bit depends on every other.

    Two rounds of multiplication and shifts, with constants of low bias that were found by search
    (https://github.com/skeeto/hash-prospector). Both are below 2^31, so that no product overflows.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _32_BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _32_BITS
    return x ^ (x >> 15)
