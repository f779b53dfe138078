"""Sampling in a batch whose rows have their own temperature, filters and seed.

The random number of a token is a hash of the row's seed, the token's position in the row and its number in the
vocabulary. So a row draws the same tokens whatever the other rows do, and no generator has a state to keep.
"""

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from deltazoo.generation.sampling import Sampling, likeliest
from deltazoo.ops.fused import takes_kernel

__all__ = ["RowSampling", "Way", "uniform_numbers"]


class Way(IntEnum):
    """What of the sampling a batch needs. A row's tokens are the same by every way that serves it."""

    GREEDY = 0
    """The likeliest token in every row."""
    DRAWN = 1
    """Some rows draw among all tokens."""
    FILTERED = 2
    """Some rows draw among the likeliest ones, for which the vocabulary is sorted."""

    @classmethod
    def of(cls, sampling: Sampling) -> "Way":
        """The least that serves a row."""
        if sampling.temperature == 0:
            return cls.GREEDY
        return cls.DRAWN if sampling.top_k is None and sampling.top_p is None else cls.FILTERED


class RowSampling:
    """How the tokens of every row are drawn, in tensors that stay at their addresses.

    Args:
        rows: of the batch. They are greedy until `put`.
        device: of the logits.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.temperature = torch.zeros(rows, 1, device=device)
        self.top_k = torch.full((rows, 1), torch.iinfo(torch.long).max, device=device)
        self.top_p = torch.ones(rows, 1, device=device)
        self.seed = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self._no_ends = torch.zeros(0, dtype=torch.long, device=device)
        self._none_finished = torch.zeros(rows, 1, dtype=torch.bool, device=device)

    def put(self, row: int, sampling: Sampling, seed: int) -> None:
        """Set how a row's tokens are drawn; the seed has 64 bits."""
        self.temperature[row].fill_(sampling.temperature)
        self.top_k[row].fill_(torch.iinfo(torch.long).max if sampling.top_k is None else sampling.top_k)
        self.top_p[row].fill_(1.0 if sampling.top_p is None else sampling.top_p)
        self.seed[row].fill_(seed)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Give some rows what others have."""
        for x in (self.temperature, self.top_k, self.top_p, self.seed):
            for source, target in zip(sources, targets, strict=True):
                x[target].copy_(x[source])

    def choose(self, logits: Tensor, position: Tensor, way: Way, token: Tensor) -> None:
        """Draw the next tokens of the first rows.

        Args:
            logits: `[N, vocabulary]`.
            position: `[N, 1]` int64, of the tokens to draw in their rows.
            way: at least that of each row.
            token: `[N, 1]` int64, written; `NO_TOKEN` in rows whose logits hold NaN or +inf, or are all -inf.
        """
        rows = len(logits)
        if way is Way.GREEDY and takes_kernel(None, logits):
            from deltazoo.ops.decoding.greedy_token import greedy_token

            return greedy_token(logits, self._no_ends, self._none_finished[:rows], 0, token)
        scores = logits.float()
        if way is not Way.GREEDY:
            is_greedy = self.temperature[:rows] == 0
            # Without the largest logit, no temperature is so low that two scores are infinite.
            warm = (scores - scores.amax(-1, keepdim=True)) / self.temperature[:rows].masked_fill(is_greedy, 1)
            if way is Way.FILTERED:
                warm = self._filter(warm)
            # The largest of logits plus Gumbel noise is a draw from their softmax.
            numbers = uniform_numbers(self.seed[:rows], position, scores.shape[-1])
            scores = torch.where(is_greedy, scores, warm - torch.log(-torch.log1p(-numbers)))
        token.copy_(likeliest(scores))

    def _filter(self, logits: Tensor) -> Tensor:
        """-inf for tokens that a row does not keep, as `Sampling.filter` has it for one setting."""
        rows, vocabulary = logits.shape
        top_k, top_p = self.top_k[:rows].clamp(max=vocabulary), self.top_p[:rows]
        ordered, indices = logits.sort(descending=True, stable=True)
        smallest = ordered.gather(-1, top_k - 1)
        ordered = ordered.masked_fill(ordered < smallest, -torch.inf)
        # In whole numbers, since a GPU adds up one long row in an order that is not always the same.
        mass = (ordered.softmax(-1).double() * 2**40).long()
        mass_before = mass.cumsum(-1) - mass
        most = (top_p.double() * 2**40).clamp(min=1)  # a top_p that float32 rounds to 0 keeps the likeliest token
        dropped = (ordered < smallest) | ((mass_before >= most) & (top_p < 1))
        return logits.masked_fill(torch.zeros_like(dropped).scatter(-1, indices, dropped), -torch.inf)


_32_BITS = 0xFFFFFFFF


def uniform_numbers(seed: Tensor, position: Tensor, count: int) -> Tensor:
    """Numbers between 0 and 1, both excluded, that are a function of their seed, position and index.

    Args:
        seed: `[N, 1]` int64.
        position: `[N, 1]` int64, at least 0.
        count: of indices.

    Returns:
        `[N, count]` float32, of 32 random bits each: small ones, which decide a draw, are as fine as float32 can be.
    """
    key = _mixed((seed & _32_BITS) ^ 0x9E3779B9)
    key = _mixed(key ^ ((seed >> 32) & _32_BITS))
    key = _mixed(key ^ (position & _32_BITS))
    index = torch.arange(count, device=seed.device)
    bits = _mixed(_mixed((index + key) & _32_BITS) ^ _mixed(key ^ 0x85EBCA6B))
    return ((bits.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def _mixed(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, held in int64, in which every bit depends on every other.

    Two rounds of multiplication and shifts, with constants of low bias that were found by search
    (https://github.com/skeeto/hash-prospector). Both are below 2^31, so that no product overflows.
    """
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _32_BITS
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _32_BITS
    return x ^ (x >> 15)
