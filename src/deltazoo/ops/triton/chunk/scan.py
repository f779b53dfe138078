"""The serial part: the state is carried from chunk to chunk in registers, and each chunk stores its output.

The scan can store instead the tensors that the backward pass needs of every chunk.

Everything is transposed, with value channels as rows: the state `[V, K]`, the corrections `U^T [V, C]` and the output
`O^T [V, C]` are then always the left operand of a product, which the matrix unit reads from registers. So nothing that
one chunk passes to the next goes through shared memory, and a warp never waits for another one.

The state is a tuple of NK tiles `[BV, BK]`, because products of more than 128 key channels take too many registers.
"""

from typing import Any, Literal

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.address import sequence_bounds, tokens_of
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem


@triton.jit
def times_terms(x, a, a_rest, STRICT: tl.constexpr, PRECISION: tl.constexpr):
    """`x @ (a + a_rest)` for float32 x: with x as one term, or as two in strict mode."""
    hi = x.to(a.dtype)
    out = tl.dot(hi, a, input_precision=PRECISION)
    if STRICT:
        out = tl.dot(hi, a_rest, out)
        out = tl.dot((x - hi.to(tl.float32)).to(a.dtype), a, out)
    return out


@triton.jit
def add_product(S, u, k, STRICT: tl.constexpr, PRECISION: tl.constexpr):
    """`S + u @ k` for float32 u, with u as one term, or as two in strict mode."""
    hi = u.to(k.dtype)
    S = tl.dot(hi, k, S, input_precision=PRECISION)
    if STRICT:
        S = tl.dot((u - hi.to(tl.float32)).to(k.dtype), k, S)
    return S


@triton.jit
def unpack_inverse(X, C: tl.constexpr):
    """The two terms of a strict inverse in memory: an upper triangle, and one mirrored below its diagonal."""
    o_c = tl.arange(0, C)
    upper = o_c[:, None] <= o_c[None, :]
    return tl.where(upper, X, 0.0).to(X.dtype), tl.trans(tl.where(upper, 0.0, X).to(X.dtype))


@triton.jit
def first_large(large_gain, slot, NC, HV):
    """The first of a sequence's NC chunks with a large erase gain; NC if there is none.

    Every warp reads all of a block of 32 flags, so the result is in a register that all threads share, and addresses
    computed from it are as cheap as if it were an argument.
    """
    o = tl.arange(0, 32)
    first = NC
    for start in tl.range(0, NC, 32, num_stages=1):
        chunk = start + o
        large = tl.load(large_gain + slot + chunk.to(tl.int64) * HV, mask=chunk < NC, other=0)
        first = tl.minimum(first, tl.min(tl.where(large != 0, chunk, NC), 0))
    return first


@triton.jit
def finished(x, WAIT: tl.constexpr):
    """The product x; with WAIT a sum reads it, so that the kernel waits for the product.

    If products of several tiles of key channels are in flight together, ptxas waits after every one of their
    instructions. With decay there are no registers left for this sum (docs/log.md).
    """
    return x + 0.0 if WAIT else x


@triton.jit
def fetch_values(
    x, row, i_v, rows, stride, phase, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, MICRO_STEPS: tl.constexpr
):
    """Value channels `i_v * BV` to `(i_v + 1) * BV` of C rows, zero beyond V and `rows`, for `unpack_values`.

    With MICRO_STEPS > 1 x has a row per token, which belongs to its last micro-step, and the other rows are zero;
    `phase` is the micro-step of the first row.

    Values of 16 bits are loaded in pairs. They are not operands of a product, and Triton copies such loads ahead only
    if they have 4 bytes. Single ones would also be converted right after the load, which waits for memory.
    """
    o_c = tl.arange(0, C)[:, None]
    o_t, m_c = o_c, o_c < rows
    if MICRO_STEPS > 1:
        _, o_t, _, ends = tokens_of(phase, o_c, MICRO_STEPS)
        m_c = m_c & ends
    if x.dtype.element_ty.primitive_bitwidth == 16 and V % 2 == 0:
        o_v = i_v * (BV // 2) + tl.arange(0, BV // 2)[None, :]
        x = x.to(tl.pointer_type(tl.int32), bitcast=True)
        fetched = tl.load(x + row // 2 + o_t * (stride // 2) + o_v, mask=m_c & (o_v < V // 2), other=0)
    else:
        o_v = i_v * BV + tl.arange(0, BV)[None, :]
        fetched = tl.load(x + row + o_t * stride + o_v, mask=m_c & (o_v < V), other=0.0)
    return fetched


@triton.jit
def output_row(row, i_h, HV, V: tl.constexpr, MICRO_STEPS: tl.constexpr):
    """Offset of a head's output of the token of micro-step `row`, and the number of the micro-step in its token."""
    return (row // MICRO_STEPS * HV + i_h) * V, (row % MICRO_STEPS).to(tl.int32)


@triton.jit
def unpack_values(fetched, BV: tl.constexpr, C: tl.constexpr, DTYPE: tl.constexpr):
    """The values that `fetch_values` loaded, transposed `[BV, C]`."""
    if fetched.dtype == tl.int32:
        halves = tl.join(fetched.to(tl.int16), (fetched >> 16).to(tl.int16)).reshape(C, BV)
        fetched = halves.to(DTYPE, bitcast=True)
    return tl.trans(fetched)


@triton.jit(do_not_specialize=["T", "NT", "segments", "chunks", "HK", "HV"])
def scan_kernel(
    q_in, k_in, k_out, v, beta, G, AP, large_gain, output, U_out, states, initial_state, final_state, cu_seqlens,
    chunk_offsets, scale, T, NT, segments, chunks, HK, HV, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr,
    BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, HAS_BETA: tl.constexpr, STRICT: tl.constexpr,
    BY_GAIN: tl.constexpr, SEPARATE: tl.constexpr, MICRO_STEPS: tl.constexpr, UNDECAYED: tl.constexpr,
    INITIAL: tl.constexpr, PACKED: tl.constexpr, HAS_V: tl.constexpr, OUTPUT: tl.constexpr, KEEP: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Store the final state, and with OUTPUT the output, or with KEEP the states that enter the chunks and U.

    One program owns BV value channels of one value head of one sequence or segment. INITIAL is its `Start`. Without
    HAS_V the values are zero. q and k have HK heads. With SEPARATE the keys `k_in` with which the state is read differ
    from `k_out`. With AHEAD values are loaded a chunk ahead into registers, which leaves the shared memory to the other
    operands.

    With BY_GAIN a sequence takes two launches. The first one processes the chunks before the first one with a large
    erase gain, and stores its state in `final_state`. The launch with STRICT starts from this state and processes the
    remaining chunks, if there are any. Grid (V / BV * HV * N).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    WAIT: tl.constexpr = NK > 1 and DECAY == "none"
    i_v, i_h, i_n = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    first, length, chunk = sequence_bounds(cu_seqlens, chunk_offsets, i_n, T, NT, segments, chunks, C, PACKED)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_v = i_v * BV + o_v < V
    # Scalar bases advance by chunk; the offsets of a tile fit 32 bits and never change.
    slot = chunk * HV + i_h
    begin, end = 0, tl.cdiv(length, C)
    if BY_GAIN:
        large = first_large(large_gain, slot, end, HV)
        if STRICT:
            if large >= end:
                return
            begin = large
        else:
            handed_on = large < end
            end = large
    qk_base = (first * HK + i_h // (HV // HK)) * K
    v_base = (first * HV + i_h) * V
    MATRICES: tl.constexpr = 2 if HAS_BETA else 1
    AP += slot * (MATRICES * C * C)
    o_qk = o_c[:, None] * (HK * K) + o_k[None, :]
    o_vc = i_v * BV + o_v[:, None] + o_c[None, :] * (HV * V)
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_kept = (i_v * BV + o_v)[:, None] * K + o_k[None, :]
    o_state = (i_n.to(tl.int64) * HV + i_h) * (K * V) + i_v * BV + o_v[:, None] + o_k[None, :] * V
    S = ()
    for tile in tl.static_range(NK):
        if INITIAL == "state":
            m_state = m_v[:, None] & (tile * BK + o_k < K)[None, :]
            S += (tl.load(initial_state + o_state + tile * BK * V, mask=m_state, other=0.0),)
        elif INITIAL == "identity":
            S += (tl.where((i_v * BV + o_v)[:, None] == (tile * BK + o_k)[None, :], 1.0, 0.0),)
        else:
            S += (tl.zeros([BV, BK], dtype=tl.float32),)

    if HAS_V and AHEAD:
        start = tl.cast(begin, tl.int64) * C
        next_v = fetch_values(v, v_base + start * (HV * V), i_v, length - begin * C, HV * V, 0, V, BV, C, 1)
    for i_t in tl.range(begin, end, num_stages=STAGES):
        i_slot = slot + tl.cast(i_t, tl.int64) * HV
        step = tl.cast(i_t, tl.int64) * C
        rows = length - i_t * C
        p_AP = AP + step * (HV * C * MATRICES)
        m_c = o_c < rows
        m_vc = m_v[:, None] & m_c[None, :]
        if MICRO_STEPS > 1:
            token, o_t, _, ends = tokens_of(first + step, o_c, MICRO_STEPS)
        if HAS_V:
            if not AHEAD:
                next_v = fetch_values(v, v_base + step * (HV * V), i_v, rows, HV * V, 0, V, BV, C, 1)
            b_v = unpack_values(next_v, BV, C, v.dtype.element_ty).to(tl.float32)
            if AHEAD:
                next_v = fetch_values(v, v_base + (step + C) * (HV * V), i_v, rows - C, HV * V, 0, V, BV, C, 1)
        else:
            b_v = tl.zeros([BV, C], dtype=tl.float32)
        Y = tl.zeros([BV, C], dtype=tl.float32)
        O = tl.zeros([BV, C], dtype=tl.float32)
        keys = ()
        for tile in tl.static_range(NK):
            m_k = tile * BK + o_k < K
            m_qk = m_c[:, None] & m_k[None, :]
            qk_tile = qk_base + step * (HK * K) + tile * BK
            b_k_out = tl.load(k_out + qk_tile + o_qk, mask=m_qk, other=0.0)
            S_hi = S[tile].to(b_k_out.dtype)
            if KEEP:
                p_S = states + i_slot * (K * V)
                tl.store(p_S + tile * BK + o_kept, S_hi, mask=m_v[:, None] & m_k[None, :])
            if HAS_BETA:
                if SEPARATE:
                    b_k_in = tl.load(k_in + qk_tile + o_qk, mask=m_qk, other=0.0)
                else:
                    b_k_in = b_k_out
                Y = finished(tl.dot(S_hi, tl.trans(b_k_in), Y, input_precision=PRECISION), WAIT)
            if OUTPUT:
                if MICRO_STEPS == 1:
                    b_q = tl.load(q_in + qk_tile + o_qk, mask=m_qk, other=0.0)
                else:
                    p_q = q_in + (token * HK + i_h // (HV // HK)) * K + tile * BK
                    b_q = tl.load(p_q + o_t[:, None] * (HK * K) + o_k[None, :], mask=m_qk & ends[:, None], other=0.0)
                O = finished(tl.dot(S_hi, tl.trans(b_q), O, input_precision=PRECISION), WAIT)
            keys += (b_k_out,)
        if DECAY == "scalar":
            b_G = tl.load(G + i_slot * C + o_c)
            g_last = tl.load(G + i_slot * C + C - 1)
        if HAS_BETA:
            b_beta = tl.load(beta + i_slot * C + o_c)
            A = tl.load(p_AP + o_cc)
            if STRICT:
                A, A_rest = unpack_inverse(A, C)
            else:
                A_rest = A
            if DECAY == "scalar":
                if UNDECAYED:
                    Y *= tl.exp2(tl.load(G + i_slot * C + o_c - 1, mask=o_c > 0, other=0.0))[None, :]
                else:
                    Y *= tl.exp2(b_G)[None, :]
            U = times_terms(b_beta[None, :] * (b_v - Y), A, A_rest, STRICT, PRECISION)
        else:
            U = b_v
        if KEEP:
            tl.store(U_out + v_base + step * (HV * V) + o_vc, U.to(U_out.dtype.element_ty), mask=m_vc)
        if OUTPUT:
            P = tl.load(p_AP + (MATRICES - 1) * C * C + o_cc)
            if DECAY == "scalar":
                O *= (scale * tl.exp2(b_G))[None, :]
            else:
                O *= scale
            O = tl.dot(U.to(P.dtype), P, O, input_precision=PRECISION)
            if MICRO_STEPS == 1:
                tl.store(output + v_base + step * (HV * V) + o_vc, O.to(output.dtype.element_ty), mask=m_vc)
            else:
                p_out = output + (token * HV + i_h) * V + i_v * BV
                o_out = o_v[:, None] + o_t[None, :] * (HV * V)
                tl.store(p_out + o_out, O.to(output.dtype.element_ty), mask=m_vc & ends[None, :])
        if DECAY == "scalar":
            U *= tl.exp2(g_last - b_G)[None, :]
        before, S = S, ()
        for tile in tl.static_range(NK):
            kept = before[tile]
            if DECAY == "scalar":
                kept *= tl.exp2(g_last)
            if DECAY == "channel":
                m_k = tile * BK + o_k < K
                kept *= tl.exp2(tl.load(G + i_slot * K + tile * BK + o_k, mask=m_k, other=0.0))[None, :]
            S += (finished(add_product(kept, U, keys[tile], STRICT, PRECISION), WAIT),)
    if final_state is not None and not (KEEP and STRICT and not OUTPUT):
        for tile in tl.static_range(NK):
            m_state = m_v[:, None] & (tile * BK + o_k < K)[None, :]
            if KEEP:  # only a launch with STRICT reads it, if chunks remain for it
                m_state = m_state & handed_on
            tl.store(final_state + o_state + tile * BK * V, S[tile], mask=m_state)


Start = Literal["zero", "state", "identity"]
"""First state of a scan, the constant INITIAL of the kernels: zero, a given one, or the identity."""


def scan_arguments(plan: Plan, tiles: dict[str, int], V: int, **named: Any) -> Constants:
    """Constants of a serial scan of states with V value channels in plain Triton: a program per tile of them."""
    programs = -(-V // tiles["BV"]) * plan.HV * plan.scans
    return Constants(programs, V=V, UNDECAYED=plan.undecayed, **plan.common, **plan.scanned_heads, **named, **tiles)


@per_plan
def _constants(plan: Plan, start: Start, values: bool, output: bool, keep: bool, strict: bool) -> Constants:
    tiles = plan.scan_tiles[strict].scan_keep if keep else plan.scan_tiles[strict].scan
    V = plan.V if values else plan.K  # the transition of a segment
    return scan_arguments(
        plan, tiles, V, HAS_V=values, INITIAL=start, OUTPUT=output, KEEP=keep, STRICT=strict,
    )  # fmt: skip


def launch_scan(
    p: Problem, kept: Kept, start: Start, v: Tensor | None, initial: Tensor | None, final: Tensor | None,
    output: Tensor | None, U: Tensor | None, states: Tensor | None, strict: bool,
) -> None:  # fmt: skip
    """One launch of `stages.scan_once`, from `start`; it stores the output, or U and the states, or neither."""
    keys, chunks = kept.scanned(p)
    constants = _constants(p.plan, start, v is not None, output is not None, states is not None, strict)
    stored = U if output is None else output
    launch(
        scan_kernel, constants, *keys, v, *chunks, stored, stored, states, initial, final, *p.sequence_offsets,
    )  # fmt: skip
