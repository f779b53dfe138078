"""The gradients of a chunk's inputs from U, Z, S and dS, in parallel over chunks; no decay, or one per head."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.address import chunk_bounds, key_head, tokens_of
from deltazoo.ops.triton.chunk.score_gradients import load_values, score_gradients, store_step_gradient
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Gradients, Kept, Problem


@triton.jit
def partial_overlap(b_S, b_dS):
    """<S, dS> of a tile in 128 partial sums, each over elements of one thread: eight side by side, in several rows."""
    BV: tl.constexpr = b_S.shape[0]
    COLUMNS: tl.constexpr = b_S.shape[1] // 8
    ROWS: tl.constexpr = BV if BV * COLUMNS < 128 else 128 // COLUMNS
    product = b_S.to(tl.float32) * b_dS.to(tl.float32)
    return tl.sum(tl.sum(tl.reshape(product, [BV // ROWS, ROWS, COLUMNS, 8]), 3), 0)


@triton.jit
def through_states(
    b_dO, b_U, b_Z, states, d_states, offsets, mask, b_dq, b_row, b_dk, b_overlap, DECAY: tl.constexpr,
    HAS_BETA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the products with a tile of S and of dS: `dO S` to dq, `Z S` to row, `U dS` to dk, and <S, dS>."""
    b_S = tl.load(states + offsets, mask=mask, other=0.0)
    b_dS = tl.load(d_states + offsets, mask=mask, other=0.0)
    if DECAY == "scalar":
        b_overlap += partial_overlap(b_S, b_dS)
    b_dq = tl.dot(b_dO, b_S, b_dq, input_precision=PRECISION)
    if HAS_BETA:
        b_row = tl.dot(b_Z, b_S, b_row, input_precision=PRECISION)
    b_dk = tl.dot(b_U, b_dS, b_dk, input_precision=PRECISION)
    return b_dq, b_row, b_dk, b_overlap


@triton.jit
def decay_between(written, read, unseen):
    """The decay between the write of one token and the read of another."""
    return tl.exp2(tl.where(unseen, 0.0, read - written))


@triton.jit
def decay_gradient_of_the_rest(
    k, erase_key, b_dL, b_beta, o_qk, m_c, key_tiles, K: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """The part of the gradient of a chunk's cumulative log-decay that rounding dL to 16 bits leaves out.

    The gradient of a weak decay is a small difference of large sums, so strict precision adds this part. It needs only
    the products of erase keys with keys. Returns the part, and the share of the tokens that read.
    """
    C: tl.constexpr = m_c.shape[0]
    DTYPE: tl.constexpr = k.dtype.element_ty
    o_k = tl.arange(0, BK)
    N = tl.zeros([C, C], dtype=tl.float32)
    for i_k in tl.range(0, key_tiles, num_stages=1):
        b_k = tl.load(k + i_k * BK + o_qk, mask=m_c[:, None] & (i_k * BK + o_k < K)[None, :], other=0.0)
        b_e = b_k
        if erase_key is not None:
            b_e = tl.load(erase_key + i_k * BK + o_qk, mask=m_c[:, None] & (i_k * BK + o_k < K)[None, :], other=0.0)
        N = tl.dot(b_e, tl.trans(b_k), N, input_precision=PRECISION) + 0.0  # the sum waits, see `score_gradients`
    rows = (b_dL - b_dL.to(DTYPE).to(tl.float32)) * N
    scaled = b_beta[:, None] * b_dL
    columns = (scaled - scaled.to(DTYPE).to(tl.float32)) * N
    read = b_beta * tl.sum(rows, 1)
    return read - tl.sum(columns, 0), read


@triton.jit(do_not_specialize=["key_tiles", "value_tiles", "T", "NT", "H", "HV"])
def chunk_gradients_kernel(
    q, k, erase_key, v, beta, log_decay, G, large_gain, U, Z, d_output, states, d_states, dq, dk, d_erase_key, dv,
    d_beta, d_log_decay, cu_seqlens, chunk_sequence, chunk_offsets, scale, key_tiles, value_tiles, T, NT, H, HV,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    HAS_BETA: tl.constexpr, STRICT: tl.constexpr, BY_GAIN: tl.constexpr, MICRO_STEPS: tl.constexpr,
    UNDECAYED: tl.constexpr, GROUPED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """All gradients of one chunk of one value head; grid (HV, NT, B). dq, dk and `d_erase_key` are per value head.

    First come the gradients that need no key channels: those of the scores P and L, dv, and the values' part of d_beta.
    Then one tile of key channels after the other. If all value channels fit into a tile, dO, U and Z are read once.

    The numbers of tiles, K / BK and V / BV, are run-time arguments: a compiler that knows them may unroll the loop into
    straight code, which is wrong on an H200 (docs/log.md).

    The gradient of the cumulative log-decay has one form for every kind of decay, `q o dq + e o de - k o dk`, where dk
    excludes de even if e is k: the terms of token i have the factor `exp(G_i)` where it reads and `exp(-G_i)` where
    it is read. With UNDECAYED the factor of e is `exp(G_{i-1})`, so a token's own log-decay has no part in `e o de`.
    """
    WHOLE: tl.constexpr = V <= BV
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    if rows <= 0:
        return
    DTYPE: tl.constexpr = q.dtype.element_ty
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, BK), tl.arange(0, BV)
    m_c = o_c < rows
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    o_gate = first * HV + i_h + o_c * HV
    values, keys = (first * HV + i_h) * V, (first * H + key_head(i_h, H, HV, GROUPED)) * K
    if MICRO_STEPS == 1:
        d_output, U, Z, v, dv = d_output + values, U + values, Z + values, v + values, dv + values
        q, k, dq, dk = q + keys, k + keys, dq + (first * HV + i_h) * K, dk + (first * HV + i_h) * K
        o_decay, m_query, m_decay = o_gate, m_c, m_c
    else:
        token, o_t, begins, ends = tokens_of(first, o_c, MICRO_STEPS)
        head = token * HV + i_h
        d_output, U, Z, v, dv = d_output + head * V, U + values, Z + values, v + values, dv + values
        q += (token * H + key_head(i_h, H, HV, GROUPED)) * K
        k, dq, dk = k + keys, dq + head * K, dk + (first * HV + i_h) * K
        o_decay, m_query, m_decay = head + o_t * HV, m_c & ends, m_c & begins
    if erase_key is not None:
        erase_key, d_erase_key = erase_key + keys, d_erase_key + (first * HV + i_h) * K
    states, d_states = states + slot * (K * V), d_states + slot * (K * V)
    o_cv, o_vk = o_c[:, None] * (HV * V) + o_v[None, :], o_v[:, None] * K + o_k[None, :]
    o_qk, o_dk = o_c[:, None] * (H * K) + o_k[None, :], o_c[:, None] * (HV * K) + o_k[None, :]
    o_output, o_query, o_dq = o_cv, o_qk, o_dk
    if MICRO_STEPS > 1:
        o_output = o_t[:, None] * (HV * V) + o_v[None, :]
        o_query, o_dq = o_t[:, None] * (H * K) + o_k[None, :], o_t[:, None] * (HV * K) + o_k[None, :]
    b_beta = tl.load(beta + slot * C + o_c) if HAS_BETA else o_c

    b_dO, b_U, b_Z, b_dP, b_dL, b_dbeta = score_gradients(
        v, dv, d_output, U, Z, b_beta, o_cv, o_output, o_v, m_c, m_query, value_tiles,
        V, BV, WHOLE, HAS_BETA, PRECISION, STAGES,
    )  # fmt: skip

    # The weights of other tokens' keys and queries in dq, row and dk. Rows of W_P_columns are columns of W_P.
    above, below = o_c[:, None] < o_c[None, :], o_c[:, None] > o_c[None, :]
    if DECAY == "scalar":
        b_G = tl.load(G + slot * C + o_c)
        D = decay_between(b_G[None, :], b_G[:, None], above)
        b_dP *= D
        if UNDECAYED:
            b_F = tl.load(G + slot * C + o_c - 1, mask=o_c > 0, other=0.0)
            D = decay_between(b_G[None, :], b_F[:, None], o_c[:, None] <= o_c[None, :])
        else:
            b_F = b_G
        b_dL *= D
    W_P = tl.where(above, 0.0, b_dP * scale).to(DTYPE)
    if WHOLE:  # with decay a second product is faster than transposing W_P (docs/log.md)
        b_dP = tl.dot(b_U, tl.trans(b_dO), input_precision=PRECISION)
        if DECAY == "scalar":
            b_dP *= decay_between(b_G[:, None], b_G[None, :], below)
        W_P_columns = tl.where(below, 0.0, b_dP * scale).to(DTYPE)
    else:
        W_P_columns = tl.trans(W_P)
    if DECAY == "scalar":
        b_dG, b_last = tl.zeros([C], dtype=tl.float32), tl.zeros([C], dtype=tl.float32)
    if UNDECAYED:
        b_dF = tl.zeros([C], dtype=tl.float32)  # `e o de`
    if HAS_BETA:
        stored = store_step_gradient(d_beta + o_gate, b_beta, b_dL, m_c)
        b_dL = tl.where(below, -b_dL, 0.0)
        if DECAY == "scalar":
            # In the gradient of the decay `e o de` and `k o dk` cancel except for pairs with the decay between them. So
            # the rows of dL, for de, and its columns, for dk, are rounded alike: with beta, where d_beta is stored.
            b_step, b_beta = tl.where(stored, b_beta, 1.0), tl.where(stored, 1.0, b_beta)
            b_dL *= b_step[:, None]
        if DECAY == "scalar" and BY_GAIN:
            if tl.load(large_gain + slot) != 0:
                rest, read = decay_gradient_of_the_rest(
                    k, erase_key, b_dL, b_beta, o_qk, m_c, key_tiles, K, BK, PRECISION
                )
                b_dG += rest
                if UNDECAYED:
                    b_dF += read
        elif DECAY == "scalar" and STRICT:
            rest, read = decay_gradient_of_the_rest(k, erase_key, b_dL, b_beta, o_qk, m_c, key_tiles, K, BK, PRECISION)
            b_dG += rest
            if UNDECAYED:
                b_dF += read
        W_L, W_L_beta = b_dL.to(DTYPE), (b_beta[:, None] * b_dL).to(DTYPE)

    b_overlap = partial_overlap(tl.zeros([BV, BK], dtype=tl.float32), tl.zeros([BV, BK], dtype=tl.float32))
    if DECAY == "scalar":
        g_last = tl.load(G + slot * C + C - 1)
        entry, exit = tl.exp2(b_G)[:, None], tl.exp2(g_last - b_G)[:, None]
        erase_entry = entry
        if UNDECAYED:
            erase_entry = tl.exp2(b_F)[:, None]
        if HAS_BETA:
            erase_entry *= b_step[:, None]

    if erase_key is not None and WHOLE:  # a tile ahead by hand: a copy in two buffers takes too much shared memory
        next_e = tl.load(erase_key + o_qk, mask=m_c[:, None] & (o_k < K)[None, :], other=0.0)
    for i_k in tl.range(0, key_tiles, num_stages=STAGES if WHOLE else 1):
        m_k = i_k * BK + o_k < K
        m_ck = m_c[:, None] & m_k[None, :]
        b_k = tl.load(k + i_k * BK + o_qk, mask=m_ck, other=0.0)
        if MICRO_STEPS == 1:
            m_dq = m_ck
        else:
            m_dq = m_query[:, None] & m_k[None, :]
        b_q = tl.load(q + i_k * BK + o_query, mask=m_dq, other=0.0)
        b_dq, b_row = tl.zeros([C, BK], dtype=tl.float32), tl.zeros([C, BK], dtype=tl.float32)
        b_dk = tl.zeros([C, BK], dtype=tl.float32)
        if WHOLE:
            b_dq, b_row, b_dk, b_overlap = through_states(
                b_dO, b_U, b_Z, states, d_states, i_k * BK + o_vk, (o_v < V)[:, None] & m_k[None, :],
                b_dq, b_row, b_dk, b_overlap, DECAY, HAS_BETA, PRECISION,
            )  # fmt: skip
        else:
            for i_v in tl.range(0, value_tiles, num_stages=STAGES):
                m_v = i_v * BV + o_v < V
                o_values, m_values = i_v * BV + o_cv, m_c[:, None] & m_v[None, :]
                p_output, m_output = o_values, m_values
                if MICRO_STEPS > 1:
                    p_output, m_output = i_v * BV + o_output, m_query[:, None] & m_v[None, :]
                dO_tile, U_tile, Z_tile = load_values(d_output, U, Z, p_output, m_output, o_values, m_values)
                b_dq, b_row, b_dk, b_overlap = through_states(
                    dO_tile, U_tile, Z_tile, states, d_states,
                    i_v * BV * K + i_k * BK + o_vk, m_v[:, None] & m_k[None, :],
                    b_dq, b_row, b_dk, b_overlap, DECAY, HAS_BETA, PRECISION,
                )  # fmt: skip
                b_dk += 0.0  # the sum waits, see `score_gradients`
        b_dq *= scale
        if DECAY == "scalar":
            b_dq *= entry
            b_row *= erase_entry
            b_dk *= exit
            b_last += tl.sum(b_k.to(tl.float32) * b_dk, 1)
        b_dq = tl.dot(W_P, b_k, b_dq, input_precision=PRECISION)
        tl.store(dq + i_k * BK + o_dq, b_dq.to(dq.dtype.element_ty), mask=m_dq)
        b_dk = tl.dot(W_P_columns, b_q, b_dk, input_precision=PRECISION)
        if DECAY == "scalar":
            b_dG += tl.sum(b_q.to(tl.float32) * b_dq, 1)
        if HAS_BETA:
            b_e = b_k
            if erase_key is not None:
                if WHOLE:
                    b_e = next_e
                else:
                    b_e = tl.load(erase_key + i_k * BK + o_qk, mask=m_ck, other=0.0)
            # The row parts of dL and of the state both enter as `beta o row`; their products with e give d_beta.
            b_row = tl.dot(W_L, b_k, -b_row, input_precision=PRECISION)
            b_dk = tl.dot(tl.trans(W_L_beta), b_e, b_dk, input_precision=PRECISION)
            e_row = tl.sum(b_e.to(tl.float32) * b_row, 1)
            b_dbeta += e_row
        if DECAY == "scalar":
            b_dG -= tl.sum(b_k.to(tl.float32) * b_dk, 1)
        if HAS_BETA:
            if DECAY == "scalar":
                b_dG += b_beta * e_row
                if UNDECAYED:
                    b_dF += b_beta * e_row
            if erase_key is None:
                b_dk += b_beta[:, None] * b_row
            else:
                b_de = b_beta[:, None] * b_row
                tl.store(d_erase_key + i_k * BK + o_dk, b_de.to(d_erase_key.dtype.element_ty), mask=m_ck)
                if WHOLE:
                    m_next = m_c[:, None] & ((i_k + 1) * BK + o_k < K)[None, :]
                    next_e = tl.load(erase_key + (i_k + 1) * BK + o_qk, mask=m_next, other=0.0)
        tl.store(dk + i_k * BK + o_dk, b_dk.to(dk.dtype.element_ty), mask=m_ck)

    if HAS_BETA:
        tl.store(d_beta + o_gate, b_dbeta, mask=m_c & (stored == 0))
    if DECAY == "scalar":
        last = tl.sum(b_last, 0) + tl.exp2(g_last) * tl.sum(tl.sum(b_overlap, 1), 0)
        b_dG += tl.where(o_c == C - 1, last, 0.0)
        keeps = tl.load(log_decay + o_decay, mask=m_decay, other=0.0).to(tl.float32) > float("-inf")
        d_log_decay += o_decay
        b_dg = tl.cumsum(b_dG, 0, reverse=True)
        if UNDECAYED:
            b_dg -= b_dF
        tl.store(d_log_decay, tl.where(keeps, b_dg, 0.0), mask=m_decay)


def gradient_arguments(plan: Plan, tiles: dict[str, int]) -> dict[str, Any]:
    """Arguments of all kernels in plain Triton that compute gradients of chunks."""
    key_tiles, value_tiles = -(-plan.K // tiles["BK"]), -(-plan.V // tiles["BV"])
    return dict(V=plan.V, key_tiles=key_tiles, value_tiles=value_tiles, **plan.per_chunk, **tiles)


@per_plan
def _constants(plan: Plan) -> Constants:
    arguments = gradient_arguments(plan, plan.tiles.gradients)
    named = dict(DECAY=plan.decay, UNDECAYED=plan.undecayed) | plan.precisions
    return Constants(*plan.chunk_grid(), **named, **arguments)


def launch_gradients(p: Problem, kept: Kept, scanned: tuple[Tensor | None, ...], gradients: Gradients) -> None:
    """Fill the gradients, from the results of the scans: U, Z, d_output, the states and their gradients."""
    launch(
        chunk_gradients_kernel, _constants(p.plan),
        p.q, p.k, p.erase_key, p.v, kept.beta, p.log_decay, kept.G, kept.large_gain, *scanned, *gradients,
        *p.chunk_offsets,
    )  # fmt: skip
