"""The order of the backward pass: the states, then one fused kernel, or a reverse scan and the chunks' gradients."""

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.triton.chunk.gradients import launch_gradients
from deltazoo.ops.triton.chunk.gradients_channel import launch_gradients_channel
from deltazoo.ops.triton.chunk.gradients_levels import launch_gradients_levels
from deltazoo.ops.triton.forward import forward
from deltazoo.ops.triton.gluon import MISSING
from deltazoo.ops.triton.hopper.small_step_gradients import (
    launch_log_decay_gradient,
    launch_sum_of_groups,
    launch_tiny_steps,
)
from deltazoo.ops.triton.problem import (
    Gradients,
    Kept,
    Problem,
    StateGradients,
    contiguous,
    empty_gradients,
    free,
    fused_gradients,
    gradients_in_place,
)
from deltazoo.ops.triton.stages import prepared_again, reverse_scan, scan_for_states, segment_end_gradients
from deltazoo.ops.triton.tiles import CHUNK

if MISSING is None:
    from deltazoo.ops.triton.hopper.gradients import launch_gradients as launch_fused_gradients
    from deltazoo.ops.triton.hopper.gradients_channel import launch_gradients_channel as launch_gluon_gradients_channel
    from deltazoo.ops.triton.hopper.gradients_levels import launch_gradients_levels as launch_gluon_gradients_levels


def backward(
    call: RuleCall, kept: Kept, d_output: Tensor, d_final: Tensor | None, in_place: bool = False,
    overwritten: bool = False, whole_segments: int | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of `call.differentiable` in their dtypes; None for those that were not given.

    With `in_place` the kept tensors are no longer needed: gradients may lie in their memory, and unread ones are freed.
    If this has happened before (`overwritten`), the kept tensors are computed again. `whole_segments` is that of
    `Plan`.
    """
    p = Problem(call, whole_segments)
    plan, fused = p.plan, p.plan.fused_backward
    if kept.AP is None:
        kept = prepared_again(p) if plan.per_channel else forward(p)[2]
    elif overwritten and (kept.U is not None or not fused):
        kept = forward(p)[2]
    d_output = contiguous(d_output, plan)
    d_final = None if d_final is None else d_final.float().contiguous()
    starts = p.initial_state
    if plan.segments > 1:
        starts, d_final = kept.starts, segment_end_gradients(p, kept, d_output, d_final)
    U, states = kept.U, kept.states
    if U is None or states is None:
        U, states = scan_for_states(p, kept, starts)
    if fused:
        gradients, d_initial = in_one_kernel(p, kept, U, states, starts, d_output, d_final, in_place)
    else:
        gradients, d_initial = in_stages(p, kept, U, states, d_output, d_final, in_place)
    if d_initial is not None and plan.segments > 1:
        d_initial = d_initial.unflatten(0, (plan.N, plan.segments))[:, 0]
    dq, dk, d_erase_key, *others = gradients
    found = zip((dq, dk, *others, d_initial, d_erase_key), call.differentiable, strict=True)
    return tuple([d if d is None or x is None or d.dtype == x.dtype else d.to(x.dtype) for d, x in found])


def in_one_kernel(
    p: Problem, kept: Kept, U: Tensor, states: Tensor, starts: Tensor | None, d_output: Tensor, d_final: Tensor | None,
    in_place: bool,
) -> tuple[Gradients, Tensor | None]:  # fmt: skip
    """The gradients, and those of the initial states or None; `starts`: the first states of sequences or segments."""
    plan, gradients = p.plan, fused_gradients(p, U, states, in_place)
    dq, dk, _, dv, d_beta, d_log_decay = gradients
    d_initial = None if p.initial_state is None else p.float32(plan.scans, plan.HV, plan.K, plan.V)
    d_G = overlap = None
    if d_log_decay is not None:
        d_G, overlap = torch.empty_like(d_log_decay), p.float32(plan.slots, plan.V)
    launch_fused_gradients(p, kept, U, states, d_output, d_final, gradients, d_G, overlap, d_initial)
    launch_tiny_steps(p, kept, starts, dv, d_beta)
    if d_log_decay is not None:
        launch_log_decay_gradient(plan, d_G, overlap, p.log_decay, d_log_decay)
    if plan.grouped:
        heads, (dq, dk) = (dq, dk), (torch.empty_like(p.q) for _ in range(2))
        launch_sum_of_groups(plan, *heads, dq, dk)
    return (dq, dk, None, dv, d_beta, d_log_decay), d_initial


def in_stages(
    p: Problem, kept: Kept, U: Tensor, states: Tensor, d_output: Tensor, d_final: Tensor | None, in_place: bool
) -> tuple[Gradients, Tensor | None]:
    """The gradients, and those of the initial states or None."""
    Z, d_states, d_initial = reverse_scan(
        p, kept, d_output, d_final, keep=True, initial=p.initial_state is not None, in_place=in_place
    )  # fmt: skip
    dv = Z if p.plan.route.gradients == "gluon" else None
    gradients = gradients_in_place(p, kept, dv, d_states) if in_place else empty_gradients(p, dv=dv)
    of_chunks(p, kept, (U, Z, d_output, states), d_states, gradients)
    if in_place:  # sums over heads and copies in other dtypes may follow
        free((U, Z, states, *d_states), gradients)
    if p.plan.grouped:
        dq, dk, d_erase_key, dv, d_beta, d_log_decay = gradients
        d_erase_key = None if d_erase_key is None else sum_of_group(d_erase_key, p.q)
        gradients = sum_of_group(dq, p.q), sum_of_group(dk, p.q), d_erase_key, dv, d_beta, d_log_decay
    return gradients, d_initial


def of_chunks(
    p: Problem, kept: Kept, scanned: tuple[Tensor | None, ...], d_states: StateGradients, gradients: Gradients
) -> None:
    """Fill the gradients; `scanned`: U, Z, d_output and the states."""
    low, high = d_states
    if not p.plan.per_channel:
        launch_gradients(p, kept, (*scanned, low), gradients)
        return
    gluon = p.plan.route.gradients == "gluon"
    others = high if gluon else p.float32(p.plan.slots, CHUNK)  # in plain Triton the diagonals of dP
    inputs = p.q, p.k, p.erase_key, p.v, kept.beta, p.log_decay, kept.G, kept.strong_decay
    tensors = *inputs, *scanned, low, others, *gradients
    if gluon:
        launch_gluon_gradients_channel(p, tensors)
        launch_gluon_gradients_levels(p, tensors)
    else:
        if p.plan.half:
            launch_gradients_channel(p, tensors)
        launch_gradients_levels(p, tensors)


def sum_of_group(gradient: Tensor, q: Tensor) -> Tensor:
    """Gradients per value head `[B, T, HV, K]`, summed over the heads that share a key head, in q's dtype."""
    return gradient.unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype)
