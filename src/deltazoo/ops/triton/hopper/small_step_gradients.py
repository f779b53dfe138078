"""Small kernels after the fused backward: tiny step sizes, the end of d_log_decay, sums over groups of heads."""

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.scan import add_product, times_terms, unpack_inverse
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem
from deltazoo.ops.triton.tiles import CHUNK

SMALL_STEP = tl.constexpr(2.0**-40)
"""The largest step size whose gradient is not `<z, u> / beta` (see `chunk.score_gradients.store_step_gradient`). With
the range of bfloat16 even products with it have all digits."""


@triton.jit
def last_small(beta, slot, first, NC, T, HV, SMALL: tl.constexpr, C: tl.constexpr):
    """One more than the last of NC chunks with a small step size, or 0; the first of them begins at token `first`."""
    o, o_c = tl.arange(0, 16), tl.arange(0, C)
    last = 0
    for start in tl.range(0, NC, 16, num_stages=1):
        chunk = start + o
        m = (chunk < NC)[:, None] & (first + chunk[:, None] * C + o_c[None, :] < T)
        b_beta = tl.load(beta + (slot + chunk.to(tl.int64) * HV)[:, None] * C + o_c[None, :], mask=m, other=1.0)
        last = tl.maximum(last, tl.max(tl.where(tl.min(b_beta, 1) > SMALL, 0, chunk + 1), 0))
    return last


@triton.jit(do_not_specialize=["T", "H", "HV", "segments", "chunks", "value_tiles"])
def tiny_steps_kernel(
    k, v, beta, G, AP, initial_state, dv, d_beta, T, H, HV, segments, chunks, value_tiles, K: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
):  # fmt: skip
    """d_beta and dv of the tokens with a small step size, whose rows of dv are Z; grid (N * HV).

    `d_beta = <z, v - y>`, with y the read of the token by its key from the state that enters the chunk and from the
    corrections of the tokens before. All are computed again, since gradients may have replaced the states. A branch in
    the fused kernel would cost registers and addresses in every chunk.

    A program walks through a head of a sequence or segment, as `chunk.scan.scan_kernel` with STRICT, and ends after the
    last token with a small step size. Heads without one take no time.
    """
    DTYPE: tl.constexpr = k.dtype.element_ty
    SMALL: tl.constexpr = SMALL_STEP
    o_c, o_k, o_v = tl.arange(0, C), tl.arange(0, K), tl.arange(0, BV)
    i_n, i_h = tl.program_id(0) // HV, tl.program_id(0) % HV
    row, first_chunk = i_n // segments, i_n % segments * chunks
    NT = tl.cdiv(T, C)
    slot = (row.to(tl.int64) * NT + first_chunk) * HV + i_h
    end = last_small(beta, slot, first_chunk * C, tl.minimum(NT - first_chunk, chunks), T, HV, SMALL, C)
    if end == 0:
        return
    for i_v in tl.range(0, value_tiles, num_stages=1):
        if initial_state is None:
            S = tl.zeros([BV, K], dtype=tl.float32)
        else:
            o_state = (i_n.to(tl.int64) * HV + i_h) * (K * V) + i_v * BV + o_v[:, None] + o_k[None, :] * V
            S = tl.load(initial_state + o_state)
        for i_t in tl.range(0, end, num_stages=1):
            i_slot, token = slot + tl.cast(i_t, tl.int64) * HV, (first_chunk + i_t) * C
            m_c = token + o_c < T
            first = row.to(tl.int64) * T + token
            o_keys = (first * H + i_h // (HV // H)) * K + o_c[:, None] * (H * K) + o_k[None, :]
            o_values = (first * HV + i_h) * V + i_v * BV + o_c[None, :] * (HV * V) + o_v[:, None]
            b_k = tl.load(k + o_keys, mask=m_c[:, None], other=0.0)
            b_v = tl.load(v + o_values, mask=m_c[None, :], other=0.0).to(tl.float32)
            b_beta = tl.load(beta + i_slot * C + o_c)
            small = m_c & (b_beta <= SMALL)
            Y = tl.dot(S.to(DTYPE), tl.trans(b_k))
            if DECAY == "scalar":
                b_G = tl.load(G + i_slot * C + o_c)
                Y *= tl.exp2(b_G)[None, :]
            A = tl.load(AP + i_slot * (2 * C * C) + o_c[:, None] * C + o_c[None, :])
            A, A_rest = unpack_inverse(A, C)
            U = times_terms(b_beta[None, :] * (b_v - Y), A, A_rest, True, "tf32")
            if tl.max(small.to(tl.int32), 0) != 0:
                N = tl.dot(b_k, tl.trans(b_k))
                if DECAY == "scalar":
                    N *= tl.exp2(tl.minimum(b_G[None, :] - b_G[:, None], 0.0))
                N = tl.where(o_c[:, None] < o_c[None, :], N, 0.0).to(DTYPE)  # transposed
                Y = tl.dot(U.to(DTYPE), N, Y)
                b_Z = tl.load(dv + o_values, mask=m_c[None, :], other=0.0).to(tl.float32)
                p_dbeta = d_beta + (first + o_c) * HV + i_h
                part = tl.load(p_dbeta, mask=small & (i_v > 0), other=0.0)
                tl.debug_barrier()  # other threads may store than those that load
                tl.store(p_dbeta, part + tl.sum(b_Z * (b_v - Y), 0), mask=small)
                tl.store(dv + o_values, (b_beta[None, :] * b_Z).to(DTYPE), mask=small[None, :])
            if DECAY == "scalar":
                g_last = tl.load(G + i_slot * C + C - 1)
                U *= tl.exp2(g_last - b_G)[None, :]
                S *= tl.exp2(g_last)
            S = add_product(S, U, b_k, True, "tf32")


@triton.jit(do_not_specialize=["T", "HV"])
def log_decay_gradient_kernel(
    d_G, overlap, log_decay, d_log_decay, T, HV, C: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr
):
    """Store d_log_decay of a chunk: `<S, dS>` less the running sum of dG before the token; grid (HV / HEADS, NC, B)."""
    i_t, i_b = tl.program_id(1), tl.program_id(2)
    o_h = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    slot = (i_b.to(tl.int64) * tl.cdiv(T, C) + i_t) * HV + o_h
    o_t = i_t * C + tl.arange(0, C)
    o_c = (i_b.to(tl.int64) * T + o_t)[:, None] * HV + o_h[None, :]
    m_c = (o_t < T)[:, None] & (o_h < HV)[None, :]
    p_overlap = overlap + slot[:, None] * D + tl.arange(0, D)[None, :]
    first = tl.sum(tl.load(p_overlap, mask=(o_h < HV)[:, None], other=0.0), 1)
    b_dG = tl.load(d_G + o_c, mask=m_c, other=0.0)
    keeps = tl.load(log_decay + o_c, mask=m_c, other=0.0).to(tl.float32) > float("-inf")
    b_dg = first[None, :] - (tl.cumsum(b_dG, 0) - b_dG)
    tl.store(d_log_decay + o_c, tl.where(keeps, b_dg, 0.0), mask=m_c)


@triton.jit(do_not_specialize=["rows"])
def sum_of_groups_kernel(dq_heads, dk_heads, dq, dk, rows, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Store dq and dk, `rows` of D channels, each the sum of GROUP rows; grid (rows / ROWS, 2)."""
    o = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_d, mask = tl.arange(0, D)[None, :], (o < rows)[:, None]
    if tl.program_id(1) == 0:
        heads, out = dq_heads, dq
    else:
        heads, out = dk_heads, dk
    total = tl.zeros([ROWS, D], dtype=tl.float32)
    for i in tl.static_range(GROUP):
        total += tl.load(heads + (o * GROUP + i)[:, None] * D + o_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + o[:, None] * D + o_d, total.to(out.dtype.element_ty), mask=mask)


@per_plan
def _tiny_steps(plan: Plan) -> Constants:
    return Constants(
        plan.scans * plan.HV, T=plan.T, H=plan.H, HV=plan.HV, segments=plan.segments, chunks=plan.segment_chunks,
        value_tiles=plan.V // 64, K=plan.K, V=plan.V, BV=64, C=CHUNK, DECAY=plan.decay, num_warps=4,
    )  # fmt: skip


def launch_tiny_steps(p: Problem, kept: Kept, starts: Tensor | None, dv: Tensor, d_beta: Tensor | None) -> None:
    """Fill dv and d_beta where step sizes are tiny; `starts`: the states that sequences or segments start from."""
    launch(tiny_steps_kernel, _tiny_steps(p.plan), p.k, p.v, kept.beta, kept.G, kept.AP, starts, dv, d_beta)


@per_plan
def _log_decay_gradient(plan: Plan) -> Constants:
    HV, NT, B = plan.chunk_grid()
    heads = min(16, triton.next_power_of_2(HV))
    return Constants(-(-HV // heads), NT, B, T=plan.T, HV=HV, C=CHUNK, D=plan.V, HEADS=heads, num_warps=4)


def launch_log_decay_gradient(
    plan: Plan, d_G: Tensor | None, overlap: Tensor | None, log_decay: Tensor | None, d_log_decay: Tensor
) -> None:
    """Fill the gradient of log-decay."""
    launch(log_decay_gradient_kernel, _log_decay_gradient(plan), d_G, overlap, log_decay, d_log_decay)


@per_plan
def _sum_of_groups(plan: Plan) -> Constants:
    rows, tile = plan.B * plan.T * plan.H, 16
    return Constants(-(-rows // tile), 2, rows=rows, GROUP=plan.HV // plan.H, D=plan.K, ROWS=tile, num_warps=4)


def launch_sum_of_groups(plan: Plan, dq_heads: Tensor, dk_heads: Tensor, dq: Tensor, dk: Tensor) -> None:
    """Sum dq and dk over the value heads that share a key head."""
    launch(sum_of_groups_kernel, _sum_of_groups(plan), dq_heads, dk_heads, dq, dk)
