"""The stages that forward and backward pass share: preparation, scan, reverse scan, and the starts of segments.

Few heads and long rows leave most of the GPU idle in the serial scans. Rows are then cut into segments: one scan finds
each segment's final state X from a zero state, another its transition M (the final state from the identity, without
values). `S' = M S + X`, chained over the segments, gives the exact state that each of them starts from, and all
segments run at once. Backward the same chain runs transposed.
"""

import torch
from torch import Tensor

from deltazoo.ops.triton.chunk.inverse import launch_invert
from deltazoo.ops.triton.chunk.prepare import launch_prepare
from deltazoo.ops.triton.chunk.prepare_channel import launch_prepare_channel, launch_prepare_channel_rest
from deltazoo.ops.triton.chunk.reverse_scan import launch_reverse_scan
from deltazoo.ops.triton.chunk.scan import Start, launch_scan
from deltazoo.ops.triton.chunk.segments import chain_kernel
from deltazoo.ops.triton.gluon import MISSING
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem, StateGradients, new_state_gradients, new_states
from deltazoo.ops.triton.tiles import CHUNK

if MISSING is None:
    from deltazoo.ops.triton.hopper.reverse_scan import launch_reverse_scan as launch_gluon_reverse_scan
    from deltazoo.ops.triton.hopper.scan import launch_scan as launch_gluon_scan


def prepare(p: Problem, kept: Kept, stopped: Tensor | None = None) -> None:
    """Fill the kept tensors of every chunk; with `stopped` (per channel), those of scans from a head's number on."""
    # The last launch inverts L of strict chunks, whose memory is free again after that.
    strict_L = p.float32(p.plan.slots, CHUNK, CHUNK) if True in p.plan.scan_modes else None
    if stopped is not None:
        launch_prepare_channel_rest(p, kept, strict_L, stopped)
    elif p.plan.per_channel:
        launch_prepare_channel(p, kept, strict_L)
    else:
        launch_prepare(p, kept, strict_L)
    if strict_L is not None:
        launch_invert(p.plan, kept.large_gain, strict_L, kept.AP)


def scan(
    p: Problem, kept: Kept, v: Tensor | None, initial: Tensor | None, final: Tensor | None,
    output: Tensor | None = None, U: Tensor | None = None, states: Tensor | None = None,
    stopped: Tensor | None = None,
) -> None:  # fmt: skip
    """Run the scan from the states `initial` (None: zero), or without values from the identity.

    It fills `final` and, if given, `output`, the corrections U and the states that enter the chunks. If it keeps
    `states` without `output`, it fills `final` only where a strict launch begins. `stopped`, for Gluon kernels, has the
    number of the chunk at which each head begins. Kernels in plain Triton fill `output`, or U and `states`, not all.
    """
    start: Start = "identity" if v is None else "zero" if initial is None else "state"
    for strict in p.plan.scan_modes:
        if strict and p.plan.by_gain:  # this launch continues where the other stopped
            start, initial, stopped = "state", final, None
        scan_once(p, kept, start, v, initial, final, output, U, states, strict, stopped)


def scan_once(
    p: Problem, kept: Kept, start: Start, v: Tensor | None, initial: Tensor | None, final: Tensor | None,
    output: Tensor | None, U: Tensor | None, states: Tensor | None, strict: bool, stopped: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch one part of `scan`, from `start`."""
    if p.plan.gluon:
        launch_gluon_scan(p, kept, start, v, initial, final, output, U, states, strict, stopped)
    else:
        launch_scan(p, kept, start, v, initial, final, output, U, states, strict)


def scan_for_states(p: Problem, kept: Kept, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The corrections U, and the states that enter the chunks."""
    plan, (U, states) = p.plan, new_states(p.plan, p.v)
    # The fast launch leaves its state there for the strict launch.
    final = p.float32(plan.scans, plan.HV, plan.K, plan.V) if plan.by_gain else None
    scan(p, kept, p.v, initial, final, None, U, states)
    return U, states


def reverse_scan(
    p: Problem, kept: Kept, d_output: Tensor, d_final: Tensor | None, keep: bool, initial: bool, in_place: bool = False
) -> tuple[Tensor | None, StateGradients, Tensor | None]:
    """Z and the gradients of the states that leave the chunks (`keep`), and those of the initial states (`initial`).

    Where Gluon kernels make the gradients per channel, Z is dv but for tokens with a step size near zero.
    With `in_place` gradients of states may lie in the memory of kept tensors.
    """
    plan = p.plan
    Z = torch.empty_like(p.v) if keep else None
    d_states = new_state_gradients(p, kept, in_place) if keep else (None, None)
    d_initial = p.float32(plan.scans, plan.HV, plan.K, plan.V) if initial or plan.by_gain else None
    for strict in reversed(plan.scan_modes):
        if plan.gluon and not strict:
            launch_gluon_reverse_scan(p, kept, d_output, Z, d_states, d_final, d_initial, initial)
        else:
            launch_reverse_scan(p, kept, d_output, Z, d_states, d_final, d_initial, initial, strict)
    return Z, d_states, d_initial if initial else None


@per_plan
def _chain(plan: Plan, reverse: bool) -> Constants:
    tiles = plan.tiles.chain
    if plan.card.multiprocessors >= -(-plan.V // 16) * plan.HV * plan.N:  # narrow tiles still run all at once
        tiles = tiles | dict(BV=16)
    return Constants(
        -(-plan.V // tiles["BV"]) * plan.HV * plan.N, segments=plan.segments, HV=plan.HV, K=plan.K, V=plan.V,
        REVERSE=reverse, **tiles,
    )  # fmt: skip


def segment_starts(p: Problem, kept: Kept) -> Tensor:
    """The first state of each segment, which is stored in `kept` with the transitions."""
    assert kept.starts is not None and kept.transitions is not None
    added = torch.empty_like(kept.starts)
    scan(p, kept, p.v, None, added)
    scan(p, kept, None, None, kept.transitions)
    return chain(p, kept, added)


def chain(p: Problem, kept: Kept, added: Tensor) -> Tensor:
    """The first state of each segment, from the transitions in `kept` and the states that segments add."""
    launch(chain_kernel, _chain(p.plan, False), kept.transitions, added, p.initial_state, kept.starts)
    assert kept.starts is not None
    return kept.starts


def segment_end_gradients(p: Problem, kept: Kept, d_output: Tensor, d_final: Tensor | None) -> Tensor:
    """Gradient of the state that each segment ends with, `[N * segments, HV, K, V]`."""
    added = reverse_scan(p, kept, d_output, None, keep=False, initial=True)[2]
    assert added is not None
    gradients = torch.empty_like(added)
    launch(chain_kernel, _chain(p.plan, True), kept.transitions, added, d_final, gradients)
    return gradients


def prepared_again(p: Problem) -> Kept:
    """The tensors that a forward pass keeps, computed again without corrections and states."""
    kept = Kept.empty(p.plan, p.q, keep=False)
    prepare(p, kept)
    if p.plan.segments > 1:
        segment_starts(p, kept)
    return kept
