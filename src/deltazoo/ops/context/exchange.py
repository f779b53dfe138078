"""Tokens of other ranks, and gradients back to the ranks that they come from."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.context.group import ContextParallel, finished, started_gather


def all_tokens(x: Tensor, context: ContextParallel) -> Tensor:
    """The tokens `[B, T, ...]` of the whole sequence, from this rank's piece."""
    lengths = context.known_lengths
    padding = (0, 0) * (x.ndim - 1) + (0, max(lengths) - x.shape[1])
    pieces = _gathered(F.pad(x.transpose(0, 1), padding), context)
    whole = torch.cat([piece[:length] for piece, length in zip(pieces, lengths, strict=True)])
    return whole.transpose(0, 1).contiguous()


def exchanged(parts: Sequence[Tensor], shapes: Sequence[Sequence[int]], context: ContextParallel) -> list[Tensor]:
    """The parts that all ranks have for this one.

    Args:
        parts: one for each rank.
        shapes: of the parts of all ranks for this one.
    """
    if context.size == 1:
        return list(parts)
    sizes = [math.prod(shape) for shape in shapes], [part.numel() for part in parts]
    sent = torch.cat([part.reshape(-1) for part in parts])
    got = torch.ops._c10d_functional_autograd.all_to_all_single(sent, *sizes, context.group_name)
    return [part.view(*shape) for part, shape in zip(finished(got, context).split(sizes[0]), shapes, strict=True)]


def next_tokens(x: Tensor, context: ContextParallel, after_last: int) -> Tensor:
    """`[B, T]` integers moved up by one: entry t is that of token t + 1, which another rank may have.

    Args:
        x: `[B, T]`.
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
    before = _before(_gathered(_last(inputs, width), context), context, context.rank)
    return before.split([x.shape[2] for x in inputs], 2)


@torch.no_grad()
def last_tokens(inputs: Sequence[Tensor], width: int, context: ContextParallel) -> Tensor:
    """The last `width` tokens of the whole sequences, on every rank: `[B, width, C]`.

    They are `tokens_before` of a rank after the last one, with the channels of all inputs side by side, no gradients.
    """
    return _before(_gathered(_last(inputs, width), context), context, context.size)


def started_last_tokens(inputs: Sequence[Tensor], width: int, context: ContextParallel) -> Tensor:
    """The last `width` tokens of every rank, channels side by side, on their way to all ranks."""
    return started_gather(_last(inputs, width), context)


def tokens_before_piece(gathered: Tensor, context: ContextParallel) -> Tensor:
    """The tokens `[B, width, C]` before this rank's piece, from `started_last_tokens`; it has no gradient."""
    return _before(_by_rank(finished(gathered, context), context), context, context.rank)


def tokens_after_piece(gathered: Tensor, context: ContextParallel) -> Tensor:
    """The tokens `[B, up to width, C]` after this rank's piece, of which there are fewer at the end of the row.

    Args:
        gathered: the first `width` tokens of every rank, after them zeros if it has fewer, on their way.
    """
    first_of_ranks = _by_rank(finished(gathered, context), context)
    later = range(context.rank + 1, context.size)
    after = [first_of_ranks[rank, :, : context.known_lengths[rank]] for rank in later]
    return torch.cat([first_of_ranks[0, :, :0], *after], 1)[:, : first_of_ranks.shape[2]]


def _before(last_of_ranks: Tensor, context: ContextParallel, rank: int) -> Tensor:
    """The tokens `[B, width, C]` before the piece of a rank, of the last ones of all ranks, `[size, B, width, C]`."""
    width, lengths = last_of_ranks.shape[2], context.known_lengths
    earlier = [last_of_ranks[source, :, max(0, width - lengths[source]) :] for source in range(rank)]
    before = torch.cat([last_of_ranks[0, :, :0], *earlier], 1)[:, -width:]
    return F.pad(before, (0, 0, width - before.shape[1], 0))


def _last(inputs: Sequence[Tensor], width: int) -> Tensor:
    """The last `width` tokens of all inputs side by side, after zeros if there are fewer."""
    last = torch.cat([x[:, max(0, x.shape[1] - width) :] for x in inputs], 2)
    return F.pad(last, (0, 0, width - last.shape[1], 0))


def _by_rank(x: Tensor, context: ContextParallel) -> Tensor:
    """Gathered tensors `[size * n, ...]` as `[size, n, ...]`."""
    return x.unflatten(0, (context.size, -1))


def _gathered(x: Tensor, context: ContextParallel) -> Tensor:
    """The tensors `[n, ...]` of all ranks, `[size, n, ...]`."""
    return _by_rank(x if context.size == 1 else _Gathered.apply(x, context), context)


class _Gathered(torch.autograd.Function):
    """The tensors of all ranks; a rank gets the sum of the gradients that all find for its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return finished(started_gather(x, context), context)

    @staticmethod
    def backward(ctx: Any, d_gathered: Tensor) -> Any:
        size, name = ctx.context.size, ctx.context.group_name
        summed = torch.ops._c10d_functional.reduce_scatter_tensor(d_gathered.contiguous(), "sum", size, name)
        return finished(summed, ctx.context), None
