"""Which kernels run in which order, and what is kept for the backward pass.

Forward: prepare (chunk-parallel) -> scan (serial over chunks). Kept besides the inputs: the inverse and P of every
chunk, and per channel the keys and queries with the decay multiplied in. Backward: scan again for the states, reverse
scan, tail (chunk-parallel).

Few heads and long rows leave most of the GPU idle in the serial scans. Rows are then cut into segments: one scan finds
each segment's final state X from a zero state, another its transition M (the final state from the identity, without
values); `S' = M S + X` chained over the segments gives the exact state each of them starts from, and all segments run
at once. Backward the same chain runs transposed.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.ops.triton.chunk.gradients import chunk_gradients_kernel
from deltazoo.ops.triton.chunk.gradients_channel import chunk_gradients_channel_kernel
from deltazoo.ops.triton.chunk.gradients_exact import chunk_gradients_exact_kernel
from deltazoo.ops.triton.chunk.prepare import invert_kernel, prepare_kernel
from deltazoo.ops.triton.chunk.prepare_channel import prepare_channel_kernel
from deltazoo.ops.triton.chunk.scan import reverse_scan_kernel, scan_kernel
from deltazoo.ops.triton.chunk.segments import chain_kernel
from deltazoo.ops.triton.launch import launch
from deltazoo.ops.triton.plan import Plan, plan_for, sizes_of
from deltazoo.ops.triton.tiling import CHUNK, shared_memory

__all__ = ["Kept", "Problem", "backward", "forward"]


def chunk_table(cu_seqlens: Tensor | None, NT: int) -> tuple[Tensor | None, Tensor | None]:
    """The sequence of each of NT chunks, and the first chunk of each sequence, int32 (see `layout`).

    Built on the device, so that the host never waits for the entries of `cu_seqlens`.
    """
    if cu_seqlens is None:
        return None, None
    N = cu_seqlens.shape[0] - 1
    offsets = torch.zeros(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    torch.cumsum((cu_seqlens.diff() + (CHUNK - 1)) // CHUNK, 0, dtype=torch.int32, out=offsets[1:])
    chunks = torch.arange(NT, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets, chunks, right=True, out_int32=True) - 1
    return sequence.clamp_(max=N - 1), offsets


def in_pairs(x: Tensor) -> Tensor:
    """x contiguous, and from a multiple of four bytes on: the scans read 16-bit values in pairs."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 4 else x


@dataclass
class Prepared:
    """What `prepare` makes of the inputs, per chunk or per token; see the kernels."""

    AP: Tensor
    beta: Tensor | None
    G: Tensor | None
    """log2-decay: cumulative per chunk `[slots, C]`, or, per channel, over the whole chunk `[slots, K]`."""
    q_in: Tensor
    """Queries; per channel with the decay since the chunk's start."""
    k_in: Tensor
    """Keys, likewise."""
    k_out: Tensor
    """Keys; per channel with the decay to the chunk's end."""
    large_gain: Tensor | None
    """Where precision goes by the erase gain: which chunks need strict, int32 `[slots]`."""
    strong_decay: Tensor | None = None
    """Per channel: which chunks decay too far for one product, int32 `[slots]`."""


class Problem:
    """One call: its inputs made contiguous, and its plan, worked out unless given."""

    __slots__ = (
        "beta", "chunk_places", "initial_state", "k", "log_decay", "plan", "q", "sequence_places", "v",
    )  # fmt: skip

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, beta: Tensor | None, log_decay: Tensor | None, scale: float,
        initial_state: Tensor | None, cu_seqlens: Tensor | None, strict: bool | None,
        plan: Plan | None = None,
    ) -> None:  # fmt: skip
        if plan is None:
            sizes = sizes_of(q, v, beta, log_decay, cu_seqlens, strict)
            plan = plan_for(*sizes, scale, shared_memory(q.device))
        self.plan = plan
        self.q, self.k, self.v = q.contiguous(), k.contiguous(), in_pairs(v)
        self.beta = None if beta is None else beta.contiguous()
        self.log_decay = None if log_decay is None else log_decay.contiguous()
        self.initial_state = None if initial_state is None else initial_state.float().contiguous()
        sequence, offsets = chunk_table(cu_seqlens, plan.NT)
        self.chunk_places, self.sequence_places = (cu_seqlens, sequence, offsets), (cu_seqlens, offsets)
        """Where chunks and sequences lie; the kernels take it behind their other tensors."""

    def float32(self, *shape: int) -> Tensor:
        """Room for such a tensor."""
        return self.q.new_empty(*shape, dtype=torch.float32)


def prepare(p: Problem) -> Prepared:
    """The inverse and P of every chunk; per channel also the keys and queries with the chunk's decay multiplied in."""
    plan = p.plan
    AP = p.q.new_empty(plan.slots, plan.matrices, CHUNK, CHUNK)
    chunk_beta = None if p.beta is None else p.float32(plan.slots, CHUNK)
    large_gain = p.q.new_empty(plan.slots, dtype=torch.int32) if plan.by_gain else None
    # What strict chunks leave for their inverse; the memory is free again after this.
    strict_L = p.float32(plan.slots, CHUNK, CHUNK) if True in plan.parts else None
    if plan.decay < 2:
        G = p.float32(plan.slots, CHUNK) if plan.decay else None
        launch(
            prepare_kernel, plan.prepare(),
            p.q, p.k, p.beta, p.log_decay, AP, chunk_beta, G, large_gain, strict_L, *p.chunk_places,
        )  # fmt: skip
        x = Prepared(AP, chunk_beta, G, p.q, p.k, p.k, large_gain)
    else:
        G = p.float32(plan.slots, plan.K)
        q_in, k_in, k_out = (p.q.new_empty(plan.B, plan.T, plan.HV, plan.K) for _ in range(3))
        strong_decay = p.q.new_empty(plan.slots, dtype=torch.int32)
        for constants in plan.prepare_channel():
            launch(
                prepare_channel_kernel, constants,
                p.q, p.k, p.beta, p.log_decay, AP, chunk_beta, G, strong_decay, large_gain, strict_L, q_in, k_in, k_out,
                *p.chunk_places,
            )  # fmt: skip
        x = Prepared(AP, chunk_beta, G, q_in, k_in, k_out, large_gain, strong_decay)
    if strict_L is not None:
        launch(invert_kernel, plan.invert(), large_gain, strict_L, AP)
    return x


def scan(p: Problem, x: Prepared, initial_state: Tensor | None, keep: bool) -> tuple[Tensor, Tensor]:
    """Output and final states; with `keep` instead U and the states that enter the chunks."""
    plan, out = p.plan, torch.empty_like(p.v)
    states = p.v.new_empty(plan.slots, plan.V, plan.K) if keep else None
    final = None if keep and not plan.by_gain else p.float32(plan.scans, plan.HV, plan.K, plan.V)
    for strict in plan.parts:
        if strict and plan.by_gain:
            initial_state = final  # it goes on from where the other launch stopped
        launch(
            scan_kernel, plan.scan(initial_state is not None, keep, strict),
            x.q_in, x.k_in, x.k_out, p.v, x.beta, x.G, x.AP, x.large_gain, out, out, states, initial_state, final,
            *p.sequence_places,
        )  # fmt: skip
    return (out, final) if states is None else (out, states)  # type: ignore[return-value]


def scan_segments(p: Problem, x: Prepared) -> tuple[Tensor, Tensor]:
    """State that each segment starts from `[N * segments, HV, K, V]`, and its transition `[N * segments, HV, K, K]`."""

    plan = p.plan

    def run(V: int, v: Tensor | None) -> Tensor:
        final = p.float32(plan.scans, plan.HV, plan.K, V)
        for strict in plan.parts:
            launch(
                scan_kernel, plan.scan_segment(v is None, strict),
                x.q_in, x.k_in, x.k_out, v, x.beta, x.G, x.AP, x.large_gain, None, None, None,
                final if strict and plan.by_gain else None, final, *p.sequence_places,
            )  # fmt: skip
        return final

    added, transitions = run(plan.V, p.v), run(plan.K, None)
    return chain(p, transitions, added, p.initial_state, reverse=False), transitions


def chain(p: Problem, transitions: Tensor, added: Tensor, first: Tensor | None, reverse: bool) -> Tensor:
    """State that each segment starts from; in reverse the gradient of the state that it ends with."""
    states = torch.empty_like(added)
    launch(chain_kernel, p.plan.chain(reverse), transitions, added, first, states)
    return states


def reverse_scan(
    p: Problem, x: Prepared, d_output: Tensor, d_final: Tensor | None, keep: bool, initial: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Z and the gradients of the states that leave the chunks (`keep`), and those of the initial states (`initial`)."""
    plan = p.plan
    Z = torch.empty_like(d_output) if keep else None
    d_states = d_output.new_empty(plan.slots, plan.V, plan.K) if keep else None
    d_initial = p.float32(plan.scans, plan.HV, plan.K, plan.V) if initial or plan.by_gain else None
    for strict in reversed(plan.parts):
        launch(
            reverse_scan_kernel, plan.reverse_scan(d_final is not None, initial, keep, strict),
            x.q_in, x.k_in, x.k_out, x.beta, x.G, x.AP, x.large_gain, d_output, Z, d_states, d_final, d_initial,
            *p.sequence_places,
        )  # fmt: skip
    return Z, d_states, d_initial if initial else None


def reverse_scan_segments(
    p: Problem, x: Prepared, d_output: Tensor, d_final: Tensor | None, transitions: Tensor
) -> Tensor:
    """Gradient of the state that each segment ends with, `[N * segments, HV, K, V]`."""
    added = reverse_scan(p, x, d_output, None, keep=False, initial=True)[2]
    assert added is not None
    return chain(p, transitions, added, d_final, reverse=True)


def chunk_gradients(
    p: Problem, x: Prepared, U: Tensor, Z: Tensor | None, d_output: Tensor, states: Tensor, d_states: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k (both per value head), v, beta and log_decay."""
    plan = p.plan
    if plan.H == plan.HV:
        dq, dk = torch.empty_like(p.q), torch.empty_like(p.k)
    else:  # value heads that share a key head sum their dq and dk outside, in float32
        dq, dk = (p.float32(plan.B, plan.T, plan.HV, plan.K) for _ in range(2))
    dv = torch.empty_like(p.v)
    d_beta = None if p.beta is None else torch.empty_like(p.beta, dtype=torch.float32)
    d_log_decay = None if p.log_decay is None else torch.empty_like(p.log_decay, dtype=torch.float32)
    if plan.decay < 2:
        launch(
            chunk_gradients_kernel, plan.chunk_gradients(),
            p.q, p.k, p.v, x.beta, p.log_decay, x.G, x.large_gain, U, Z, d_output, states, d_states,
            dq, dk, dv, d_beta, d_log_decay, *p.chunk_places,
        )  # fmt: skip
        return dq, dk, dv, d_beta, d_log_decay
    tensors = (
        p.q, p.k, p.v, x.beta, p.log_decay, x.G, x.strong_decay, U, Z, d_output, states, d_states,
        p.float32(plan.slots, CHUNK), dq, dk, dv, d_beta, d_log_decay,
    )  # fmt: skip
    if plan.half:
        launch(chunk_gradients_channel_kernel, plan.chunk_gradients_channel(), *tensors, *p.chunk_places)
    for strong in (True,) if plan.half else (False, True):
        constants = plan.chunk_gradients_exact(strong)
        W = p.q.new_empty(constants.grid[0], 1 if p.beta is None else 2, CHUNK, CHUNK)
        launch(chunk_gradients_exact_kernel, constants, *tensors, W, *p.chunk_places)
    return dq, dk, dv, d_beta, d_log_decay


def forward(p: Problem) -> tuple[Tensor | None, ...]:
    """Output, final state, and the fields of `Kept`."""
    x, plan = prepare(p), p.plan
    decayed = (x.q_in, x.k_in, x.k_out, x.strong_decay) if plan.decay == 2 else (None, None, None, None)
    if plan.segments == 1:
        return *scan(p, x, p.initial_state, keep=False), x.AP, x.beta, x.G, x.large_gain, *decayed, None, None
    starts, transitions = scan_segments(p, x)
    output, final = scan(p, x, starts, keep=False)
    final = final.unflatten(0, (plan.N, plan.segments))[:, -1].contiguous()
    return output, final, x.AP, x.beta, x.G, x.large_gain, *decayed, starts, transitions


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass: what `prepare` made, and the states of segments."""

    AP: Tensor
    beta: Tensor | None
    G: Tensor | None
    large_gain: Tensor
    """Where precision goes by the erase gain, as in `Prepared`."""
    q_in: Tensor
    """As `k_in` and `k_out` only per channel: otherwise the inputs serve."""
    k_in: Tensor
    k_out: Tensor
    strong_decay: Tensor
    """Per channel, as in `Prepared`."""
    starts: Tensor
    """Of a row cut into segments: the state that each starts from."""
    transitions: Tensor


def backward(
    p: Problem, kept: Kept, d_output: Tensor, d_final: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, beta, log_decay and initial_state; None for those that were not given."""
    plan = p.plan
    d_output = in_pairs(d_output)
    d_final = None if d_final is None else d_final.float().contiguous()
    q_in, k_in, k_out = kept[4:7] if plan.decay == 2 else (p.q, p.k, p.k)
    large_gain = kept.large_gain if plan.by_gain else None
    x = Prepared(
        kept.AP, kept.beta, kept.G, q_in, k_in, k_out, large_gain, kept.strong_decay if plan.decay == 2 else None
    )
    starts = p.initial_state
    if plan.segments > 1:
        starts, d_final = kept.starts, reverse_scan_segments(p, x, d_output, d_final, kept.transitions)
    U, states = scan(p, x, starts, keep=True)
    Z, d_states, d_initial = reverse_scan(p, x, d_output, d_final, keep=True, initial=p.initial_state is not None)
    if d_initial is not None and plan.segments > 1:
        d_initial = d_initial.unflatten(0, (plan.N, plan.segments))[:, 0]
    dq, dk, dv, d_beta, d_log_decay = chunk_gradients(p, x, U, Z, d_output, states, d_states)
    if plan.H != plan.HV:
        dq, dk = (grad.unflatten(2, (plan.H, -1)).sum(3).to(p.q.dtype) for grad in (dq, dk))
    return dq, dk, dv, d_beta, d_log_decay, d_initial
