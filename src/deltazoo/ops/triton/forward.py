"""The order of the forward pass: one fused kernel, which other kernels complete, or a preparation and scans."""

import torch
from torch import Tensor

from deltazoo.ops.triton.chunk.prepare import launch_prepare_rest
from deltazoo.ops.triton.gluon import MISSING
from deltazoo.ops.triton.problem import Kept, Problem
from deltazoo.ops.triton.stages import chain, prepare, scan, scan_once, segment_starts

if MISSING is None:
    from deltazoo.ops.triton.hopper.forward import launch_forward


def forward(p: Problem, keep: bool = True) -> tuple[Tensor, Tensor, Kept]:
    """Output, final state, and the kept tensors; with `keep` the backward pass does not scan again."""
    route = p.plan.route
    keeps = route.keeps if keep else route.keeps_to_scan_again
    if keeps == "inputs":
        return *infer(p), Kept()
    kept, run = Kept.empty(p.plan, p.q, keep), fused if route.forward_keeping(keeps) == "fused" else in_stages
    return *run(p, kept), kept


def infer(p: Problem) -> tuple[Tensor, Tensor]:
    """Output and final state, if nothing has to be kept for gradients."""
    if p.plan.route.forward == "fused":
        return fused(p, None)
    return in_stages(p, Kept.empty(p.plan, p.q, keep=False))


def in_stages(p: Problem, kept: Kept) -> tuple[Tensor, Tensor]:
    """Output and final state by a preparation and scans, which fill the kept tensors."""
    plan = p.plan
    prepare(p, kept)
    starts = p.initial_state if plan.segments == 1 else segment_starts(p, kept)
    output = p.v.new_empty(plan.B, plan.tokens, plan.HV, plan.V)
    final = p.float32(plan.scans, plan.HV, plan.K, plan.V)
    scan(p, kept, p.v, starts, final, output, kept.U, kept.states)
    if plan.segments > 1:
        final = final.unflatten(0, (plan.N, plan.segments))[:, -1].contiguous()
    return output, final


def fused(p: Problem, kept: Kept | None) -> tuple[Tensor, Tensor]:
    """Output and final state by one kernel, which fills `kept` if a backward pass follows.

    It stops a head at its first chunk with a large erase gain, or with a decay per channel beyond its range, with the
    state so far in `final` and the number of the chunk in `stopped`. Other kernels complete these heads. If no head
    stopped they return at once, so that the host need not know.
    """
    plan = p.plan
    output, final = torch.empty_like(p.v), p.float32(plan.scans, plan.HV, plan.K, plan.V)
    stopped = p.v.new_empty(plan.scans, plan.HV, dtype=torch.int32) if plan.by_gain or plan.per_channel else None
    if plan.segments > 1:
        kept = Kept.empty(plan, p.q, keep=False)
        launch_forward(p, None, fused_starts(p, kept, stopped), output, final, stopped)
        if stopped is not None:  # the other launch left the same chunks, which are prepared
            scan_once(p, kept, "state", p.v, final, final, output, None, None, True, stopped)
        return output, final.unflatten(0, (plan.N, plan.segments))[:, -1].contiguous()
    if stopped is None:
        launch_forward(p, kept, p.initial_state, output, final)
        return output, final
    rest = Kept.empty(plan, p.q, keep=False) if kept is None else kept
    launch_forward(p, kept, p.initial_state, output, final, stopped, None if plan.per_channel else rest.large_gain)
    complete(p, rest, stopped, output, final)
    return output, final


def fused_starts(p: Problem, kept: Kept, stopped: Tensor | None) -> Tensor:
    """The first state of each segment, from a fused kernel that prepares the chunks for the scan of transitions."""
    assert kept.starts is not None and kept.transitions is not None
    added = torch.empty_like(kept.starts)
    launch_forward(p, kept, None, None, added, stopped, kept.large_gain)
    if stopped is not None:
        complete(p, kept, stopped, None, added)
    scan(p, kept, None, None, kept.transitions)
    return chain(p, kept, added)


def complete(p: Problem, kept: Kept, stopped: Tensor, output: Tensor | None, final: Tensor) -> None:
    """Complete the chunks that the fused forward pass left, from the states in `final`; strict unless per channel."""
    if p.plan.per_channel:
        prepare(p, kept, stopped)
        scan(p, kept, p.v, final, final, output, stopped=stopped)
    else:
        launch_prepare_rest(p, kept)
        scan_once(p, kept, "state", p.v, final, final, output, kept.U, kept.states, True, stopped)
