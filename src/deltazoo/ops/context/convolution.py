"""Short convolutions of a piece, whose first outputs depend on the last inputs of the ranks before.

Those travel while everything else is computed. Forward the piece is convolved as if nothing came before it, then the
few first outputs anew. Backward the last inputs get their gradients anew, from the first outputs of the ranks after. So
outputs and gradients of inputs have the bits of whole rows.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deltazoo.ops.autograd_modes import refuse_second_derivative
from deltazoo.ops.context.exchange import started_last_tokens, tokens_after_piece, tokens_before_piece
from deltazoo.ops.context.group import ContextParallel, started_gather
from deltazoo.ops.fused.choice import REFUSAL
from deltazoo.ops.fused.short_conv_kernels import short_convs
from deltazoo.ops.recompute import declare_recomputable

Three = tuple[Tensor, Tensor, Tensor]
_Packing = tuple[Tensor | None, Tensor | None]
"""The sequence of each token and the boundaries, as the kernel takes them; None for rows that are not packed."""


class PieceBounds(NamedTuple):
    """The ranks of a piece, and where packed sequences begin."""

    context: ContextParallel
    """The ranks, whose lengths are known."""
    cu_seqlens: Tensor | None
    """`[N + 1]` boundaries in the whole row; None: every row is one sequence."""

    @property
    def begin(self) -> int:
        """The first token of the piece in the whole row."""
        return sum(self.context.known_lengths[: self.context.rank])

    def packing(self, begin: int, num_tokens: int) -> _Packing:
        """The packing of tokens from `begin` in the whole row on, as if there were no others."""
        if self.cu_seqlens is None:
            return None, None
        bounds = (self.cu_seqlens - begin).clamp(0, num_tokens)
        tokens = torch.arange(num_tokens, device=bounds.device, dtype=bounds.dtype)
        return torch.searchsorted(bounds[1:], tokens, right=True), bounds

    def past(self, before: Tensor) -> Tensor:
        """The state before each row or sequence `[N, C, width]`, from the tokens `[B, width, C]` before the piece."""
        if self.cu_seqlens is None:
            return before.mT.contiguous()
        # Only a sequence that has begun before the piece has tokens there.
        first = torch.full((1,), self.begin, device=before.device, dtype=self.cu_seqlens.dtype)
        number = torch.searchsorted(self.cu_seqlens[1:], first, right=True)
        place = torch.arange(self.begin - before.shape[1], self.begin, device=before.device)
        before = before.masked_fill((place < self.cu_seqlens[number])[:, None], 0)
        past = before.new_zeros(len(self.cu_seqlens) - 1, before.shape[2], before.shape[1])
        return past.index_copy_(0, number, before.mT)


def convolved_piece(inputs: Three, weights: Three, bounds: PieceBounds, silu: bool, head: int, norm_v: bool) -> Three:
    """The three results of `short_convolutions` for this rank's tokens, by its kernel.

    The ranks exchange the inputs before their pieces.

    Args:
        inputs: three `[B, T, C_i]`.
        weights: three `[C_i, 1, W]`.
        bounds: bounds of the piece.
        silu, head, norm_v: see `short_convs`.
    """
    packing, start = bounds.packing(bounds.begin, inputs[0].shape[1]), 0
    *outputs, past = _Convolved.apply(bounds, packing, (silu, head, norm_v), *inputs, *weights)
    for y, x, weight, normed in zip(outputs, inputs, weights, (True, True, norm_v), strict=True):
        place = start, start + x.shape[2], silu, head if normed else 0
        declare_recomputable(y, _convolved_alone, x, weight, past, *packing, *place)
        start += x.shape[2]
    return tuple(outputs)


def _convolved_alone(
    x: Tensor, weight: Tensor, past: Tensor, sequence: Tensor | None, cu_seqlens: Tensor | None, start: int, stop: int,
    silu: bool, head: int,
) -> Tensor:  # fmt: skip
    past = past[:, start:stop]
    return short_convs(x, None, None, weight, None, None, past, sequence, cu_seqlens, silu, head, True)[0]


class _Convolved(torch.autograd.Function):
    """The outputs of all three, and the state before the piece."""

    @staticmethod
    def forward(
        ctx: Any, bounds: PieceBounds, packing: _Packing, options: tuple[Any, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, weights, context = tensors[:3], tensors[3:], bounds.context
        width = weights[0].shape[-1] - 1
        here = min(width, inputs[0].shape[1])
        gathered = started_last_tokens(inputs, width, context)
        outputs = short_convs(*inputs, *weights, None, *packing, *options)
        before = tokens_before_piece(gathered, context)
        head = [torch.cat([part, x[:, :here]], 1) for part, x in zip(_split(before, inputs), inputs, strict=True)]
        packing_of_head = bounds.packing(bounds.begin - width, width + here)
        for y, first in zip(outputs, short_convs(*head, *weights, None, *packing_of_head, *options), strict=True):
            y[:, :here] = first[:, width:]
        past = bounds.past(before)
        ctx.mark_non_differentiable(past)
        ctx.bounds, ctx.packing, ctx.options = bounds, packing, options
        ctx.save_for_backward(*tensors, before, past)
        return *outputs, past

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        refuse_second_derivative(*REFUSAL)
        *tensors, before, past = ctx.saved_tensors
        inputs, weights, d_outputs, width = tensors[:3], tensors[3:], gradients[:3], before.shape[1]
        num_tokens, context = inputs[0].shape[1], ctx.bounds.context
        here = min(width, num_tokens)
        first = torch.cat([x[:, :width] for x in (*inputs, *d_outputs)], 2)
        gathered = started_gather(F.pad(first, (0, 0, 0, width - here)), context)
        found = short_convs.backward(*inputs, *weights, past, *ctx.packing, *ctx.options, *d_outputs)

        # The last tokens once more, after those that their convolutions reach back to and before those that reach them.
        after, d_after = tokens_after_piece(gathered, context).tensor_split(2, 2)
        known = width + here
        parts = zip(_split(before, inputs), inputs, _split(after, inputs), strict=True)
        tail = [torch.cat([torch.cat([old, x[:, -known:]], 1)[:, -known:], new], 1) for old, x, new in parts]
        d_parts = zip(d_outputs, _split(d_after, inputs), strict=True)
        d_known = [torch.cat([d[:, num_tokens - here :], d_new], 1) for d, d_new in d_parts]
        packing = ctx.bounds.packing(ctx.bounds.begin + num_tokens - known, tail[0].shape[1])
        again = short_convs.backward(
            *tail, *weights, None, *packing, *ctx.options, *(F.pad(d, (0, 0, width, 0)) for d in d_known)
        )
        for d, last in zip(found[:3], again[:3], strict=True):
            d[:, num_tokens - here :] = last[:, width:known]
        return None, None, None, *found


def _split(x: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """x `[B, n, channels of all inputs]` by input."""
    return x.split([one.shape[2] for one in inputs], 2)
