"""A call in the form that the kernels read: contiguous tensors and its plan, the tensors that the forward pass keeps
for the backward pass, and the memory that gradients take.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.triton.plan import Card, Plan, card_of, plan_for
from deltazoo.ops.triton.tiles import CHUNK


class Problem:
    """The tensors of a call, contiguous, and its plan.

    Args:
        whole_segments: see `Plan`.
    """

    __slots__ = (
        "beta", "chunk_offsets", "erase_key", "initial_state", "k", "log_decay", "plan", "q", "sequence_offsets", "v",
    )  # fmt: skip

    def __init__(self, call: RuleCall, whole_segments: int | None = None) -> None:
        self.q, self.k, self.v, beta, log_decay, _, initial_state, cu_seqlens, _, erase_key, _, steps = call
        self.plan = plan = plan_for(*sizes_of(call, card_of(self.q.device), whole_segments))
        self.q, self.k, self.v = contiguous(self.q, plan), contiguous(self.k, plan), contiguous(self.v, plan)
        self.beta = None if beta is None else beta.contiguous()
        self.log_decay = None if log_decay is None else log_decay.contiguous()
        self.erase_key = None if erase_key is None else contiguous(erase_key, plan)
        """The erase key; None: k."""
        self.initial_state = None if initial_state is None else initial_state.float().contiguous()
        self.chunk_offsets: tuple[Tensor | None, ...] = (None, None, None)
        self.sequence_offsets: tuple[Tensor | None, ...] = (None, None)
        """Chunk and sequence offsets, the last tensor arguments of the kernels per chunk and of the serial scans."""
        if cu_seqlens is not None:
            rows = cu_seqlens if steps == 1 else cu_seqlens * steps
            sequence, offsets = chunk_table(rows, plan.NT)
            self.chunk_offsets, self.sequence_offsets = (rows, sequence, offsets), (rows, offsets)

    def float32(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor of this shape."""
        return self.q.new_empty(*shape, dtype=torch.float32)


def sizes_of(call: RuleCall, card: Card, whole_segments: int | None) -> tuple[Any, ...]:
    """The arguments of `Plan`."""
    q, _, v, beta, log_decay, scale, _, cu_seqlens, strict, erase_key, undecayed, num_micro_steps = call
    decay = "none" if log_decay is None else "scalar" if log_decay.ndim == 3 else "channel"
    sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        q.shape, v.shape, q.dtype, decay, beta is not None, sequences, strict, erase_key is not None,
        undecayed and decay != "none", num_micro_steps, scale, card, whole_segments,
    )  # fmt: skip


def fake_plan(call: RuleCall, whole_segments: int | None = None) -> Plan:
    """The plan of a call with tensors without data, whose sizes may be symbolic."""
    return Plan(*sizes_of(call, card_of(call.q.device), whole_segments))


def contiguous(x: Tensor, plan: Plan) -> Tensor:
    """x contiguous, at a multiple of 16 bytes for the copy engine, or of 4 for reads of 16-bit values in pairs."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % (16 if plan.gluon else 4) else x


def chunk_table(cu_seqlens: Tensor, NT: int) -> tuple[Tensor, Tensor]:
    """The sequence of each of NT chunks, and the first chunk of each sequence, int32 (see `chunk.address`).

    The device builds it, so that the host never waits for the entries of `cu_seqlens`.
    """
    N = cu_seqlens.shape[0] - 1
    offsets = torch.zeros(N + 1, dtype=torch.int32, device=cu_seqlens.device)
    torch.cumsum((cu_seqlens.diff() + (CHUNK - 1)) // CHUNK, 0, dtype=torch.int32, out=offsets[1:])
    chunks = torch.arange(NT, dtype=torch.int32, device=cu_seqlens.device)
    sequence = torch.searchsorted(offsets, chunks, right=True, out_int32=True) - 1
    return sequence.clamp_(max=N - 1), offsets


class Kept(NamedTuple):
    """The tensors that the forward pass keeps besides the inputs; None for those that a call does not have or keep."""

    AP: Tensor | None = None
    """Transposed inverse and P of every chunk `[slots, 2, C, C]`, or without step sizes P `[slots, 1, C, C]`."""
    beta: Tensor | None = None
    """Step sizes `[slots, C]`."""
    G: Tensor | None = None
    """log2-decay: cumulative per chunk `[slots, C]`, or per channel over the whole chunk `[slots, K]`."""
    large_gain: Tensor | None = None
    """Flags of the chunks that need strict precision, int32 `[slots]`, if the erase gain decides."""
    q_in: Tensor | None = None
    """Queries times the decay since the chunk's start `[B, tokens, HV, K]`, if the decay is per channel."""
    k_in: Tensor | None = None
    """Erase keys times the decay since the chunk's start `[B, T, HV, K]`, if the decay is per channel."""
    k_out: Tensor | None = None
    """Keys times the decay to the chunk's end `[B, T, HV, K]`, if the decay is per channel."""
    strong_decay: Tensor | None = None
    """Flags of the chunks that decay beyond one matrix product, int32 `[slots]`, if the decay is per channel."""
    starts: Tensor | None = None
    """The first state of each segment `[N * segments, HV, K, V]`, if rows are cut into segments."""
    transitions: Tensor | None = None
    """The transition of each segment `[N * segments, HV, K, K]`, if rows are cut into segments."""
    U: Tensor | None = None
    """Corrections `[B, T, HV, V]`, if Gluon kernels scan and the backward pass shall not scan again."""
    states: Tensor | None = None
    """States that enter the chunks, under the same condition: `[slots, V, K]`, or, for the fused backward pass, `[2, B,
    NT * C, HV, K]`, half of their value channels in place of the tokens of a chunk, so that dq and dk can lie there."""

    @classmethod
    def empty(cls, plan: Plan, q: Tensor, keep: bool) -> "Kept":
        """Uninitialised kept tensors; with `keep` also those without which the backward pass would scan again."""
        # Sizes are passed one by one: a tuple costs the host half a microsecond more per tensor.
        new, slots, float32, int32 = q.new_empty, plan.slots, torch.float32, torch.int32
        AP = new(slots, plan.matrices, CHUNK, CHUNK)
        beta = new(slots, CHUNK, dtype=float32) if plan.has_beta else None
        G = new(slots, plan.K if plan.per_channel else CHUNK, dtype=float32) if plan.decay != "none" else None
        large_gain = new(slots, dtype=int32) if plan.by_gain else None
        q_in = k_in = k_out = strong_decay = starts = transitions = None
        if plan.per_channel:
            q_in = new(plan.B, plan.tokens, plan.HV, plan.K)
            k_in, k_out = (new(plan.B, plan.T, plan.HV, plan.K) for _ in range(2))
            strong_decay = new(slots, dtype=int32)
        if plan.segments > 1:
            starts, transitions = (new(plan.scans, plan.HV, plan.K, x, dtype=float32) for x in (plan.V, plan.K))
        U = states = None
        if keep and plan.route.keeps == "states":
            U, states = new_states(plan, q)
        return cls(AP, beta, G, large_gain, q_in, k_in, k_out, strong_decay, starts, transitions, U, states)

    def scanned(self, p: Problem) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        """The tensors that both scans read: `q_in`, `k_in` and `k_out`; `beta`, `G`, `AP` and `large_gain`.

        Without decay per channel the queries and keys are those of the inputs, and `k_in` the erase keys.
        """
        keys = (self.q_in, self.k_in, self.k_out)
        if self.q_in is None:
            keys = (p.q, p.k if p.erase_key is None else p.erase_key, p.k)
        return keys, (self.beta, self.G, self.AP, self.large_gain)


def new_kept(plan: Plan, q: Tensor, keep: bool) -> Kept:
    """Uninitialised kept tensors of a recorded forward pass; with `keep` the backward pass does not scan again."""
    return Kept() if not keep and plan.route.keeps_to_scan_again == "inputs" else Kept.empty(plan, q, keep)


def new_states(plan: Plan, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised corrections U, and states that enter the chunks, in the form that the backward kernels read."""
    U = v.new_empty(plan.B, plan.T, plan.HV, plan.V)
    if plan.fused_backward:
        return U, v.new_empty(2, plan.B, plan.NT * CHUNK, plan.HV, plan.K)
    return U, v.new_empty(plan.slots, plan.V, plan.K)


StateGradients = tuple[Tensor | None, Tensor | None]
"""Gradients of the states that leave the chunks: `[slots, V, K]` and None; or two `[B, T, HV, K]`, those of the lower
and of the upper half of the value channels, which take the place of the tokens of a chunk."""


def new_state_gradients(p: Problem, kept: Kept, in_place: bool) -> StateGradients:
    """Uninitialised gradients; with `in_place` in the memory of the queries and keys of the reverse scan, if possible.

    This is possible if chunks are full, only one program of the reverse scan reads these queries and keys, and the
    Gluon kernels read the gradients. With erase keys they have no registers for the addresses.
    """
    plan = p.plan
    possible = in_place and plan.T % CHUNK == 0 and not plan.has_erase_key and plan.route.gradients == "gluon"
    if possible and plan.one_program_per_head:
        assert kept.q_in is not None and kept.k_in is not None
        return kept.q_in, kept.k_in
    return p.q.new_empty(plan.slots, plan.V, plan.K), None


Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]
"""Gradients of q, k and erase_key (all per value head), v, beta and log_decay."""


def empty_gradients(
    p: Problem, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None
) -> Gradients:
    """Uninitialised gradients, except those that have memory already."""
    plan = p.plan
    if plan.grouped:  # value heads that share a key head sum their gradients outside, in float32
        dq, dk = (p.float32(plan.B, x, plan.HV, plan.K) for x in (plan.tokens, plan.T))
    dq = torch.empty_like(p.q) if dq is None else dq
    dk = torch.empty_like(p.k) if dk is None else dk
    dv = torch.empty_like(p.v) if dv is None else dv
    de = None if p.erase_key is None else torch.empty_like(dk)
    return dq, dk, de, dv, *empty_gate_gradients(p)


def gradients_in_place(p: Problem, kept: Kept, dv: Tensor | None, d_states: StateGradients) -> Gradients:
    """Uninitialised gradients, but for dv, in the memory of tensors that the scans read, of which others are freed.

    The scans, which have been launched, were the last to read these, so dq, dk and dv may lie in any of them. If the
    Gluon kernels compute the gradients, dq and dk may lie in the memory of the gradients of the states; these kernels
    say why that is safe.
    """
    plan = p.plan
    dq, dk = (None, None) if plan.grouped else (kept.q_in, kept.k_in)
    if dv is None and plan.K == plan.V:
        dv = kept.k_out
    free((kept.AP, kept.q_in, kept.k_in, kept.k_out), (dq, dk, dv, *d_states))
    return empty_gradients(p, dq, dk, dv)


def free(tensors: tuple[Tensor | None, ...], used: tuple[Tensor | None, ...]) -> None:
    """Free the memory of tensors that autograd still holds, except those that are used."""
    needed = set(map(id, used))
    for x in tensors:
        if x is not None and id(x) not in needed:
            storage = x.untyped_storage()
            if storage.resizable():  # a hook for saved tensors may have replaced it
                storage.resize_(0)


def empty_gate_gradients(p: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Uninitialised gradients of beta and log_decay."""
    d_beta = None if p.beta is None else torch.empty_like(p.beta, dtype=torch.float32)
    d_log_decay = None if p.log_decay is None else torch.empty_like(p.log_decay, dtype=torch.float32)
    return d_beta, d_log_decay


def fused_gradients(p: Problem, U: Tensor, states: Tensor, in_place: bool) -> Gradients:
    """Uninitialised gradients of the fused backward pass, all per value head.

    With `in_place` dv lies in the memory of U, and dq and dk in that of the states, if chunks are full.
    """
    plan = p.plan
    dv = U if in_place else torch.empty_like(U)
    if in_place and plan.T % CHUNK == 0:
        dq, dk = states.unbind()
    else:
        dq, dk = (p.q.new_empty(plan.B, plan.T, plan.HV, plan.K) for _ in range(2))
    return dq, dk, None, dv, *empty_gate_gradients(p)
