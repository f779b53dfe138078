"""The operator on one rank's piece of sequences that several ranks share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltazoo.ops.autograd_modes import records_gradients, refuse_second_derivative, refuse_transforms, scans_again
from deltazoo.ops.call import RuleCall
from deltazoo.ops.context.backends import SegmentBackend, backend_for
from deltazoo.ops.context.fold import Fold, ReverseFold, depth
from deltazoo.ops.context.group import ContextParallel, agreed_piece, sum_over_ranks
from deltazoo.ops.context.pieces import Pieces, cells_of, make_cells, pieces_of, segment_length
from deltazoo.ops.dtypes import wide_dtype
from deltazoo.ops.validation import check_tensor_values

_INSTEAD = ("context parallelism", "give the whole sequence to one rank")


def rule_on_piece(
    check: Callable[[], tuple[RuleCall, str]], num_tokens: int, cu_seqlens: Tensor | None, context: ContextParallel
) -> tuple[Tensor, Tensor]:
    """Output and final states of this rank's piece.

    Args:
        check: function that gives the checked call and its backend's name. If it raises, all ranks do.
        num_tokens: number of tokens of this rank's piece.
        cu_seqlens: boundaries in the whole row, or None.
    """
    refuse_transforms(*_INSTEAD)
    checked: list[tuple[RuleCall, str]] = []

    def described() -> list[object]:
        checked.append(check())
        call, name = checked[0]
        check_tensor_values(call.log_decay, None, 0)
        shapes = [None if x is None else (x.dtype, len(x), *x.shape[2:]) for x in call.differentiable]
        return [*shapes, *call.options, name, f"gradients recorded: {records_gradients(*call.differentiable)}"]

    context = agreed_piece(context, num_tokens, cu_seqlens, described)
    if not checked:
        described()
    call, name = checked[0]
    total, rows, (HV, V) = sum(context.known_lengths), len(call.q), call.v.shape[2:]
    cells = (make_cells if torch.compiler.is_compiling() else cells_of)(
        context.known_lengths, context.segment_length or segment_length(total, rows, HV, V)
    )
    if call.initial_state is not None:
        call = call._replace(initial_state=call.initial_state.to(wide_dtype(call.v)))
    tensors = call.differentiable
    piece = _Piece(
        context,
        cells.first,
        pieces_of(cells, context.rank, rows, cu_seqlens, call.v.device),
        backend_for(name, rows * (len(cells.bounds) - 1)),
        call.options,
        has_initial=call.initial_state is not None,
        keep=records_gradients(*tensors) and not scans_again(),
    )
    if torch.compiler.is_compiling():  # views, since compilers refuse the same tensor twice
        return _Whole.apply(piece, *(None if x is None else x.view_as(x) for x in tensors))
    started = _Start.apply(piece, *tensors)
    if context.meanwhile is not None:
        context.meanwhile()
    return _Finish.apply(piece, started)


@dataclass
class _Piece:
    """The rule on this rank's piece: each pass runs up to the exchange of states and returns its rest as a function."""

    context: ContextParallel
    first: tuple[int, ...]
    """First cell of each rank, then the number of all cells."""
    pieces: Pieces
    backend: SegmentBackend
    options: tuple[Any, ...]
    """The options of the call."""
    has_initial: bool
    keep: bool
    rest: Callable[[], tuple[Any, ...]] | None = None
    """The rest of a pass whose exchange is on its way, between `_Start` and `_Finish`."""

    def finish(self) -> tuple[Any, ...]:
        """The result of the rest of the pass, which is then cleared."""
        assert self.rest is not None
        rest, self.rest = self.rest, None
        return rest()

    def forward(self, *tensors: Tensor | None) -> Callable[[], tuple[Any, ...]]:
        """The rest of the forward pass, after folding this rank's segments and starting to gather those of all ranks.

        Args:
            tensors: `differentiable` of the call.

        Returns:
            A function that gives output, final states, and the tensors that the backward pass needs.
        """
        *inputs, initial, erase_key = tensors
        arranged = [None if x is None else self.pieces.arrange(x) for x in (*inputs, None, erase_key)]
        call = RuleCall.of(arranged, self.pieces.cu_seqlens, self.options)
        M, X, kept = self.backend.pairs(call)
        M, X = self.pieces.cell_pairs(M, X, initial)
        fold = Fold(self.context, self.first, M, X)
        gathered = fold.start()

        def rest() -> tuple[Any, ...]:
            starts = self.pieces.starts(fold.boundaries(gathered), initial)
            started = call._replace(initial_state=starts)
            output, ends, kept_too = self.backend.outputs(started, kept, self.keep)
            final = self.pieces.finals(ends, initial)
            if self.context.gather_final_state:
                final = sum_over_ranks(final, self.context)
            saved = *started.differentiable, *fold.transitions(gathered), *kept, *kept_too
            return self.pieces.restore(output), final, *saved

        return rest

    def backward(self, saved: Sequence[Any], d_output: Tensor, d_final: Tensor) -> Callable[[], tuple[Any, ...]]:
        """The rest of the backward pass, after folding gradients of states and starting to gather those of all ranks.

        Returns:
            A function that gives the gradients of the tensors.
        """
        refuse_second_derivative(*_INSTEAD)
        call = RuleCall.of(saved[:7], self.pieces.cu_seqlens, self.options)
        begin, end = self.first[self.context.rank : self.context.rank + 2]
        first_kept = 7 + 1 + depth(begin, end)
        transitions, kept = saved[7:first_kept], saved[first_kept:]
        if self.context.gather_final_state:
            d_final = sum_over_ranks(d_final, self.context)
        d_output, d_end = self.pieces.arrange(d_output), self.pieces.end_gradients(d_final)
        d_start = self.backend.start_gradients(call, tuple(kept), d_output, d_end)
        fold = ReverseFold(self.context, self.first, transitions, self.pieces.cell_gradients(d_start))
        gathered = fold.start()

        def rest() -> tuple[Any, ...]:
            complete = self.backend.before_gradients(call, tuple(kept))
            leaving = self.pieces.leaving_gradients(d_end, fold.boundaries(gathered))
            *found, d_start, d_erase_key = self.backend.gradients(call, complete, d_output, leaving)
            assert d_start is not None  # segments have first states
            d_initial = self.pieces.initial_gradients(d_start, d_final) if self.has_initial else None
            *found, d_erase_key = (None if d is None else self.pieces.restore(d) for d in (*found, d_erase_key))
            return *found, d_initial, d_erase_key

        return rest


class _Whole(torch.autograd.Function):
    """The whole call, for compilers, which decide themselves what runs while the ranks exchange."""

    @staticmethod
    def forward(ctx: Any, piece: _Piece, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        output, final, *saved = piece.forward(*tensors)()
        ctx.piece = piece
        ctx.save_for_backward(*saved)
        return output, final

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_final: Tensor) -> Any:
        return None, *ctx.piece.backward(ctx.saved_tensors, d_output, d_final)()


class _Start(torch.autograd.Function):
    """The forward pass up to the exchange, and the backward pass after it.

    The caller's work between `_Start` and `_Finish` runs while the ranks exchange, forward and backward, since autograd
    visits it between the two. The result is an empty tensor that connects them; `_Piece.rest` holds the rest of the
    pass.
    """

    @staticmethod
    def forward(ctx: Any, piece: _Piece, *tensors: Tensor | None) -> Tensor:
        ctx.piece, piece.rest = piece, piece.forward(*tensors)
        return tensors[0].new_empty(0, dtype=torch.float32)  # type: ignore[union-attr]

    @staticmethod
    def backward(ctx: Any, d_started: Tensor) -> Any:
        return None, *ctx.piece.finish()


class _Finish(torch.autograd.Function):
    """The forward pass after the exchange, and the backward pass before it."""

    @staticmethod
    def forward(ctx: Any, piece: _Piece, started: Tensor) -> tuple[Tensor, Tensor]:
        output, final, *saved = piece.finish()
        ctx.piece = piece
        ctx.save_for_backward(*saved)
        return output, final

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_final: Tensor) -> Any:
        ctx.piece.rest = ctx.piece.backward(ctx.saved_tensors, d_output, d_final)
        return None, d_output.new_zeros(0, dtype=torch.float32)
