"""Decay inside a chunk, in three kinds behind one interface: none, one per head, one per key channel.

With `G_i` the cumulative log-decay from the start of the chunk through token i, the chunk form needs `exp(G_i)`,
`exp(G_C - G_i)`, `exp(G_C)` and products whose terms carry `exp(G_i - G_j)`, j <= i. Each exponent is built here as a
direct sum of the log-decays between the two tokens, never as a difference of cumulative sums: so nothing overflows,
nothing cancels, a later token never touches an earlier result, and a log-decay of -inf (forget everything) gives an
exact zero instead of inf - inf. Tensors are chunked, `[..., C, K]` with `[...]` = chunks, heads.

A read before the decay has `exp(G_{i-1} - G_j)`, the factor of the row before: such a term is computed from rows moved
up by one (`sooner`), and its result is moved down again (`later`).
"""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK = 16
"""Tokens of a block; chunks are multiples of it."""


class ChunkDecay(ABC):
    """The decay factors of a chunk that the chunk form uses; `lower` means j <= i."""

    entry: Tensor | float
    """`exp(G_i)`, from the chunk's start through token i: `[..., C, 1 or K]`."""
    exit: Tensor | float
    """`exp(G_C - G_i)`, from after token i to the chunk's end: `[..., C, 1 or K]`."""
    total: Tensor | float
    """`exp(G_C)`, over the whole chunk, shaped to multiply a state: `[..., 1 or K, 1]`."""

    @abstractmethod
    def gram(self, a: Tensor, b: Tensor) -> Tensor:
        """`lower(sum_c a_ic b_jc exp(G_i - G_j)_c)`: `[..., C, C]`."""

    @abstractmethod
    def rows(self, W: Tensor, b: Tensor) -> Tensor:
        """`sum_{j<=i} W_ij b_jc exp(G_i - G_j)_c` for lower W: `[..., C, K]`."""

    @abstractmethod
    def columns(self, W: Tensor, a: Tensor) -> Tensor:
        """`sum_{i>=j} W_ij a_ic exp(G_i - G_j)_c` for lower W: `[..., C, K]`."""

    @abstractmethod
    def gradient(self, dG: Tensor, dG_last: Tensor) -> Tensor | None:
        """Gradient of the chunk's log-decay.

        Args:
            dG: gradient of every `G_i` through the terms of token i, `[..., C, K]`.
            dG_last: further gradient of `G_C`, through the state that leaves the chunk, `[..., K]`.

        Returns:
            The gradient in the log-decay's shape; None without decay.
        """


def chunk_decay(log_decay: Tensor | None, ndim: int) -> ChunkDecay:
    """The decay of chunked keys with `ndim` dimensions: the number of dimensions of `log_decay` decides its kind."""
    if log_decay is None:
        return _NoDecay()
    return _ChannelDecay(log_decay) if log_decay.ndim == ndim else _ScalarDecay(log_decay)


def sooner(x: Tensor) -> Tensor:
    """Rows of `[..., C, X]` moved up by one; zeros in the last."""
    return F.pad(x[..., 1:, :], (0, 0, 0, 1))


def later(x: Tensor, first: float = 0.0) -> Tensor:
    """Rows of `[..., C, X]` moved down by one; `first` in the first."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0), value=first)


def _reverse_cumsum(x: Tensor, dim: int) -> Tensor:
    """Sum of each entry along `dim` and all after it."""
    return x.flip(dim).cumsum(dim).flip(dim)


def _after(g: Tensor) -> Tensor:
    """Sum of all rows of `[..., C, K]` after each, without subtraction."""
    return _reverse_cumsum(sooner(g), -2)


class _NoDecay(ChunkDecay):
    entry = exit = total = 1.0

    def gram(self, a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.mT).tril_()

    def rows(self, W: Tensor, b: Tensor) -> Tensor:
        return W @ b

    def columns(self, W: Tensor, a: Tensor) -> Tensor:
        return W.mT @ a

    def gradient(self, dG: Tensor, dG_last: Tensor) -> None:
        return None


class _ScalarDecay(ChunkDecay):
    """Factors of log_decay `[..., C]`: the decay matrix `exp(G_i - G_j)` multiplies elementwise."""

    def __init__(self, log_decay: Tensor) -> None:
        C = log_decay.shape[-1]
        between = log_decay[..., :, None].expand(*log_decay.shape, C).tril(-1).cumsum(-2)
        self.matrix = between.exp().tril_()
        self.entry = log_decay.cumsum(-1).exp()[..., None]
        self.exit = self.matrix[..., -1, :, None]
        self.total = self.entry[..., -1:, :]
        self.keeps = log_decay > -torch.inf

    def gram(self, a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.mT) * self.matrix

    def rows(self, W: Tensor, b: Tensor) -> Tensor:
        return (W * self.matrix) @ b

    def columns(self, W: Tensor, a: Tensor) -> Tensor:
        return (W * self.matrix).mT @ a

    def gradient(self, dG: Tensor, dG_last: Tensor) -> Tensor:
        dG = dG.sum(-1)
        dG[..., -1] += dG_last.sum(-1)
        return _reverse_cumsum(dG, -1) * self.keeps


class _ChannelDecay(ChunkDecay):
    """Factors of log_decay `[..., C, K]`: the decay is inside the contraction over channels.

    It works on blocks of 16 tokens. Between two blocks the exponent splits at the later block's start into two factors
    <= 1, so a matrix product computes the term; inside a block a loop over its tokens carries the decayed operand
    along, vectorised over all blocks of all chunks.
    """

    def __init__(self, log_decay: Tensor) -> None:
        self.entry = log_decay.cumsum(-2).exp()
        self.exit = _after(log_decay).exp()
        self.total = self.entry[..., -1, :, None]
        self.keeps = log_decay > -torch.inf
        blocks = self._split(log_decay)
        self.step = blocks.exp()
        self.from_block_start = blocks.cumsum(-2).exp()
        to_block_end, block_total = _after(blocks), blocks.sum(-2, keepdim=True)
        # before[I]: decay of every token of blocks 0..I-1 up to the start of block I, [..., 16 I, K]
        log_before = to_block_end[..., 0, :, :]
        self.before = [log_before[..., :0, :]]
        for I in range(1, blocks.shape[-3]):
            self.before.append(log_before.exp())
            log_before = torch.cat([log_before + block_total[..., I, :, :], to_block_end[..., I, :, :]], -2)

    @staticmethod
    def _split(x: Tensor) -> Tensor:
        return x.unflatten(-2, (-1, _BLOCK))

    def _diagonal_blocks(self, W: Tensor) -> Tensor:
        """A view `[..., C / 16, 16, 16]` of the diagonal blocks of W `[..., C, C]`."""
        blocks = W.unflatten(-1, (-1, _BLOCK)).unflatten(-3, (-1, _BLOCK))
        return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    def gram(self, a: Tensor, b: Tensor) -> Tensor:
        a_blocks, b_blocks = self._split(a), self._split(b)
        out = a.new_zeros(*a.shape[:-1], a.shape[-2])
        diagonal = self._diagonal_blocks(out)
        decayed = torch.zeros_like(b_blocks)
        for r in range(_BLOCK):
            decayed[..., :r, :] *= self.step[..., r : r + 1, :]
            decayed[..., r, :] = b_blocks[..., r, :]
            diagonal[..., r, : r + 1] = (decayed[..., : r + 1, :] @ a_blocks[..., r, :, None]).squeeze(-1)
        for I in range(1, len(self.before)):
            left = a_blocks[..., I, :, :] * self.from_block_start[..., I, :, :]
            start = I * _BLOCK
            out[..., start : start + _BLOCK, :start] = left @ (b[..., :start, :] * self.before[I]).mT
        return out

    def rows(self, W: Tensor, b: Tensor) -> Tensor:
        b_blocks, diagonal = self._split(b), self._diagonal_blocks(W)
        out = torch.zeros_like(b_blocks)
        decayed = torch.zeros_like(b_blocks)
        for r in range(_BLOCK):
            decayed[..., :r, :] *= self.step[..., r : r + 1, :]
            decayed[..., r, :] = b_blocks[..., r, :]
            out[..., r, :] = (diagonal[..., r, None, : r + 1] @ decayed[..., : r + 1, :]).squeeze(-2)
        for I in range(1, len(self.before)):
            start = I * _BLOCK
            across = W[..., start : start + _BLOCK, :start] @ (b[..., :start, :] * self.before[I])
            out[..., I, :, :] += self.from_block_start[..., I, :, :] * across
        return out.flatten(-3, -2)

    def columns(self, W: Tensor, a: Tensor) -> Tensor:
        a_blocks, diagonal = self._split(a), self._diagonal_blocks(W)
        acc = torch.zeros_like(a_blocks)
        for r in reversed(range(_BLOCK)):
            acc[..., : r + 1, :] += diagonal[..., r, : r + 1, None] * a_blocks[..., r, None, :]
            acc[..., :r, :] *= self.step[..., r : r + 1, :]
        out = acc.flatten(-3, -2)
        for I in range(1, len(self.before)):
            left = a_blocks[..., I, :, :] * self.from_block_start[..., I, :, :]
            start = I * _BLOCK
            out[..., :start, :] += self.before[I] * (W[..., start : start + _BLOCK, :start].mT @ left)
        return out

    def gradient(self, dG: Tensor, dG_last: Tensor) -> Tensor:
        dG = dG.clone()
        dG[..., -1, :] += dG_last
        return _reverse_cumsum(dG, -2) * self.keeps
