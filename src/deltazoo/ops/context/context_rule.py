"""The operator on one rank's piece of a sequence that several ranks share."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deltazoo.ops.context.context_group import ContextParallel, agreed_lengths, sum_over_ranks
from deltazoo.ops.context.segment_backends import SegmentBackend, SegmentInputs, backend_for
from deltazoo.ops.context.segment_fold import Fold
from deltazoo.ops.context.token_pieces import Cells, Pieces, cells_of, pieces_of, segment_length
from deltazoo.ops.transforms import refuse_second_derivative, refuse_transforms, transforming
from deltazoo.ops.validation import check_tensor_values

__all__ = ["agreed_piece", "rule_on_piece"]


Checked = tuple[Tensor, Tensor, Tensor, Tensor | None, float, str, bool | None]
"""q, k, v, erase key, scale, the backend's name, and the precision of the triton backend."""


def rule_on_piece(
    checked: Callable[[], Checked],
    num_tokens: int,
    beta: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    undecayed: bool,
    num_micro_steps: int,
    context: ContextParallel,
) -> tuple[Tensor, Tensor]:
    """Output and final states; arguments as of `deltazoo.ops.delta_rule`.

    Args:
        checked: checks all of them, which no other rank knows of yet: if it raises, all ranks do.
        num_tokens: of this rank's piece.
    """
    if transforming():
        refuse_transforms("context parallelism", "give the whole sequence to one rank")
    options = (undecayed, num_micro_steps)
    described = partial(_described, checked, beta, log_decay, initial_state, options)
    context = agreed_piece(context, num_tokens, cu_seqlens, described)
    q, k, v, erase_key, scale, backend, strict = checked()
    assert context.lengths is not None
    total, (rows, HV, V) = sum(context.lengths), (len(q), *v.shape[2:])
    cells = cells_of(context.lengths, context.segment_length or segment_length(total, rows, HV, V))
    pieces = pieces_of(cells, context.rank, rows, cu_seqlens, v.device)
    passes = backend_for(backend, strict, rows * (len(cells.bounds) - 1))
    if initial_state is not None:
        initial_state = initial_state.to(torch.float64 if v.dtype == torch.float64 else torch.float32)
    tensors = (q, k, v, beta, log_decay, erase_key, initial_state)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _ContextRule.apply(*tensors, (scale, *options), pieces, passes, context, cells, keep)


def _described(
    checked: Callable[[], Checked],
    beta: Tensor | None,
    log_decay: Tensor | None,
    initial_state: Tensor | None,
    options: tuple[bool, int],
) -> list[object]:
    """What must be the same in the calls of all ranks, besides boundaries."""
    q, k, v, erase_key, scale, backend, strict = checked()
    check_tensor_values(log_decay, None, 0)
    tensors = (q, k, v, beta, log_decay, erase_key, initial_state)
    recording = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    described = [None if x is None else (x.dtype, len(x), *x.shape[2:]) for x in tensors]
    return [*described, scale, options, backend, strict, "with gradients" if recording else "without gradients"]


def agreed_piece(
    context: ContextParallel,
    num_tokens: int,
    cu_seqlens: Tensor | None,
    described: Callable[[], object],
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
            bounds = cu_seqlens
            if cu_seqlens is not None and cu_seqlens.device.type == "cpu":
                bounds = cu_seqlens.tolist()
            elif cu_seqlens is not None:  # on a GPU the host would wait for them
                bounds = len(cu_seqlens)
            call = (described(), bounds, context.segment_length, context.gather_final_state)
        except (NotImplementedError, TypeError, ValueError) as raised:
            error = raised
        context = agreed_lengths(context, num_tokens, call, error)
    else:
        described()
    assert context.lengths is not None
    if num_tokens != context.lengths[context.rank]:
        raise ValueError(f"rank {context.rank} has a piece of {num_tokens} tokens, and lengths say {context.lengths}")
    check_tensor_values(None, cu_seqlens, sum(context.lengths))
    return context


class _ContextRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor | None,
        log_decay: Tensor | None,
        erase_key: Tensor | None,
        initial: Tensor | None,
        options: tuple[float, bool, int],
        pieces: Pieces,
        backend: SegmentBackend,
        context: ContextParallel,
        cells: Cells,
        keep: bool,
    ) -> tuple[Tensor, Tensor]:
        scale, *update = options
        arranged = [None if t is None else pieces.arrange(t) for t in (q, k, v, beta, log_decay, erase_key)]
        x = SegmentInputs(*arranged, scale, pieces.cu_seqlens, *update)
        M, X, kept = backend.pairs(x, keep)
        M, X = pieces.cell_pairs(M, X, initial)
        fold = Fold(context, cells.first, M, X)
        gathered = fold.start()
        entering = fold.boundaries(gathered)
        starts = pieces.starts(entering, initial)
        output, ends, kept_of_output = backend.outputs(x, kept, starts, keep)
        final = pieces.finals(ends, initial)
        if context.gather_final_state:
            final = sum_over_ranks(final, context)
        ctx.save_for_backward(*x.tensors, starts, M, fold.gathered_transitions(gathered), *kept, *kept_of_output)
        ctx.options = (x[6:], pieces, backend, context, cells, initial is not None)
        return pieces.restore(output), final

    @staticmethod
    def backward(ctx: Any, d_output: Tensor, d_final: Tensor) -> Any:
        refuse_second_derivative("context parallelism", "give the whole sequence to one rank")
        *tensors, starts, M, transitions = ctx.saved_tensors[:9]
        kept = ctx.saved_tensors[9:]
        options, pieces, backend, context, cells, has_initial = ctx.options
        x = SegmentInputs(*tensors, *options)
        if context.gather_final_state:
            d_final = sum_over_ranks(d_final, context)
        d_output = pieces.arrange(d_output)
        d_end = pieces.end_gradients(d_final)
        d_start = backend.start_gradients(x, kept, starts, d_output, d_end)
        fold = Fold(context, cells.first, M, pieces.cell_gradients(d_start), reverse=True)
        d_leaving = fold.boundaries(fold.start(), transitions)
        d_end = pieces.leaving_gradients(d_end, d_leaving)
        found = backend.gradients(x, kept, starts, d_output, d_end)
        d_initial = pieces.initial_gradients(found.start, d_final) if has_initial else None
        restored = [None if d is None else pieces.restore(d) for d in found[:6]]
        return *restored, d_initial, *[None] * 6
