"""The chunk-parallel preparation: A, P, step sizes and cumulative decay of every chunk; no decay, or one per head.

One program owns one chunk of one value head.
"""

import triton
import triton.language as tl
from torch import Tensor

from deltazoo.ops.triton.chunk.address import chunk_bounds, key_head, tokens_of
from deltazoo.ops.triton.chunk.decay_factors import LOG2_FLOOR, LOG2E
from deltazoo.ops.triton.chunk.inverse import store_inverse
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem
from deltazoo.ops.triton.tiles import CHUNK, HOPPER


@triton.jit
def store_scores(P, AP, slot, C: tl.constexpr, HAS_BETA: tl.constexpr):
    """Store the transposed P of a chunk, after A if there is one; entries below its diagonal are zero."""
    o_c = tl.arange(0, C)
    AP += slot * ((2 if HAS_BETA else 1) * C * C) + (C * C if HAS_BETA else 0)
    tl.store(AP + o_c[None, :] * C + o_c[:, None], P.to(AP.dtype.element_ty))


@triton.jit
def decay_before(G):
    """The cumulative log2-decay `G [C]` of the row before, zero for the first row."""
    o_c = tl.arange(0, G.shape[0])
    return tl.where(o_c == 0, 0.0, tl.gather(G, tl.maximum(o_c - 1, 0), 0))


@triton.jit
def prepare_chunk(
    q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, slot, first, rows, i_h, scale, H, HV,
    K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, HAS_BETA: tl.constexpr,
    STRICT: tl.constexpr, BY_GAIN: tl.constexpr, MICRO_STEPS: tl.constexpr, UNDECAYED: tl.constexpr,
    GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store A, P, step sizes and cumulative decay of the chunk `slot`, whose `rows` rows begin at row `first`."""
    o_c, o_k = tl.arange(0, C), tl.arange(0, BK)
    m_c, m_ck = o_c < rows, (o_c < rows)[:, None] & (o_k < K)[None, :]
    below, above = o_c[:, None] > o_c[None, :], o_c[:, None] < o_c[None, :]
    base = (first * H + key_head(i_h, H, HV, GROUPED)) * K
    o_qk = o_c[:, None] * (H * K) + o_k[None, :]
    b_k = tl.load(k + base + o_qk, mask=m_ck, other=0.0)
    b_e = b_k
    if erase_key is not None:
        b_e = tl.load(erase_key + base + o_qk, mask=m_ck, other=0.0)
    if MICRO_STEPS == 1:
        b_q = tl.load(q + base + o_qk, mask=m_ck, other=0.0)
        if DECAY == "scalar":
            b_g = tl.load(log_decay + (first * HV + i_h) + o_c * HV, mask=m_c, other=0.0).to(tl.float32) * LOG2E
    else:
        token, o_t, begins, ends = tokens_of(first, o_c, MICRO_STEPS)
        p_q = q + (token * H + key_head(i_h, H, HV, GROUPED)) * K
        b_q = tl.load(p_q + o_t[:, None] * (H * K) + o_k[None, :], mask=m_ck & ends[:, None], other=0.0)
        if DECAY == "scalar":
            p_g = log_decay + (token * HV + i_h)
            b_g = tl.load(p_g + o_t * HV, mask=m_c & begins, other=0.0).to(tl.float32) * LOG2E
    if HAS_BETA:
        b_beta = tl.load(beta + (first * HV + i_h) + o_c * HV, mask=m_c, other=0.0).to(tl.float32)
    P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale
    if DECAY == "scalar":
        b_G = tl.cumsum(tl.maximum(b_g, LOG2_FLOOR), 0)
        tl.store(G + slot * C + o_c, b_G)
        D = tl.exp2(b_G[:, None] - b_G[None, :])  # may be infinite above the diagonal
        P *= D
    store_scores(tl.where(above, 0.0, P), AP, slot, C, HAS_BETA)
    if HAS_BETA:
        tl.store(chunk_beta + slot * C + o_c, b_beta)
        L, gain = b_beta[:, None] * tl.dot(b_e, tl.trans(b_k), input_precision=PRECISION), 0.0
        if BY_GAIN:
            gains = tl.where(above | below, 0.0, L)
            if erase_key is not None:  # the gain of any two tokens, which together can flip the sign of the state
                gains = tl.abs(tl.where(above, 0.0, L))
            gain = tl.max(tl.max(gains, 1), 0)
        if DECAY == "scalar":
            if UNDECAYED:
                D = tl.exp2(decay_before(b_G)[:, None] - b_G[None, :])
            L *= D
        store_inverse(tl.where(below, L, 0.0), gain, AP, large_gain, strict_L, slot, C, STRICT, BY_GAIN, PRECISION)


@triton.jit(do_not_specialize=["T", "NT", "H", "HV"])
def prepare_kernel(
    q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, cu_seqlens, chunk_sequence,
    chunk_offsets, scale, T, NT, H, HV, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    HAS_BETA: tl.constexpr, STRICT: tl.constexpr, BY_GAIN: tl.constexpr, MICRO_STEPS: tl.constexpr,
    UNDECAYED: tl.constexpr, GROUPED: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store A, P, step sizes and cumulative log2-decay G of every chunk; no decay, or one per head. Grid (HV, NT, B).

    The erase key is the key unless there is an `erase_key`.
    """
    i_h, i_t, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, rows = chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C, PACKED)
    slot = (i_b.to(tl.int64) * NT + i_t) * HV + i_h
    if rows <= 0:
        if BY_GAIN:
            tl.store(large_gain + slot, 0)
        return
    prepare_chunk(
        q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, slot, first, rows, i_h, scale,
        H, HV, K, BK, C, DECAY, HAS_BETA, STRICT, BY_GAIN, MICRO_STEPS, UNDECAYED, GROUPED, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "slots", "T", "NT", "H", "HV"])
def prepare_rest_kernel(
    q, k, beta, log_decay, large_gain, AP, chunk_beta, G, chunks, slots, scale, T, NT, H, HV, K: tl.constexpr,
    BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the results of `prepare_kernel`, and the strict inverse, of all chunks whose `large_gain` is set.

    One program handles up to 16 neighbouring `chunks`, of `slots` in all, of several heads: the chunks that a fused
    kernel left are all those of a head from one on, if there are any at all. Grid (programs,).
    """
    start, o = tl.program_id(0) * chunks, tl.arange(0, 16)
    count = tl.minimum(slots - start, chunks)
    if tl.max(tl.load(large_gain + start + o, mask=o < count, other=0), 0) == 0:
        return
    for slot in tl.range(start, start + count, num_stages=1, disable_licm=True):
        if tl.load(large_gain + slot) != 0:
            i_n, i_h = slot // HV, slot % HV
            i_b, i_t = tl.cast(i_n // NT, tl.int64), i_n % NT
            prepare_chunk(
                q, k, None, beta, log_decay, AP, chunk_beta, G, None, None, tl.cast(slot, tl.int64),
                i_b * T + i_t * C, tl.minimum(T - i_t * C, C), i_h, scale, H, HV, K, BK, C, DECAY, True,
                True, False, 1, False, GROUPED, PRECISION,
            )  # fmt: skip


@per_plan
def _constants(plan: Plan) -> Constants:
    options = plan.tiles.prepare
    more = plan.num_micro_steps > 1 or plan.has_erase_key
    if more and plan.half and plan.tiles.BK <= 128 and plan.card.shared >= HOPPER:  # older GPUs spill
        options = options | dict(maxnreg=128)  # a few registers less let four programs share a multiprocessor
    return Constants(
        *plan.chunk_grid(), DECAY=plan.decay, UNDECAYED=plan.undecayed, BK=plan.tiles.BK, **plan.precisions,
        **plan.per_chunk, **options,
    )  # fmt: skip


def launch_prepare(p: Problem, kept: Kept, strict_L: Tensor | None) -> None:
    """Fill the kept tensors of chunks, and L of strict ones; no decay, or one per head."""
    launch(
        prepare_kernel, _constants(p.plan),
        p.q, p.k, p.erase_key, p.beta, p.log_decay, kept.AP, kept.beta, kept.G, kept.large_gain, strict_L,
        *p.chunk_offsets,
    )  # fmt: skip


@per_plan
def _constants_of_rest(plan: Plan) -> Constants:
    grid, neighbours = plan.neighbour_grid()
    return Constants(
        *grid, scale=plan.scale, T=plan.T, NT=plan.NT, H=plan.H, HV=plan.HV, K=plan.K, BK=plan.tiles.BK, C=CHUNK,
        DECAY=plan.decay, GROUPED=plan.grouped, PRECISION="tf32", **neighbours, **plan.tiles.invert,
    )  # fmt: skip


def launch_prepare_rest(p: Problem, kept: Kept) -> None:
    """Fill the kept tensors of the chunks that the fused forward pass left, all of them strict."""
    launch(
        prepare_rest_kernel, _constants_of_rest(p.plan),
        p.q, p.k, p.beta, p.log_decay, kept.large_gain, kept.AP, kept.beta, kept.G,
    )  # fmt: skip
