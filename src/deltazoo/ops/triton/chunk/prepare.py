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
    q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, slot, first, rows, i_h, least_gain,
    scale, H, HV, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr, HAS_BETA: tl.constexpr,
    STRICT: tl.constexpr, BY_GAIN: tl.constexpr, MICRO_STEPS: tl.constexpr, UNDECAYED: tl.constexpr,
    GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store A, P, step sizes and cumulative decay of the chunk `slot`, whose `rows` rows begin at row `first`.

    A largest erase gain below `least_gain` counts as `least_gain`.
    """
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
            gain = tl.maximum(tl.max(tl.max(gains, 1), 0), least_gain)
        if DECAY == "scalar":
            if UNDECAYED:
                D = tl.exp2(decay_before(b_G)[:, None] - b_G[None, :])
            L *= D
        store_inverse(
            tl.where(below, L, 0.0), gain, AP, large_gain, strict_L, slot, i_h, HV, C, STRICT, BY_GAIN, PRECISION
        )


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
        q, k, erase_key, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, slot, first, rows, i_h, 0.0,
        scale, H, HV, K, BK, C, DECAY, HAS_BETA, STRICT, BY_GAIN, MICRO_STEPS, UNDECAYED, GROUPED, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["chunks", "T", "NT", "segments", "segment_chunks", "H", "HV"])
def prepare_rest_kernel(
    q, k, beta, log_decay, stopped, AP, chunk_beta, G, large_gain, strict_L, chunks, scale, T, NT, segments,
    segment_chunks, H, HV, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, DECAY: tl.constexpr,
    GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the results of `prepare_kernel` for the chunks from the one on at which a fused kernel stopped.

    `stopped [B * segments, HV]` has the first such chunk of every head of a row or segment, or the number of its
    chunks. It counts as a chunk with a large erase gain, so
    that the strict scan begins there. There are few programs, each for up to 16 `chunks` of a head, since there is
    nearly always nothing to do. Grid (HV, programs, B * segments).
    """
    i_h, start, i_n = tl.program_id(0), tl.program_id(1) * chunks, tl.program_id(2)
    i_b, before = i_n // segments, i_n % segments * segment_chunks
    begin = tl.load(stopped + i_n * HV + i_h)
    end = tl.minimum(start + chunks, tl.minimum(NT - before, segment_chunks))
    slots, o = (i_b.to(tl.int64) * NT + before) * HV + i_h, start + tl.arange(0, 16)
    tl.store(large_gain + slots + o.to(tl.int64) * HV, 0, mask=o < tl.minimum(begin, end))
    for i_t in tl.range(tl.maximum(begin, start), end, num_stages=1):
        first, slot = i_b.to(tl.int64) * T + (before + i_t) * C, slots + tl.cast(i_t, tl.int64) * HV
        prepare_chunk(
            q, k, None, beta, log_decay, AP, chunk_beta, G, large_gain, strict_L, slot, first,
            tl.minimum(T - (before + i_t) * C, C), i_h, tl.where(i_t == begin, float("inf"), 0.0), scale, H, HV, K, BK,
            C, DECAY, True, False, True, 1, False, GROUPED, PRECISION,
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
    chunks = plan.neighbours
    HV, _, B = plan.chunk_grid()
    return Constants(
        HV, -(-plan.segment_chunks // chunks), B * plan.segments, chunks=chunks, scale=plan.scale, T=plan.T,
        NT=plan.NT, segments=plan.segments, segment_chunks=plan.segment_chunks, H=plan.H, HV=plan.HV, K=plan.K,
        BK=plan.tiles.BK, C=CHUNK, DECAY=plan.decay, GROUPED=plan.grouped, PRECISION="tf32", maxnreg=168,
        **plan.tiles.prepare,
    )  # fmt: skip


def launch_prepare_rest(p: Problem, kept: Kept, stopped: Tensor, strict_L: Tensor) -> None:
    """Fill the kept tensors of the chunks that the fused forward pass left, all of them strict."""
    launch(
        prepare_rest_kernel, _constants_of_rest(p.plan),
        p.q, p.k, p.beta, p.log_decay, stopped, kept.AP, kept.beta, kept.G, kept.large_gain, strict_L,
    )  # fmt: skip
