"""Which kernels run in which order, and what is kept for the backward pass.

Forward: prepare (chunk-parallel) -> scan (serial over chunks). Backward: scan again for the states, reverse scan, chunk
gradients (chunk-parallel). Many heads on Hopper take one kernel for the whole forward pass (`fused_forward`), and one
for all gradients (`fused_gradients`). Where Gluon kernels scan, the forward pass keeps the states, unless it is told
not to: then the backward pass scans again, or the whole fused forward pass runs again (`keeps_nothing`).

Few heads and long rows leave most of the GPU idle in the serial scans. Rows are then cut into segments: one scan finds
each segment's final state X from a zero state, another its transition M (the final state from the identity, without
values). `S' = M S + X`, chained over the segments, gives the exact state that each of them starts from, and all
segments run at once. Backward the same chain runs transposed.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from deltazoo.ops.call import RuleCall
from deltazoo.ops.triton.chunk.gradients import chunk_gradients_kernel
from deltazoo.ops.triton.chunk.gradients_channel import chunk_gradients_channel_kernel
from deltazoo.ops.triton.chunk.gradients_exact import chunk_gradients_exact_kernel
from deltazoo.ops.triton.chunk.gradients_strong import chunk_gradients_strong_kernel
from deltazoo.ops.triton.chunk.inverse import invert_kernel
from deltazoo.ops.triton.chunk.prepare import prepare_kernel, prepare_rest_kernel
from deltazoo.ops.triton.chunk.prepare_channel import prepare_channel_kernel
from deltazoo.ops.triton.chunk.scan import reverse_scan_kernel, scan_kernel
from deltazoo.ops.triton.chunk.segments import chain_kernel
from deltazoo.ops.triton.hopper.backward_rest import (
    log_decay_gradient_kernel,
    small_steps_kernel,
    sum_of_groups_kernel,
    tiny_steps_kernel,
)  # fmt: skip
from deltazoo.ops.triton.hopper.copied_tiles import matrix_tiles, token_tiles
from deltazoo.ops.triton.hopper.gluon import MISSING, available
from deltazoo.ops.triton.hopper.served_calls import channel_gradients_refusal, forward_refusal, multiprocessors
from deltazoo.ops.triton.launch import Tile, launch
from deltazoo.ops.triton.plan import FROM_IDENTITY, FROM_STATE, FROM_ZERO, Plan, plan_for, sizes_of
from deltazoo.ops.triton.tiling import CHUNK, HOPPER, shared_memory

if MISSING is None:
    from deltazoo.ops.triton.hopper.backward import backward_kernel
    from deltazoo.ops.triton.hopper.hopper_forward import hopper_forward_kernel
    from deltazoo.ops.triton.hopper.hopper_gradients_channel import hopper_chunk_gradients_channel_kernel
    from deltazoo.ops.triton.hopper.hopper_gradients_strong import hopper_chunk_gradients_strong_kernel
    from deltazoo.ops.triton.hopper.hopper_reverse_scan import hopper_reverse_scan_kernel
    from deltazoo.ops.triton.hopper.hopper_scan import hopper_scan_kernel

__all__ = ["Kept", "Problem", "backward", "fake_plan", "forward", "infer"]


class Problem:
    """Inputs of one call, contiguous, and its plan."""

    __slots__ = (
        "alignment", "beta", "chunk_offsets", "erase_key", "initial_state", "k", "log_decay", "plan", "q",
        "sequence_offsets", "v",
    )  # fmt: skip

    def __init__(self, call: RuleCall, whole_segments: int | None = None) -> None:
        q, k, v, beta, log_decay, scale, initial_state, cu_seqlens, _, erase_key, _, num_micro_steps = call
        sizes = sizes_of(call)
        self.plan = plan = plan_for(*sizes, scale, shared_memory(q.device), available(q.device), whole_segments)
        self.alignment = alignment = 16 if plan.hopper else 4
        self.q, self.k, self.v = (contiguous(x, alignment) for x in (q, k, v))
        self.beta = None if beta is None else beta.contiguous()
        self.log_decay = None if log_decay is None else log_decay.contiguous()
        self.erase_key = None if erase_key is None else contiguous(erase_key, alignment)
        """None: the key."""
        self.initial_state = None if initial_state is None else initial_state.float().contiguous()
        if cu_seqlens is not None and num_micro_steps > 1:
            cu_seqlens = cu_seqlens * num_micro_steps
        sequence, offsets = chunk_table(cu_seqlens, plan.NT)
        self.chunk_offsets, self.sequence_offsets = (cu_seqlens, sequence, offsets), (cu_seqlens, offsets)
        """Chunk and sequence offsets, the last tensors of the kernels per chunk and of the serial scans."""

    def float32(self, *shape: int) -> Tensor:
        """An uninitialised float32 tensor of this shape."""
        return self.q.new_empty(*shape, dtype=torch.float32)


def fake_plan(call: RuleCall, whole_segments: int | None = None) -> Plan:
    """The plan of a call with tensors without data. It launches nothing, so the shared memory does not matter."""
    return Plan(*sizes_of(call), call.scale, HOPPER, available(call.q.device), whole_segments)


def new_states(plan: Plan, v: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised corrections U, and states that enter the chunks, as the kernels of the backward pass read them."""
    by_token, by_chunk = (2, plan.B, plan.NT * CHUNK, plan.HV, plan.K), (plan.slots, plan.V, plan.K)
    return v.new_empty(plan.B, plan.T, plan.HV, plan.V), v.new_empty(by_token if plan.fused_backward else by_chunk)


def by_token(states: Tensor | None) -> bool:
    """Whether states lie as the fused backward reads them."""
    return states is not None and states.ndim == 5


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass besides the inputs; None where a call has no such tensor."""

    AP: Tensor
    """Of every chunk the transposed inverse and P `[slots, 2, C, C]`, or without step sizes P `[slots, 1, C, C]`; empty
    if nothing is kept."""
    beta: Tensor | None = None
    """Step sizes `[slots, C]`."""
    G: Tensor | None = None
    """log2-decay: cumulative per chunk `[slots, C]`, or, per channel, over the whole chunk `[slots, K]`."""
    large_gain: Tensor | None = None
    """Where precision goes by the erase gain: which chunks need strict, int32 `[slots]`."""
    q_in: Tensor | None = None
    """Per channel: queries with the decay since the chunk's start `[B, tokens, HV, K]`. Otherwise the inputs serve."""
    k_in: Tensor | None = None
    """Per channel: erase keys with the decay since the chunk's start `[B, T, HV, K]`."""
    k_out: Tensor | None = None
    """Per channel: keys with the decay to the chunk's end, likewise."""
    strong_decay: Tensor | None = None
    """Per channel: which chunks decay beyond one matrix product, int32 `[slots]`."""
    starts: Tensor | None = None
    """Of rows cut into segments: the state that each segment starts from `[N * segments, HV, K, V]`."""
    transitions: Tensor | None = None
    """Of rows cut into segments: the transition of each segment `[N * segments, HV, K, K]`."""
    U: Tensor | None = None
    """Where Gluon kernels scan, and the backward pass is not to scan again: the corrections `[B, T, HV, V]`."""
    states: Tensor | None = None
    """The states that enter the chunks, likewise: `[slots, V, K]`, or, where the fused backward serves, `[2, B, NT * C,
    HV, K]`, half of their value channels in place of the tokens of a chunk, so that dq and dk can lie there."""

    @classmethod
    def empty(cls, plan: Plan, q: Tensor, keep: bool) -> "Kept":
        """Uninitialised tensors; with `keep` also those without which the backward pass would scan again."""
        # Sizes one by one: as a tuple they cost the host half a microsecond more per tensor.
        new, slots, float32, int32 = q.new_empty, plan.slots, torch.float32, torch.int32
        AP = new(slots, plan.matrices, CHUNK, CHUNK)
        beta = new(slots, CHUNK, dtype=float32) if plan.has_beta else None
        G = new(slots, plan.K if plan.per_channel else CHUNK, dtype=float32) if plan.decay else None
        large_gain = new(slots, dtype=int32) if plan.by_gain else None
        q_in = k_in = k_out = strong_decay = starts = transitions = None
        if plan.per_channel:
            q_in = new(plan.B, plan.tokens, plan.HV, plan.K)
            k_in, k_out = (new(plan.B, plan.T, plan.HV, plan.K) for _ in range(2))
            strong_decay = new(slots, dtype=int32)
        if plan.segments > 1:
            starts, transitions = (new(plan.scans, plan.HV, plan.K, x, dtype=float32) for x in (plan.V, plan.K))
        U = states = None
        if keep and plan.keeps_states:
            U, states = new_states(plan, q)
        return cls(AP, beta, G, large_gain, q_in, k_in, k_out, strong_decay, starts, transitions, U, states)

    def of_plan(self, plan: Plan, keep: bool) -> "Kept":
        """The same with None for absent tensors, in place of the empty ones that an operator returns for them."""
        if self.q_in is None or self.starts is None:  # an eager call: it has no such placeholders
            return self
        cut, scanned = plan.segments > 1, keep and plan.keeps_states
        present = (*prepared_fields(plan), *[cut] * 2, *[scanned] * 2)
        return Kept(*(x if here else None for x, here in zip(self, present, strict=True)))  # type: ignore[arg-type]


def prepared_fields(plan: Plan) -> tuple[bool, ...]:
    """Which of the first fields of `Kept`, those that `prepare` fills, calls of a plan have."""
    return True, plan.has_beta, plan.decay > 0, plan.by_gain, *[plan.per_channel] * 4


def forward(p: Problem, keep: bool = True) -> tuple[Tensor, Tensor, Kept]:
    """Output, final state, and what the backward pass needs; with `keep` so that it need not scan again."""
    plan, kept = p.plan, new_kept(p.plan, p.q, keep)
    if not keep and keeps_nothing(plan, p.q):
        return *infer(p), kept
    if keep and plan.fused_backward and serves_forward(plan, p.q):
        return *fused_forward(p, kept), kept
    return *several_kernels(p, kept), kept


def infer(p: Problem) -> tuple[Tensor, Tensor]:
    """Output and final state, where nothing has to be kept for gradients: in one kernel, if it serves the call."""
    if serves_forward(p.plan, p.q):
        return fused_forward(p, None)
    return several_kernels(p, Kept.empty(p.plan, p.q, keep=False))


def several_kernels(p: Problem, kept: Kept) -> tuple[Tensor, Tensor]:
    """Output and final state by a preparation and scans, which fill what is kept."""
    plan = p.plan
    prepare(p, kept)
    starts = p.initial_state if plan.segments == 1 else segment_starts(p, kept)
    output = p.v.new_empty(plan.B, plan.tokens, plan.HV, plan.V)
    final = p.float32(plan.scans, plan.HV, plan.K, plan.V)
    scan(p, kept, p.v, starts, final, output, kept.U, kept.states)
    if plan.segments > 1:
        final = final.unflatten(0, (plan.N, plan.segments))[:, -1].contiguous()
    return output, final


def fused_forward(p: Problem, kept: Kept | None) -> tuple[Tensor, Tensor]:
    """Output and final state in one kernel, which fills what is `kept` if a backward pass follows.

    It stops a head at its first chunk with a large erase gain, or with a decay per channel beyond its range, with the
    state so far in `final` and the number of the chunk in `stopped`. Other kernels complete these heads. Where none
    stopped they return at once, so that the host need not know.
    """
    plan, v = p.plan, p.v
    filled: tuple[Tile | Tensor | None, ...] = (None,) * 5
    if kept is not None:
        assert kept.U is not None and kept.states is not None
        U, states, AP = token_tiles(kept.U, plan.V // 2), states_tiles(kept.states, plan), matrix_tiles(kept.AP, CHUNK)
        filled = U, states, AP, kept.beta, kept.G
    output, final = torch.empty_like(v), p.float32(plan.B, plan.HV, plan.K, plan.V)
    stopped = v.new_empty(plan.B, plan.HV, dtype=torch.int32) if plan.by_gain or plan.per_channel else None
    log_decay: Tile | Tensor | None = p.log_decay
    if plan.per_channel:
        assert p.log_decay is not None
        gates = p.log_decay if p.log_decay.itemsize < 8 else p.log_decay.float()
        log_decay = token_tiles(contiguous(gates, p.alignment), plan.K)
    launch(
        hopper_forward_kernel, plan.fused_forward(p.initial_state is not None, kept is not None),
        *(token_tiles(x, plan.K) for x in (p.q, p.k)), *(token_tiles(x, plan.V // 2) for x in (v, output)),
        p.beta, log_decay, p.initial_state, final, stopped, *filled,
    )  # fmt: skip
    if stopped is not None:
        complete(p, Kept.empty(p.plan, p.q, keep=False) if kept is None else kept, stopped, output, final)
    return output, final


def serves_forward(plan: Plan, q: Tensor) -> bool:
    """Whether the fused forward pass serves a call."""
    return plan.hopper and forward_refusal(plan, q.dtype, multiprocessors(q.device)) is None


def keeps_nothing(plan: Plan, q: Tensor) -> bool:
    """Whether a forward pass keeps nothing but the inputs if the backward pass is to scan again.

    Running the fused forward pass twice costs less than a preparation and two scans, by the times of these parts. Not
    so where chunks may have large gains: those are prepared by kernels of their own, which would run twice. With a
    decay per channel the preparation runs twice: it makes four times as much as its inputs' values to keep.
    """
    return plan.per_channel or (plan.fused_backward and not plan.by_gain and serves_forward(plan, q))


def new_kept(plan: Plan, q: Tensor, keep: bool) -> Kept:
    """Uninitialised, what `forward` returns."""
    return Kept(q.new_empty(0)) if not keep and keeps_nothing(plan, q) else Kept.empty(plan, q, keep)


def complete(p: Problem, kept: Kept, stopped: Tensor, output: Tensor, final: Tensor) -> None:
    """The chunks that the fused forward pass left, from the states in `final`; strict, but with a decay per channel."""
    plan = p.plan
    if plan.per_channel:
        prepare(p, kept, stopped)
        scan(p, kept, p.v, final, final, output, stopped=stopped)
        return
    # With heads of 128 the rows of L are as long as those of the states, which the last launch stores over them.
    strict_L = p.float32(plan.slots, CHUNK, CHUNK) if kept.states is None else kept.states[0].view(torch.float32)
    launch(
        prepare_rest_kernel, plan.prepare_rest(),
        p.q, p.k, p.beta, p.log_decay, stopped, kept.AP, kept.beta, kept.G, kept.large_gain, strict_L,
    )  # fmt: skip
    launch(invert_kernel, plan.invert(), kept.large_gain, strict_L, kept.AP)
    launch_scan(p, kept, FROM_STATE, p.v, final, final, output, kept.U, kept.states, strict=True)


def backward(
    p: Problem, kept: Kept, d_output: Tensor, d_final: Tensor | None, keep: bool = True, in_place: bool = False
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, erase_key, v, beta, log_decay and initial_state; None for those that were not given.

    `keep` is that of the forward pass. With `in_place` what was kept is no longer needed: gradients may lie in its
    memory, and what nothing reads any more is freed.
    """
    plan = p.plan
    if not keep and keeps_nothing(plan, p.q):
        kept, keep = (prepared_again(p), False) if plan.per_channel else (forward(p)[2], True)
    kept = kept.of_plan(plan, keep)
    d_output = contiguous(d_output, p.alignment)
    d_final = None if d_final is None else d_final.float().contiguous()
    starts = p.initial_state
    if plan.segments > 1:
        starts, d_final = kept.starts, segment_end_gradients(p, kept, d_output, d_final)
    if kept.U is None or kept.states is None:
        U, states = scan_for_states(p, kept, starts)
    else:
        U, states = kept.U, kept.states
    if by_token(states):
        gradients, d_initial = fused_gradients(p, kept, U, states, starts, d_output, d_final, in_place)
    else:
        Z, d_states, d_initial = reverse_scan(
            p, kept, d_output, d_final, keep=True, initial=p.initial_state is not None, in_place=in_place
        )  # fmt: skip
        gradients = gradients_in_place(p, kept, Z, d_states) if in_place else empty_gradients(p)
        chunk_gradients(p, kept, U, Z, d_output, states, d_states, gradients)
        if in_place:  # sums over heads and copies in other dtypes may follow
            free((U, Z, states, *(d_states or ())), gradients)
        if plan.grouped:
            dq, dk, de, dv, d_beta, d_log_decay = gradients
            dq, dk = (sum_of_group(x, p.q) for x in (dq, dk))
            gradients = dq, dk, None if de is None else sum_of_group(de, p.q), dv, d_beta, d_log_decay
    if d_initial is not None and plan.segments > 1:
        d_initial = d_initial.unflatten(0, (plan.N, plan.segments))[:, 0]
    return *gradients, d_initial


def prepare(p: Problem, kept: Kept, stopped: Tensor | None = None) -> None:
    """Fill what is kept of every chunk; per channel of those from `stopped` on, if given, a number for each head."""
    plan = p.plan
    AP, beta, G, large_gain, q_in, k_in, k_out, strong_decay, *_ = kept
    # L of strict chunks, from which the last launch makes their inverse. The memory is free again after that.
    strict_L = p.float32(plan.slots, CHUNK, CHUNK) if True in plan.scan_modes else None
    if plan.per_channel:
        for constants in plan.prepare_channel():
            launch(
                prepare_channel_kernel, constants,
                p.q, p.k, p.erase_key, p.beta, p.log_decay, stopped, AP, beta, G, strong_decay, large_gain, strict_L,
                q_in, k_in, k_out, *p.chunk_offsets,
            )  # fmt: skip
    else:
        launch(
            prepare_kernel, plan.prepare(),
            p.q, p.k, p.erase_key, p.beta, p.log_decay, AP, beta, G, large_gain, strict_L, *p.chunk_offsets,
        )  # fmt: skip
    if strict_L is not None:
        launch(invert_kernel, plan.invert(), large_gain, strict_L, AP)


def scan(
    p: Problem, kept: Kept, v: Tensor | None, initial: Tensor | None, final: Tensor | None,
    output: Tensor | None = None, U: Tensor | None = None, states: Tensor | None = None,
    stopped: Tensor | None = None,
) -> None:  # fmt: skip
    """The scan from the states `initial` (None: zero), or without values from the identity.

    Fills `final` and, if given, `output`, the corrections U and the states that enter the chunks. If it keeps `states`
    without `output`, it fills `final` only where a strict launch begins. `stopped`, for Gluon kernels, has the number
    of the chunk that each head begins at.
    """
    plan = p.plan
    start = FROM_IDENTITY if v is None else FROM_ZERO if initial is None else FROM_STATE
    for strict in plan.scan_modes:
        if strict and plan.by_gain:  # this launch continues where the other one stopped
            start, initial, stopped = FROM_STATE, final, None
        launch_scan(p, kept, start, v, initial, final, output, U, states, strict, stopped)


def launch_scan(
    p: Problem, kept: Kept, start: int, v: Tensor | None, initial: Tensor | None, final: Tensor | None,
    output: Tensor | None, U: Tensor | None, states: Tensor | None, strict: bool, stopped: Tensor | None = None,
) -> None:  # fmt: skip
    """One launch of `scan`; `start` says what it starts from, as of `Plan.scan`."""
    plan, (keys, chunks) = p.plan, scanned(p, kept)
    if plan.hopper:
        hopper_scan(plan, start, keys, v, chunks, initial, final, output, U, states, strict, stopped)
        return
    constants = plan.scan(start, v is not None, output is not None, states is not None, strict, by_token(states))
    # The kernel ignores the one of output and U that it does not fill; each stands in for the other.
    launch(
        scan_kernel, constants,
        *keys, v, *chunks, U if output is None else output, output if U is None else U, states, initial, final,
        *p.sequence_offsets,
    )  # fmt: skip


def hopper_scan(
    plan: Plan, start: int, keys: tuple[Tensor | None, ...], v: Tensor | None, chunks: tuple[Tensor | None, ...],
    initial: Tensor | None, final: Tensor | None, output: Tensor | None, U: Tensor | None, states: Tensor | None,
    strict: bool, stopped: Tensor | None,
) -> None:  # fmt: skip
    """`launch_scan` in Gluon."""
    q_in, k_in, k_out = keys
    beta, G, AP, large_gain = chunks
    assert q_in is not None and k_in is not None and k_out is not None and AP is not None
    keep = states is not None
    with_output = output is not None
    launch(
        hopper_scan_kernel,
        plan.hopper_scan(start, v is not None, with_output, keep, strict, by_token(states)),
        token_tiles(q_in, plan.K) if with_output else None,
        token_tiles(k_in, plan.K),
        token_tiles(k_out, plan.K) if plan.separate else None,
        None if v is None else token_tiles(v, plan.V // 2),
        matrix_tiles(AP, 2 * CHUNK if with_output else CHUNK),
        None if output is None else token_tiles(output, plan.V // 2),
        None if U is None else token_tiles(U, plan.V // 2),
        None if states is None else states_tiles(states, plan),
        beta, G, large_gain, stopped, initial, final,
    )  # fmt: skip


def states_tiles(states: Tensor, plan: Plan) -> Tile:
    """Tiles of half of the value channels of the kept states."""
    return token_tiles(states.flatten(0, 1), plan.K) if by_token(states) else matrix_tiles(states, plan.V // 2)


def scanned(p: Problem, kept: Kept) -> tuple[tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """The tensors that both scans read: `q_in`, `k_in` and `k_out`; `beta`, `G`, `AP` and `large_gain` of the chunks.

    Without decay per channel the queries and keys are those of the inputs, and `k_in` the erase keys.
    """
    AP, beta, G, large_gain, q_in, k_in, k_out, *_ = kept
    keys = (p.q, p.k if p.erase_key is None else p.erase_key, p.k) if q_in is None else (q_in, k_in, k_out)
    return keys, (beta, G, AP, large_gain)


def segment_starts(p: Problem, kept: Kept) -> Tensor:
    """Fill the segments' transitions and the state that each segment starts from; returns these states."""
    assert kept.starts is not None and kept.transitions is not None
    added = torch.empty_like(kept.starts)
    scan(p, kept, p.v, None, added)
    scan(p, kept, None, None, kept.transitions)
    launch(chain_kernel, p.plan.chain(False), kept.transitions, added, p.initial_state, kept.starts)
    return kept.starts


def segment_end_gradients(p: Problem, kept: Kept, d_output: Tensor, d_final: Tensor | None) -> Tensor:
    """Gradient of the state that each segment ends with, `[N * segments, HV, K, V]`."""
    added = reverse_scan(p, kept, d_output, None, keep=False, initial=True)[2]
    assert added is not None
    gradients = torch.empty_like(added)
    launch(chain_kernel, p.plan.chain(True), kept.transitions, added, d_final, gradients)
    return gradients


def prepared_again(p: Problem) -> Kept:
    """What a forward pass that kept it would have left, without corrections and states."""
    kept = Kept.empty(p.plan, p.q, keep=False)
    prepare(p, kept)
    if p.plan.segments > 1:
        segment_starts(p, kept)
    return kept


def scan_for_states(p: Problem, kept: Kept, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """The corrections U, and the states that enter the chunks."""
    plan = p.plan
    U, states = new_states(plan, p.v)
    # Where the fast launch leaves its state for the strict one.
    final = p.float32(plan.scans, plan.HV, plan.K, plan.V) if plan.by_gain else None
    scan(p, kept, p.v, initial, final, None, U, states)
    return U, states


StateGradients = tuple[Tensor, Tensor | None]
"""Gradients of the states that leave the chunks, `[slots, V, K]` and None; or `[B, T, HV, K]` twice, those of the lower
and of the upper half of the value channels, which take the place of the tokens of a chunk."""


def new_state_gradients(p: Problem, kept: Kept, in_place: bool) -> StateGradients:
    """Uninitialised; with `in_place` in the memory of the queries and keys that the reverse scan reads, if possible.

    It is if chunks are full, only one program of the reverse scan reads these queries and keys, and the Gluon kernels
    read the gradients. With erase keys, they have no registers for the addresses.
    """
    plan = p.plan
    possible = in_place and plan.T % CHUNK == 0 and not plan.has_erase_key and gradients_on_hopper(p)
    if possible and plan.one_program_per_head:
        assert kept.q_in is not None and kept.k_in is not None
        return kept.q_in, kept.k_in
    return p.q.new_empty(plan.slots, plan.V, plan.K), None


def reverse_scan(
    p: Problem, kept: Kept, d_output: Tensor, d_final: Tensor | None, keep: bool, initial: bool, in_place: bool = False
) -> tuple[Tensor | None, StateGradients | None, Tensor | None]:
    """Z and the gradients of the states that leave the chunks (`keep`), and those of the initial states (`initial`).

    With `in_place` gradients of states may lie in the memory of what is kept.
    """
    plan = p.plan
    Z = torch.empty_like(p.v) if keep else None
    d_states = new_state_gradients(p, kept, in_place) if keep else None
    d_initial = p.float32(plan.scans, plan.HV, plan.K, plan.V) if initial or plan.by_gain else None
    keys, chunks = scanned(p, kept)
    for strict in reversed(plan.scan_modes):
        if plan.hopper and not strict:
            hopper_reverse_scan(plan, keys, chunks, d_output, Z, d_states, d_final, d_initial, initial)
            continue
        launch(
            reverse_scan_kernel, plan.reverse_scan(d_final is not None, initial, keep, strict),
            *keys, *chunks, d_output, Z, *(d_states or (None, None)), d_final, d_initial, *p.sequence_offsets,
        )  # fmt: skip
    return Z, d_states, d_initial if initial else None


def hopper_reverse_scan(
    plan: Plan, keys: tuple[Tensor | None, ...], chunks: tuple[Tensor | None, ...], d_output: Tensor,
    Z: Tensor | None, d_states: StateGradients | None, d_final: Tensor | None, d_initial: Tensor | None, initial: bool,
) -> None:  # fmt: skip
    """The launch of `reverse_scan` that is not strict, in Gluon."""
    q_in, k_in, k_out = keys
    beta, G, AP, large_gain = chunks
    assert q_in is not None and k_in is not None and k_out is not None and AP is not None
    low, high = d_states or (None, None)
    low_tiles, high_tiles = None if low is None else matrix_tiles(low, plan.V // 2), None
    if low is not None and high is not None:
        low_tiles, high_tiles = token_tiles(low, plan.K), token_tiles(high, plan.K)
    launch(
        hopper_reverse_scan_kernel,
        plan.hopper_reverse_scan(d_final is not None, initial, low is not None, high is not None),
        token_tiles(q_in, plan.K),
        token_tiles(k_in, plan.K) if plan.separate else None,
        token_tiles(k_out, plan.K),
        token_tiles(d_output, plan.V // 2),
        matrix_tiles(AP, 2 * CHUNK),
        None if Z is None else token_tiles(Z, plan.V // 2),
        low_tiles, high_tiles,
        beta, G, large_gain, d_final, d_initial,
    )  # fmt: skip


Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]
"""Of q, k and erase_key (all per value head), v, beta and log_decay."""


def empty_gradients(
    p: Problem, dq: Tensor | None = None, dk: Tensor | None = None, dv: Tensor | None = None
) -> Gradients:
    """Uninitialised, but for those that have memory already."""
    plan = p.plan
    if plan.grouped:  # value heads that share a key head sum their gradients outside, in float32
        dq, dk = (p.float32(plan.B, x, plan.HV, plan.K) for x in (plan.tokens, plan.T))
    dq = torch.empty_like(p.q) if dq is None else dq
    dk = torch.empty_like(p.k) if dk is None else dk
    dv = torch.empty_like(p.v) if dv is None else dv
    de = None if p.erase_key is None else torch.empty_like(dk)
    return dq, dk, de, dv, *empty_gate_gradients(p)


def gradients_in_place(p: Problem, kept: Kept, Z: Tensor | None, d_states: StateGradients | None) -> Gradients:
    """Uninitialised, in the memory of what was kept for the scans or of Z; frees what else was kept for the scans.

    The scans, which have been launched, were the last to read it, so dq, dk and dv may lie in any of it. If the Gluon
    kernels make the gradients, dv lies in the memory of Z, and that of dq and dk may have the gradients of the states:
    these kernels say why that is safe. Plain kernels read Z anew for every tile of key channels.
    """
    plan = p.plan
    dq, dk = (None, None) if plan.grouped else (kept.q_in, kept.k_in)
    dv = Z if gradients_on_hopper(p) else kept.k_out if plan.K == plan.V else None
    free((kept.AP, kept.q_in, kept.k_in, kept.k_out), (dq, dk, dv, *(d_states or ())))
    return empty_gradients(p, dq, dk, dv)


def free(tensors: tuple[Tensor | None, ...], used: tuple[Tensor | None, ...]) -> None:
    """Give back the memory of tensors that autograd holds on to, but for those that are used."""
    for x in tensors:
        if x is not None and not any(x is other for other in used):
            storage = x.untyped_storage()
            if storage.resizable():  # not so if a hook for saved tensors took it from elsewhere
                storage.resize_(0)


def empty_gate_gradients(p: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Of beta and log_decay, uninitialised."""
    d_beta = None if p.beta is None else torch.empty_like(p.beta, dtype=torch.float32)
    d_log_decay = None if p.log_decay is None else torch.empty_like(p.log_decay, dtype=torch.float32)
    return d_beta, d_log_decay


def fused_gradients(
    p: Problem, kept: Kept, U: Tensor, states: Tensor, starts: Tensor | None, d_output: Tensor, d_final: Tensor | None,
    in_place: bool,
) -> tuple[Gradients, Tensor | None]:  # fmt: skip
    """The gradients and that of the initial states, if there are such, in one kernel.

    `starts` are the states that sequences or segments start from. With `in_place` dv lies where U did, and dq and dk
    where the states did, if chunks are full and nothing reads the states afterwards.
    """
    plan = p.plan
    d_beta, d_log_decay = empty_gate_gradients(p)
    small_steps = p.q.dtype != torch.bfloat16  # in float16 they are usual; the states remain for them
    dv = U if in_place else torch.empty_like(U)
    if in_place and not small_steps and plan.T % CHUNK == 0:
        dq, dk = states.unbind()
    else:
        dq, dk = (p.q.new_empty(plan.B, plan.T, plan.HV, plan.K) for _ in range(2))
    d_initial = None if p.initial_state is None else p.float32(plan.scans, plan.HV, plan.K, plan.V)
    d_G = overlap = None
    if d_log_decay is not None:
        d_G, overlap = torch.empty_like(d_log_decay), p.float32(plan.slots, plan.V)
    for strict in plan.scan_modes:  # by the gain each of both makes the gradients of some heads
        launch(
            backward_kernel, plan.hopper_backward(strict),
            token_tiles(p.q, plan.K), token_tiles(p.k, plan.K), token_tiles(d_output, plan.V), token_tiles(U, plan.V),
            matrix_tiles(kept.AP, CHUNK), states_tiles(states, plan),
            token_tiles(dq, plan.K), token_tiles(dk, plan.K), token_tiles(dv, plan.V // 2),
            kept.beta, kept.G, kept.large_gain, d_beta, d_G, overlap, d_final, d_initial,
        )  # fmt: skip
    if small_steps:
        launch(small_steps_kernel, plan.small_steps(), p.k, p.v, kept.beta, kept.G, kept.AP, states, dv, d_beta)
    else:
        launch(tiny_steps_kernel, plan.tiny_steps(), p.k, p.v, kept.beta, kept.G, kept.AP, starts, dv, d_beta)
    if d_log_decay is not None:
        launch(log_decay_gradient_kernel, plan.log_decay_gradient(), d_G, overlap, p.log_decay, d_log_decay)
    if plan.grouped:
        heads, (dq, dk) = (dq, dk), (torch.empty_like(p.q) for _ in range(2))
        launch(sum_of_groups_kernel, plan.sum_of_groups(), *heads, dq, dk)
    return (dq, dk, None, dv, d_beta, d_log_decay), d_initial


def chunk_gradients(
    p: Problem, kept: Kept, U: Tensor, Z: Tensor | None, d_output: Tensor, states: Tensor,
    d_states: StateGradients | None, gradients: Gradients,
) -> None:  # fmt: skip
    """Fill the gradients."""
    plan = p.plan
    low, high = d_states or (None, None)
    from_scans = (U, Z, d_output, states, low)
    if not plan.per_channel:
        launch(
            chunk_gradients_kernel, plan.chunk_gradients(),
            p.q, p.k, p.erase_key, p.v, kept.beta, p.log_decay, kept.G, kept.large_gain,
            *from_scans, *gradients, *p.chunk_offsets,
        )  # fmt: skip
        return
    inputs = p.q, p.k, p.erase_key, p.v, kept.beta, p.log_decay, kept.G, kept.strong_decay
    if gradients_on_hopper(p):
        for kernel, constants in (
            (hopper_chunk_gradients_channel_kernel, plan.hopper_chunk_gradients_channel()),
            (hopper_chunk_gradients_strong_kernel, plan.hopper_chunk_gradients_strong()),
        ):
            launch(kernel, constants, *inputs, *from_scans, high, *gradients)
        return
    tensors = (*inputs, *from_scans, p.float32(plan.slots, CHUNK), *gradients)

    def scratch(programs: int) -> Tensor:
        return p.q.new_empty(programs, plan.matrices, CHUNK, CHUNK)

    if plan.half:
        launch(chunk_gradients_channel_kernel, plan.chunk_gradients_channel(), *tensors, *p.chunk_offsets)
        constants = plan.chunk_gradients_strong()
        launch(chunk_gradients_strong_kernel, constants, *tensors, scratch(constants.grid[0]), *p.chunk_offsets)
        return
    for strong in (False, True):
        constants = plan.chunk_gradients_exact(strong)
        launch(chunk_gradients_exact_kernel, constants, *tensors, scratch(constants.grid[0]), *p.chunk_offsets)


def gradients_on_hopper(p: Problem) -> bool:
    """Whether Gluon kernels make the chunk gradients for decay per channel."""
    plan = p.plan
    return plan.hopper and plan.per_channel and channel_gradients_refusal(plan, p.q.dtype) is None


def sum_of_group(gradient: Tensor, q: Tensor) -> Tensor:
    """Gradients per value head `[B, T, HV, K]`, summed over the heads that share a key head, in q's dtype."""
    return gradient.unflatten(2, (q.shape[2], -1)).sum(3).to(q.dtype)


def contiguous(x: Tensor, alignment: int) -> Tensor:
    """x contiguous, at a multiple of so many bytes: 4 for reads of 16-bit values in pairs, 16 for the copy engine."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % alignment else x


def chunk_table(cu_seqlens: Tensor | None, NT: int) -> tuple[Tensor | None, Tensor | None]:
    """The sequence of each of NT chunks, and the first chunk of each sequence, int32 (see `chunk.address`).

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
