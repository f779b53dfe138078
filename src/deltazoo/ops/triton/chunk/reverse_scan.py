"""The reverse scan: the gradient of the state is carried from the last chunk to the first; in the form of `scan`."""

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.address import sequence_bounds, tokens_of
from deltazoo.ops.triton.chunk.scan import (
    add_product,
    fetch_values,
    finished,
    first_large,
    output_row,
    scan_arguments,
    times_terms,
    unpack_inverse,
    unpack_values,
)
from deltazoo.ops.triton.chunk.score_gradients import not_near_zero
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem


@triton.jit(do_not_specialize=["T", "NT", "segments", "chunks", "HK", "HV"])
def reverse_scan_kernel(
    q_in, k_in, k_out, beta, G, AP, large_gain, d_output, Z_out, d_states, d_states_high, d_final, d_initial,
    cu_seqlens, chunk_offsets, scale, T, NT, segments, chunks, HK, HV, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, HAS_BETA: tl.constexpr,
    STRICT: tl.constexpr, BY_GAIN: tl.constexpr, SEPARATE: tl.constexpr, MICRO_STEPS: tl.constexpr,
    UNDECAYED: tl.constexpr, HAS_FINAL: tl.constexpr, HAS_INITIAL: tl.constexpr, PACKED: tl.constexpr,
    KEEP: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Gradients of the initial states; with KEEP dS and Z of every chunk (without beta: Z = dU).

    With dS the gradient of the state that leaves a chunk, and dS' of the one that enters it,

        dU = P^T dO + k_out dS,   Z = A^T dU,   dS' = total o dS + scale q_in^T dO - k_in^T (beta o Z)

    SCALED, for the Gluon kernels of gradients per channel: tokens whose step size is not near zero have beta o Z, which
    is dv, in place of Z.

    With `d_states_high` dS lies in the memory of `q_in` and `k_in`, and that of value channels from 64 on in
    `d_states_high`, with channels in place of the chunk's tokens. That takes one program per head (V <= BV), so that no
    other program reads these rows. This one stores a tile of dS after the products with its q and `k_in`, which all its
    threads have put into shared memory before.

    With BY_GAIN the launch with STRICT comes first. It processes the chunks from the last one to the first with a large
    erase gain, and stores its gradient in `d_initial`. The other launch continues from there. Grid (V / BV * HV * N).
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    NK: tl.constexpr = (K + BK - 1) // BK
    WAIT: tl.constexpr = NK > 1 and DECAY == "none"
    i_v, i_h, i_n = tl.program_id(0) % NV, tl.program_id(0) // NV % HV, tl.program_id(0) // (NV * HV)
    first, length, chunk = sequence_bounds(cu_seqlens, chunk_offsets, i_n, T, NT, segments, chunks, C, PACKED)
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_v = i_v * BV + o_v < V
    slot = chunk * HV + i_h
    stop = tl.cdiv(length, C)
    NC = stop
    if BY_GAIN:
        large = first_large(large_gain, slot, stop, HV)
        handed_on = large < stop
        if STRICT:
            if large >= stop:
                return
            NC = stop - large
        else:
            stop = large
            NC = large
    qk_base = (first * HK + i_h // (HV // HK)) * K
    v_base = (first * HV + i_h) * V
    MATRICES: tl.constexpr = 2 if HAS_BETA else 1
    AP += slot * (MATRICES * C * C)
    o_qk = o_c[:, None] * (HK * K) + o_k[None, :]
    o_vc = i_v * BV + o_v[:, None] + o_c[None, :] * (HV * V)
    o_cc = o_c[:, None] * C + o_c[None, :]
    o_kept = (i_v * BV + o_v)[:, None] * K + o_k[None, :]
    if d_states_high is not None:
        o_kept = ((i_v * BV + o_v) % C)[:, None] * (HV * K) + o_k[None, :]
        d_states = tl.where((i_v * BV + o_v < C)[:, None], d_states, d_states_high)
    o_state = (i_n.to(tl.int64) * HV + i_h) * (K * V) + i_v * BV + o_v[:, None] + o_k[None, :] * V
    dS = ()
    for tile in tl.static_range(NK):
        m_state = m_v[:, None] & (tile * BK + o_k < K)[None, :]
        gradient = tl.zeros([BV, BK], dtype=tl.float32)
        if BY_GAIN and not STRICT:
            gradient = tl.load(d_initial + o_state + tile * BK * V, mask=m_state & handed_on, other=0.0)
            m_state = m_state & (handed_on == 0)
        if HAS_FINAL:
            gradient += tl.load(d_final + o_state + tile * BK * V, mask=m_state, other=0.0)
        dS += (gradient,)

    if AHEAD:
        last = tl.maximum(stop - 1, 0)
        if MICRO_STEPS == 1:
            p_last, phase = v_base + last.to(tl.int64) * (C * HV * V), 0
        else:
            p_last, phase = output_row(first + last.to(tl.int64) * C, i_h, HV, V, MICRO_STEPS)
        next_dO = fetch_values(d_output, p_last, i_v, length - last * C, HV * V, phase, V, BV, C, MICRO_STEPS)
    for i in tl.range(0, NC, num_stages=STAGES):
        i_t = stop - 1 - i
        i_slot = slot + tl.cast(i_t, tl.int64) * HV
        step = tl.cast(i_t, tl.int64) * C
        rows = length - i_t * C
        p_AP = AP + step * (HV * C * MATRICES)
        m_c = o_c < rows
        m_vc = m_v[:, None] & m_c[None, :]
        if MICRO_STEPS > 1:
            token, o_t, _, ends = tokens_of(first + step, o_c, MICRO_STEPS)
        if not AHEAD:
            if MICRO_STEPS == 1:
                p_dO, phase = v_base + step * (HV * V), 0
            else:
                p_dO, phase = output_row(first + step, i_h, HV, V, MICRO_STEPS)
            next_dO = fetch_values(d_output, p_dO, i_v, rows, HV * V, phase, V, BV, C, MICRO_STEPS)
        b_dO = unpack_values(next_dO, BV, C, d_output.dtype.element_ty)
        if AHEAD:
            before = tl.where(i_t > 0, C, 0)
            if MICRO_STEPS == 1:
                p_dO, phase = v_base + (step - C) * (HV * V), 0
            else:
                p_dO, phase = output_row(tl.maximum(first + step - C, 0), i_h, HV, V, MICRO_STEPS)
            next_dO = fetch_values(d_output, p_dO, i_v, before, HV * V, phase, V, BV, C, MICRO_STEPS)
        P = tl.load(p_AP + (MATRICES - 1) * C * C + o_cc)
        if DECAY == "scalar":
            b_G = tl.load(G + i_slot * C + o_c)
            g_last = tl.load(G + i_slot * C + C - 1)
        dU = tl.zeros([BV, C], dtype=tl.float32)
        keys = ()
        for tile in tl.static_range(NK):
            m_k = tile * BK + o_k < K
            m_qk = m_c[:, None] & m_k[None, :]
            b_k_out = tl.load(k_out + qk_base + step * (HK * K) + tile * BK + o_qk, mask=m_qk, other=0.0)
            dS_hi = dS[tile].to(b_k_out.dtype)
            if KEEP and d_states_high is None:
                tl.store(d_states + i_slot * (K * V) + tile * BK + o_kept, dS_hi, mask=m_v[:, None] & m_k[None, :])
            dU = finished(tl.dot(dS_hi, tl.trans(b_k_out), dU, input_precision=PRECISION), WAIT)
            keys += (b_k_out,)
        if DECAY == "scalar":
            dU *= tl.exp2(g_last - b_G)[None, :]
        dU = tl.dot(b_dO, tl.trans(P), dU, input_precision=PRECISION)
        if DECAY == "scalar":
            dO = (b_dO.to(tl.float32) * (scale * tl.exp2(b_G))[None, :]).to(b_dO.dtype)
        else:
            dO = (b_dO.to(tl.float32) * scale).to(b_dO.dtype)
        if HAS_BETA:
            b_beta = tl.load(beta + i_slot * C + o_c)
            A = tl.load(p_AP + o_cc)
            if STRICT:
                A, A_rest = unpack_inverse(A, C)
            else:
                A_rest = A
            Z = times_terms(dU, tl.trans(A), tl.trans(A_rest), STRICT, PRECISION)
            if DECAY == "scalar":
                if UNDECAYED:
                    b_F = tl.load(G + i_slot * C + o_c - 1, mask=o_c > 0, other=0.0)
                else:
                    b_F = b_G
                dX = Z * (-b_beta * tl.exp2(b_F))[None, :]
            else:
                dX = Z * (-b_beta)[None, :]
        else:
            Z = dU
        if KEEP:
            if SCALED:
                Z *= tl.where(not_near_zero(b_beta), b_beta, 1.0)[None, :]
            tl.store(Z_out + v_base + step * (HV * V) + o_vc, Z.to(Z_out.dtype.element_ty), mask=m_vc)
        after, dS = dS, ()
        for tile in tl.static_range(NK):
            m_k = tile * BK + o_k < K
            m_qk = m_c[:, None] & m_k[None, :]
            qk_tile = qk_base + step * (HK * K) + tile * BK
            if MICRO_STEPS == 1:
                b_q = tl.load(q_in + qk_tile + o_qk, mask=m_qk, other=0.0)
            else:
                p_q = q_in + (token * HK + i_h // (HV // HK)) * K + tile * BK
                b_q = tl.load(p_q + o_t[:, None] * (HK * K) + o_k[None, :], mask=m_qk & ends[:, None], other=0.0)
            kept = after[tile]
            if DECAY == "scalar":
                kept *= tl.exp2(g_last)
            if DECAY == "channel":
                kept *= tl.exp2(tl.load(G + i_slot * K + tile * BK + o_k, mask=m_k, other=0.0))[None, :]
            kept = finished(tl.dot(dO, b_q, kept, input_precision=PRECISION), WAIT)
            if HAS_BETA:
                if SEPARATE:
                    b_k_in = tl.load(k_in + qk_tile + o_qk, mask=m_qk, other=0.0)
                else:
                    b_k_in = keys[tile]
                kept = finished(add_product(kept, dX, b_k_in, STRICT, PRECISION), WAIT)
            if KEEP and d_states_high is not None:
                tl.store(d_states + qk_tile + o_kept, after[tile].to(b_q.dtype), mask=m_v[:, None] & m_k[None, :])
            dS += (kept,)
    if HAS_INITIAL or (BY_GAIN and STRICT):
        for tile in tl.static_range(NK):
            m_state = m_v[:, None] & (tile * BK + o_k < K)[None, :]
            tl.store(d_initial + o_state + tile * BK * V, dS[tile], mask=m_state)


@per_plan
def _constants(plan: Plan, final: bool, initial: bool, keep: bool, strict: bool) -> Constants:
    tiles = plan.scan_tiles[strict].reverse_scan
    return scan_arguments(
        plan, tiles, plan.V, HAS_FINAL=final, HAS_INITIAL=initial, KEEP=keep, STRICT=strict,
        SCALED=plan.route.gradients == "gluon",
    )  # fmt: skip


def launch_reverse_scan(
    p: Problem, kept: Kept, d_output: Tensor, Z: Tensor | None, d_states: tuple[Tensor | None, Tensor | None],
    d_final: Tensor | None, d_initial: Tensor | None, initial: bool, strict: bool,
) -> None:  # fmt: skip
    """One launch of `stages.reverse_scan`; `initial`: whether the gradients of the first states are wanted."""
    keys, chunks = kept.scanned(p)
    launch(
        reverse_scan_kernel, _constants(p.plan, d_final is not None, initial, Z is not None, strict),
        *keys, *chunks, d_output, Z, *d_states, d_final, d_initial, *p.sequence_offsets,
    )  # fmt: skip
