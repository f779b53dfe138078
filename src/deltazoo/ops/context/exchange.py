"""Tokens of other ranks, and gradients back to the ranks that they come from."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.context.group import ContextParallel, finished, started_gather

__all__ = [
    "all_tokens",
    "last_tokens",
    "next_tokens",
    "started_last_tokens",
    "tokens_after_piece",
    "tokens_before",
    "tokens_before_piece",
]


def all_tokens(x: Tensor, context: ContextParallel) -> Tensor:
    """The tokens `[B, T, ...]` of the whole sequence, from this rank's piece."""
    return _AllTokens.apply(x, context)


def next_tokens(x: Tensor, context: ContextParallel, after_last: int) -> Tensor:
    """`[B, T]` integers moved up by one: entry t is that of token t + 1, which another rank may have.

    Args:
        x: `[B, T]`.
        context: the ranks.
        after_last: entry of the last token of all.
    """
    firsts = _gathered(x[:, :1], context)
    last = context.rank == context.size - 1
    following = torch.full_like(x[:, :1], after_last) if last else firsts[context.rank + 1]
    return torch.cat([x[:, 1:], following], 1)


def tokens_before(inputs: Sequence[Tensor], width: int, context: ContextParallel) -> tuple[Tensor, ...]:
    """The `width` tokens before this rank's piece, oldest first; zeros before the first token of all.

    Args:
        inputs: `[B, T, C_i]` in one dtype, this rank's tokens of several sequences.
        width: number of tokens; they may come from several ranks, if pieces are shorter.
        context: the ranks, with lengths.

    Returns:
        Tensors `[B, width, C_i]`, one for each input.
    """
    before = _TokensBefore.apply(width, context, *inputs)
    return before.split([x.shape[2] for x in inputs], 2)


@torch.no_grad()
def last_tokens(inputs: Sequence[Tensor], width: int, context: ContextParallel) -> Tensor:
    """The last `width` tokens of the whole sequences, on every rank: `[B, width, C]`.

    They are `tokens_before` of a rank after the last one, with the channels of all inputs side by side, no gradients.
    """
    return tokens_before_piece(started_last_tokens(inputs, width, context), context, context.size)


class _TokensBefore(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, width: int, context: ContextParallel, *inputs: Tensor) -> Tensor:
        ctx.width, ctx.context = width, context
        ctx.shapes = [x.shape for x in inputs]
        return tokens_before_piece(started_last_tokens(inputs, width, context), context, context.rank)

    @staticmethod
    def backward(ctx: Any, d_before: Tensor) -> Any:
        context, width = ctx.context, ctx.width
        d_befores = _gathered(d_before, context)
        d_last = torch.zeros_like(d_before)
        for rank in range(context.rank + 1, context.size):
            for index, (source, index_there) in _sources(context, rank, width).items():
                if source == context.rank:
                    d_last[:, index_there] += d_befores[rank, :, index]
        gradients = [d_before.new_zeros(shape) for shape in ctx.shapes]
        here = min(width, gradients[0].shape[1])
        for d, found in zip(gradients, d_last.split([d.shape[2] for d in gradients], 2), strict=True):
            d[:, d.shape[1] - here :] = found[:, width - here :]
        return None, None, *gradients


def started_last_tokens(inputs: Sequence[Tensor], width: int, context: ContextParallel) -> Tensor:
    """The last `width` tokens of every rank, channels side by side, on their way to all ranks."""
    return started_gather(torch.cat([_last(x, width) for x in inputs], 2), context)


def tokens_before_piece(gathered: Tensor, context: ContextParallel, rank: int) -> Tensor:
    """The tokens `[B, width, C]` before the piece of a rank, among those that `started_last_tokens` gathered."""
    last_of_ranks = finished(gathered, context).unflatten(0, (context.size, -1))
    before = torch.zeros_like(last_of_ranks[0])
    for index, (source, index_there) in _sources(context, rank, before.shape[1]).items():
        before[:, index] = last_of_ranks[source, :, index_there]
    return before


def tokens_after_piece(gathered: Tensor, context: ContextParallel) -> Tensor:
    """The tokens `[B, up to width, C]` after this rank's piece, of which there are fewer at the end of the row.

    Args:
        gathered: the first `width` tokens of every rank, after them zeros if it has fewer, on their way.
        context: the ranks.
    """
    first_of_ranks = finished(gathered, context).unflatten(0, (context.size, -1))
    later = range(context.rank + 1, context.size)
    after = [first_of_ranks[rank, :, : context.known_lengths[rank]] for rank in later]
    return torch.cat([first_of_ranks[0, :, :0], *after], 1)[:, : first_of_ranks.shape[2]]


def _last(x: Tensor, width: int) -> Tensor:
    """The last `width` tokens, after zeros if there are fewer."""
    last = x[:, max(0, x.shape[1] - width) :]
    return F.pad(last, (0, 0, width - last.shape[1], 0))


def _gathered(x: Tensor, context: ContextParallel) -> Tensor:
    """The tensors `[n, ...]` of all ranks, `[size, n, ...]`."""
    return finished(started_gather(x, context), context).unflatten(0, (context.size, -1))


def _sources(context: ContextParallel, rank: int, width: int) -> dict[int, tuple[int, int]]:
    """Rank, and index among its last `width` tokens, of each of the `width` tokens before a rank's piece.

    The keys are indices among these tokens; those before the first token of all are missing.
    """
    lengths = context.known_lengths
    tokens = [(source, index) for source in range(rank) for index in range(max(0, width - lengths[source]), width)]
    tokens = tokens[-width:]
    return {width - len(tokens) + i: token for i, token in enumerate(tokens)}


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        pieces = _gathered(_padded(x.transpose(0, 1), context), context)
        whole = torch.cat([piece[:length] for piece, length in zip(pieces, context.known_lengths, strict=True)])
        return whole.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, d_whole: Tensor) -> Any:
        context = ctx.context
        pieces = d_whole.transpose(0, 1).split(context.known_lengths)
        if context.size == 1:
            return d_whole, None
        sent = torch.cat([_padded(piece, context) for piece in pieces])
        summed = torch.ops._c10d_functional.reduce_scatter_tensor(sent, "sum", context.size, context.group_name)
        return finished(summed, context)[: context.known_lengths[context.rank]].transpose(0, 1), None


def _padded(x: Tensor, context: ContextParallel) -> Tensor:
    """x `[T, ...]`, followed by zeros up to the length of the longest piece."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, max(context.known_lengths) - len(x)))
