"""The operator on one rank's piece of sequences that several ranks share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deltazoo.ops.autograd_modes import records_gradients, refuse_second_derivative, refuse_transforms, scans_again
from deltazoo.ops.call import RuleCall
from deltazoo.ops.context.context_group import ContextParallel, agreed_lengths, sum_over_ranks
from deltazoo.ops.context.segment_backends import Kept, SegmentBackend, SegmentInputs, backend_for
from deltazoo.ops.context.segment_fold import Fold
from deltazoo.ops.context.token_pieces import Cells, Pieces, cells_of, make_cells, pieces_of, segment_length
from deltazoo.ops.dtypes import wide_dtype
from deltazoo.ops.validation import check_tensor_values

__all__ = ["agreed_piece", "rule_on_piece"]

_INSTEAD = ("context parallelism", "give the whole sequence to one rank")


def rule_on_piece(
    check: Callable[[], tuple[RuleCall, str]], num_tokens: int, cu_seqlens: Tensor | None, context: ContextParallel
) -> tuple[Tensor, Tensor]:
    """Output and final states of this rank's piece.

    Args:
        check: gives the checked call and its backend's name. If it raises, all ranks do.
        num_tokens: of this rank's piece.
        cu_seqlens: boundaries in the whole row, or None.
        context: the ranks.
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
    q, k, v, beta, log_decay, scale, initial_state, _, strict, erase_key, undecayed, num_micro_steps = call
    total, rows, (HV, V) = sum(context.known_lengths), len(q), v.shape[2:]
    cells = (make_cells if torch.compiler.is_compiling() else cells_of)(
        context.known_lengths, context.segment_length or segment_length(total, rows, HV, V)
    )
    if initial_state is not None:
        initial_state = initial_state.to(wide_dtype(v))
    tensors = (q, k, v, beta, log_decay, erase_key, initial_state)
    call = _Call(
        scale,
        undecayed,
        num_micro_steps,
        pieces_of(cells, context.rank, rows, cu_seqlens, v.device),
        backend_for(name, strict, rows * (len(cells.bounds) - 1)),
        context,
        cells,
        records_gradients(*tensors) and not scans_again(),
    )
    if torch.compiler.is_compiling():  # views, since compilers want no tensor twice
        return _Rule.apply(call, *(None if x is None else x.view_as(x) for x in tensors))
    started = _Start.apply(call, *tensors)
    if context.meanwhile is not None:
        context.meanwhile()
    return _Finish.apply(call, started)


def agreed_piece(
    context: ContextParallel, num_tokens: int, cu_seqlens: Tensor | None, described: Callable[[], object]
) -> ContextParallel:
    """The context with lengths, after all ranks have found that their calls fit together.

    Args:
        num_tokens: of this rank's piece.
        cu_seqlens: boundaries in the whole row, or None.
        described: gives what must be the same on all ranks. If it raises on one of them, all raise.
    """
    if context.lengths is None:
        call, error = None, None
        try:
            bounds: object = None if cu_seqlens is None else len(cu_seqlens)
            if cu_seqlens is not None and cu_seqlens.device.type == "cpu":  # for a GPU the host would have to wait
                bounds = cu_seqlens.tolist()
            call = (described(), bounds, context.segment_length, context.gather_final_state)
        except (NotImplementedError, TypeError, ValueError) as raised:
            error = raised
        context = agreed_lengths(context, num_tokens, call, error)
    lengths = context.known_lengths
    if num_tokens != lengths[context.rank]:
        raise ValueError(f"rank {context.rank} has a piece of {num_tokens} tokens, and lengths say {lengths}")
    check_tensor_values(None, cu_seqlens, sum(lengths))
    return context


@dataclass
class _Call:
    """What a call computes by, besides its tensors; the steps of both passes are its methods."""

    scale: float
    undecayed: bool
    num_micro_steps: int
    pieces: Pieces
    backend: SegmentBackend
    context: ContextParallel
    cells: Cells
    keep: bool
    handed_over: tuple[Any, ...] | None = None
    """What `_Start` and `_Finish` hand to each other."""

    def take_over(self) -> tuple[Any, ...]:
        """What the other of the two has handed over, which the call then forgets."""
        assert self.handed_over is not None
        handed_over, self.handed_over = self.handed_over, None
        return handed_over

    def inputs(self, *tensors: Tensor | None) -> SegmentInputs:
        """The tensors of a call but the initial state, as segments."""
        return self.with_options(*(None if x is None else self.pieces.arrange(x) for x in tensors))

    def with_options(self, *tensors: Tensor | None) -> SegmentInputs:
        """Tensors that are arranged already, and the call's options."""
        options = (self.scale, self.pieces.cu_seqlens, self.undecayed, self.num_micro_steps)
        return SegmentInputs._make([*tensors, *options])

    def start(self, x: SegmentInputs, initial: Tensor | None) -> "_Exchange":
        """Fold this rank's segments, and start to gather the pairs of all ranks."""
        M, X, kept = self.backend.pairs(x)
        M, X = self.pieces.cell_pairs(M, X, initial)
        fold = Fold(self.context, self.cells.first, M, X)
        return _Exchange(fold, fold.start(), M, kept)

    def finish(self, x: SegmentInputs, initial: Tensor | None, exchange: "_Exchange") -> tuple[Any, ...]:
        """Output, final states, and what the backward pass needs besides x: first states, two M's, what is kept."""
        fold, gathered, M, kept = exchange.fold, exchange.gathered, exchange.M, exchange.kept
        starts = self.pieces.starts(fold.boundaries(gathered), initial)
        output, ends, kept_too = self.backend.outputs(x, kept, starts, self.keep)
        final = self.pieces.finals(ends, initial)
        if self.context.gather_final_state:
            final = sum_over_ranks(final, self.context)
        transitions = fold.gathered_transitions(gathered)
        return self.pieces.restore(output), final, starts, M, transitions, *kept, *kept_too

    def start_backward(
        self, x: SegmentInputs, starts: Tensor, M: Tensor, kept: Kept, d_output: Tensor, d_final: Tensor
    ) -> "_BackwardExchange":
        """Fold the gradients of states in this rank's segments, and start to gather those of all ranks."""
        if self.context.gather_final_state:
            d_final = sum_over_ranks(d_final, self.context)
        d_output, d_end = self.pieces.arrange(d_output), self.pieces.end_gradients(d_final)
        d_start = self.backend.start_gradients(x, kept, starts, d_output, d_end)
        fold = Fold(self.context, self.cells.first, M, self.pieces.cell_gradients(d_start), reverse=True)
        return _BackwardExchange(fold, fold.start(), d_output, d_end, d_final)

    def finish_backward(
        self,
        x: SegmentInputs,
        starts: Tensor,
        transitions: Tensor,
        kept: Kept,
        exchange: "_BackwardExchange",
        has_initial: bool,
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the seven tensors of the call."""
        kept = self.backend.before_gradients(x, kept, starts)
        d_leaving = exchange.fold.boundaries(exchange.gathered, transitions)
        d_end = self.pieces.leaving_gradients(exchange.d_end, d_leaving)
        found = self.backend.gradients(x, kept, starts, exchange.d_output, d_end)
        d_initial = self.pieces.initial_gradients(found.start, exchange.d_final) if has_initial else None
        return *(None if d is None else self.pieces.restore(d) for d in found[:-1]), d_initial


@dataclass
class _Exchange:
    """A forward exchange on its way."""

    fold: Fold
    gathered: Tensor
    M: Tensor
    kept: Kept


@dataclass
class _BackwardExchange:
    """A backward exchange on its way."""

    fold: Fold
    gathered: Tensor
    d_output: Tensor
    d_end: Tensor
    d_final: Tensor


class _Rule(torch.autograd.Function):
    """The whole call, for compilers, which see for themselves what may run while the ranks exchange."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        *inputs, initial = tensors
        x = call.inputs(*inputs)
        output, final, *kept = call.finish(x, initial, call.start(x, initial))
        ctx.call, ctx.has_initial = call, initial is not None
        ctx.save_for_backward(*x.tensors, *kept)
        return output, final

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_final: Tensor) -> Any:
        refuse_second_derivative(*_INSTEAD)
        call: _Call = ctx.call
        x, starts, M, transitions, kept = _saved_parts(call, ctx.saved_tensors)
        exchange = call.start_backward(x, starts, M, kept, d_output, d_final)
        return None, *call.finish_backward(x, starts, transitions, kept, exchange, ctx.has_initial)


def _saved_parts(call: _Call, saved: tuple[Any, ...]) -> tuple[SegmentInputs, Tensor, Tensor, Tensor, Kept]:
    """What the forward pass has saved: the inputs, arranged already, first states, two M's, and what is kept."""
    q, k, v, beta, log_decay, erase_key, starts, M, transitions, *kept = saved
    return call.with_options(q, k, v, beta, log_decay, erase_key), starts, M, transitions, tuple(kept)


class _Start(torch.autograd.Function):
    """The call up to the exchange, and backward all that follows it.

    What the caller computes between `_Start` and `_Finish` runs while the ranks exchange, forward and backward, since
    autograd goes back through it between the two. The result is an empty tensor that connects them; what they hand to
    each other lies in the call.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor | None) -> Tensor:
        *inputs, initial = tensors
        x = call.inputs(*inputs)
        ctx.call, ctx.has_initial = call, initial is not None
        call.handed_over = (x, initial, call.start(x, initial))
        return x.q.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, d_started: Tensor) -> Any:
        return None, *ctx.call.finish_backward(*ctx.call.take_over(), ctx.has_initial)


class _Finish(torch.autograd.Function):
    """The call after the exchange, and backward all that comes before it."""

    @staticmethod
    def forward(ctx: Any, call: _Call, started: Tensor) -> tuple[Tensor, Tensor]:
        x, initial, exchange = call.take_over()
        output, final, *kept = call.finish(x, initial, exchange)
        ctx.call = call
        ctx.save_for_backward(*x.tensors, *kept)
        return output, final

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_final: Tensor) -> Any:
        refuse_second_derivative(*_INSTEAD)
        call: _Call = ctx.call
        x, starts, M, transitions, kept = _saved_parts(call, ctx.saved_tensors)
        exchange = call.start_backward(x, starts, M, kept, d_output, d_final)
        call.handed_over = (x, starts, transitions, kept, exchange)
        return None, d_output.new_zeros(0, dtype=torch.float32)
