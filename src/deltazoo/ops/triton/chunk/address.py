"""Address arithmetic of all chunk kernels: beginnings and lengths of chunks and sequences.

Per-chunk arrays are indexed by slot, `chunk * HV + head`. Without packing, chunk number `b * NT + i` is chunk i of
row b. Packed sequences share one row: `chunk_offsets[n]` is the first chunk of sequence n, `chunk_sequence[i]` the
sequence of chunk i. The arrays are allocated for `T / C + N` chunks; spare chunks have no tokens.

A row of a chunk is a micro-step. Queries, log-decays, outputs and their gradients exist once per token (`tokens_of`).
"""

import triton
import triton.language as tl


@triton.jit
def key_head(i_h, H, HV, GROUPED: tl.constexpr):
    """The key head that value head i_h reads; without GROUPED there are as many key heads as value heads."""
    return i_h // (HV // H) if GROUPED else i_h


@triton.jit
def chunk_bounds(cu_seqlens, chunk_sequence, chunk_offsets, i_t, i_b, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a chunk in the flattened tokens (int64), and its number of tokens, <= 0 for spare chunks."""
    if PACKED:
        i_n = tl.load(chunk_sequence + i_t)
        start = tl.load(cu_seqlens + i_n).to(tl.int64)
        stop = tl.load(cu_seqlens + i_n + 1).to(tl.int64)
        first = start + (i_t - tl.load(chunk_offsets + i_n)).to(tl.int64) * C
        rows = tl.minimum(stop - first, C).to(tl.int32)
    else:
        first = i_b.to(tl.int64) * T + i_t * C
        rows = tl.minimum(T - i_t * C, C)
    return first, rows


@triton.jit
def tokens_of(first, o_c, MICRO_STEPS: tl.constexpr):
    """The tokens of the micro-steps `first + o_c`, where sequences begin at multiples of MICRO_STEPS.

    Returns the first token (that of `first`, in its dtype), the distance of every row's token from it, and masks of the
    rows that are the first and the last micro-step of their token.
    """
    step = o_c
    if o_c.shape[0] % MICRO_STEPS != 0:  # otherwise chunks begin at multiples too
        step += (first % MICRO_STEPS).to(tl.int32)
    place = step % MICRO_STEPS
    return first // MICRO_STEPS, step // MICRO_STEPS, place == 0, place == MICRO_STEPS - 1


@triton.jit
def sequence_bounds(cu_seqlens, chunk_offsets, i_n, T, NT, segments, chunks, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a sequence or segment (int64), its length, and its first chunk (int64).

    Rows that are not packed may be cut into `segments` pieces of `chunks` chunks, the last one shorter.
    """
    if PACKED:
        first = tl.load(cu_seqlens + i_n).to(tl.int64)
        length = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - first).to(tl.int32)
        chunk = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        row, start = (i_n // segments).to(tl.int64), i_n % segments * chunks
        first = row * T + start * C
        length = tl.minimum(T - start * C, chunks * C)
        chunk = row * NT + start
    return first, length, chunk
