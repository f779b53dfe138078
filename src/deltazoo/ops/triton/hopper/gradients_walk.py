"""The walk of the fused backward pass (`gradients`): two groups of warps carry the gradient of the state, half of the
value channels each, from a head's last chunk to its first.
"""

from deltazoo.ops.triton.gluon import (
    fence_async_shared,
    gl,
    jit,
    mbarrier,
    tma,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.hopper.forward_chunks import halves
from deltazoo.ops.triton.hopper.scan import HALF, C, D, as_tile, split_inverse
from deltazoo.ops.triton.hopper.small_step_gradients import SMALL_STEP

SPACING = gl.constexpr(1073741824.0)
"""A number above any decay, and a power of two, so that its multiples are exact."""
# Rows of `gates`, which has two sets of them.
ENTRY = gl.constexpr(0)  # decay from the chunk's start to a token
EXIT = gl.constexpr(1)  # decay from a token to the chunk's end
LOG = gl.constexpr(2)  # cumulative log2-decay
STEP = gl.constexpr(3)  # step sizes
ROWS = gl.constexpr(4)
ORDER = gl.constexpr(8)  # after both sets: the multiples of SPACING


@jit
def first_ten(single):
    """Barriers full and empty of q, S, A and P, dS, and Z."""
    return (
        single.index(0), single.index(1), single.index(2), single.index(3), single.index(4), single.index(5),
        single.index(6), single.index(7), single.index(8), single.index(9),
    )  # fmt: skip


@jit
def last_five(single):
    """Barriers full and empty of W_P and W_L, and the one after which the two terms of A are separate."""
    return single.index(10), single.index(11), single.index(12), single.index(13), single.index(14)


PAIRS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of `[C, C]`, of pairs of tokens."""
ROW, COLUMN = gl.constexpr(gl.SliceLayout(1, PAIRS.value)), gl.constexpr(gl.SliceLayout(0, PAIRS.value))


@jit
def add_products(before, x, y):
    """`x * y` added to `before`, one block of 8 columns after the other."""
    if x.shape[1] > 8:
        x0, x1 = halves(x, x.shape[1])
        y0, y1 = halves(y, x.shape[1])
        total = add_products(add_products(before, x0, y0), x1, y1)
    elif before is None:
        total = x * y
    else:
        total = before + x * y
    return total


@jit
def row_products(x, y):
    """`sum(x * y, 1)` in fused multiply-adds; `gl.sum` of the products is a tree from Triton 3.8 on, which spills."""
    rows = gl.sum(add_products(None, x, y), 1)
    return gl.convert_layout(rows, gl.SliceLayout(1, x.type.layout), assert_trivial=True)


@jit
def decay_between(gates, s, z, DECAY: gl.constexpr):
    """The decay from token j to token i, `[C, C]`, 0 for j > i, and the multiples of SPACING between i and j.

    A minimum takes the place of masks, which would take a register for two elements.
    """
    between = gates.index(ORDER + z).load(ROW)[:, None] - gates.index(ORDER + z).load(COLUMN)[None, :]
    if DECAY == "scalar":
        logs = gates.index(ROWS * s + LOG)
        decay = gl.exp2(gl.minimum(logs.load(ROW)[:, None] - logs.load(COLUMN)[None, :], between))
    else:
        decay = gl.maximum(gl.minimum(between + SPACING, 1.0), 0.0)
    return decay, between


@jit
def gradient_of_P(dO_buffer, U_buffer, gates, scale, s, z, DECAY: gl.constexpr):
    """The gradient of P of a chunk times the decay and the scale: W_P."""
    zero = gl.full([C, C], 0.0, gl.float32, PAIRS)
    U = U_buffer.index(s).permute((1, 0))
    dP = warpgroup_mma(dO_buffer.index(s), U, zero, use_acc=False, is_async=True)
    decay, _ = decay_between(gates, s, z, DECAY)
    dP = warpgroup_mma_wait(0, deps=[dP])
    return (dP * decay * scale).to(U.dtype)


@jit
def gradient_of_L(Z_buffer, U_buffer, gates, s, z, DECAY: gl.constexpr):
    """The gradient of L of a chunk times the decay, W_L, and d_beta."""
    DTYPE: gl.constexpr = U_buffer.dtype
    SMALL: gl.constexpr = SMALL_STEP
    zero = gl.full([C, C], 0.0, gl.float32, PAIRS)
    U = U_buffer.index(s)
    U0, U1 = U.slice(0, HALF, dim=1).permute((1, 0)), U.slice(HALF, HALF, dim=1).permute((1, 0))
    ZU = warpgroup_mma(Z_buffer.index(0 + z), U0, zero, use_acc=False, is_async=True)
    ZU = warpgroup_mma(Z_buffer.index(1 + z), U1, ZU, is_async=True)
    decay, between = decay_between(gates, s, z, DECAY)
    below = gl.maximum(gl.minimum(between, 1.0), 0.0) * decay
    ZU = warpgroup_mma_wait(0, deps=[ZU])
    steps = gates.index(ROWS * s + STEP).load(ROW)
    d_steps = row_products(ZU, decay - below) / (steps * steps)
    rest = gl.where(steps > SMALL, 1.0, steps)  # the factor of beta that Z lacks
    return (ZU * below * -rest[:, None]).to(DTYPE), d_steps


@jit
def store_step_gradients(d_beta, d_steps, place, n):
    """Store d_beta of the nth chunk from the end."""
    scale, row, head, column, key_column, slot, first, B, T, HV, NC, ZERO = place
    token = first + (NC - 1 - n) * C + gl.arange(0, C, ROW)
    gl.store(d_beta + (row * T + token) * HV + head, d_steps, mask=token < T)


@jit
def walk(
    dv_tiles, buffers, bars, gates, G, overlap, d_beta, d_final, d_initial, place, PART: gl.constexpr,
    DECAY: gl.constexpr, STRICT: gl.constexpr,
):  # fmt: skip
    """Carry dS of half of the value channels, `[HALF, D]`, from the last chunk to the first, and compute dv of each.

    dv is `beta o Z`, but Z itself for tokens with a small beta, which `tiny_steps_kernel` completes. With decay it also
    stores `<S, dS>` of the state that enters each chunk, a sum per value channel. Without STRICT the first group
    computes the gradient of P before it walks through a chunk, the second that of L after it.
    """
    k_buffer, dO_buffer, U_buffer, q_buffer, S_buffer, A_buffer, P_buffer, dS_buffer, Z_buffer, W_buffer = buffers
    full, empty, single = bars
    q_full, q_empty, S_full, S_empty, AP_full, AP_empty, dS_full, dS_empty, Z_full, Z_empty = first_ten(single)
    WP_full, WP_empty, WL_full, WL_empty, A_split = last_five(single)
    scale, row, head, column, key_column, slot, first, B, T, HV, NC, ZERO = place
    DTYPE: gl.constexpr = k_buffer.dtype
    SMALL: gl.constexpr = SMALL_STEP
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    CHUNK: gl.constexpr = PAIRS  # tokens are columns
    STATE_LEFT: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    CHUNK_LEFT: gl.constexpr = gl.DotOperandLayout(0, CHUNK, 2)
    zero = gl.full([HALF, C], 0.0, gl.float32, CHUNK)
    o_v = PART * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, D, gl.SliceLayout(0, STATE))
    o_state = gl.program_id(0).to(gl.int64) * (D * D) + o_k[None, :] * D + o_v[:, None]
    if d_final is None:
        dS = gl.full([HALF, D], 0.0, gl.float32, STATE)
    else:
        dS = gl.load(d_final + o_state)
    for n in range(NC):
        s = n % 2
        z = n & ZERO
        parity = n & 1
        rounded = dS.to(DTYPE)
        chunk = (slot + (NC - 1 - n) * HV).to(gl.int64)
        k = k_buffer.index(s)
        if DECAY == "scalar":
            total = gl.exp2(gl.load(G + chunk * C + C - 1))
        mbarrier.wait(full.index(s), (n // 2) & 1)
        if PART == 0 and not STRICT:
            W_P = gradient_of_P(dO_buffer, U_buffer, gates, scale, s, z, DECAY)
            mbarrier.wait(WP_empty, parity ^ 1)
            W_buffer.index(0 + z).store(W_P)
            fence_async_shared()
            mbarrier.arrive(WP_full, count=1)
        # dU = exit o (k dS) + P^T dO
        left = gl.convert_layout(rounded, CHUNK_LEFT)
        dU = warpgroup_mma(left, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(dS_empty, parity ^ 1)
        dS_buffer.index(PART + z).store(rounded)
        fence_async_shared()
        dU = warpgroup_mma_wait(0, deps=[dU])
        dO = dO_buffer.index(s).slice(PART * HALF, HALF, dim=1).permute((1, 0)).load(CHUNK)
        mbarrier.arrive(dS_full, count=1)  # dO has been read too, where `gradients` writes
        mbarrier.wait(AP_full, parity)
        if STRICT:
            split_inverse(A_buffer, W_buffer.index(1), PART)
            mbarrier.arrive(A_split, count=1)
        if DECAY == "scalar":
            dU = dU * gates.index(ROWS * s + EXIT).load(COLUMN)[None, :]
        dU = warpgroup_mma(gl.convert_layout(dO, CHUNK_LEFT), P_buffer.permute((1, 0)), dU, is_async=True)
        if DECAY == "scalar":
            entry = gates.index(ROWS * s + ENTRY).load(COLUMN)
            dO = (dO.to(gl.float32) * (entry * scale)[None, :]).to(DTYPE)
            dS = dS * total
        else:
            dO = (dO.to(gl.float32) * scale).to(DTYPE)
        if STRICT:
            mbarrier.wait(q_full, parity)
            dS = warpgroup_mma(gl.convert_layout(dO, STATE_LEFT), q_buffer.index(0), dS, is_async=True)
            dU, dS = warpgroup_mma_wait(0, deps=[dU, dS])
        else:
            dU = warpgroup_mma_wait(0, deps=[dU])
        # Z = A^T dU, dS' = total o dS + (scale entry o dO)^T q - (beta entry o Z)^T k
        left = gl.convert_layout(dU.to(DTYPE), CHUNK_LEFT)
        if STRICT:
            mbarrier.wait(A_split, parity)
            left_rest = gl.convert_layout((dU - dU.to(DTYPE).to(gl.float32)).to(DTYPE), CHUNK_LEFT)
        Z = warpgroup_mma(left, A_buffer.permute((1, 0)), zero, use_acc=False, is_async=True)
        if STRICT:
            Z = warpgroup_mma(left, W_buffer.index(1).permute((1, 0)), Z, is_async=True)
            Z = warpgroup_mma(left_rest, A_buffer.permute((1, 0)), Z, is_async=True)
            Z = warpgroup_mma_wait(0, deps=[Z])
        else:
            mbarrier.wait(q_full, parity)
            dS = warpgroup_mma(gl.convert_layout(dO, STATE_LEFT), q_buffer.index(0), dS, is_async=True)
            Z, dS = warpgroup_mma_wait(0, deps=[Z, dS])
        mbarrier.arrive(AP_empty, count=1)
        mbarrier.arrive(q_empty, count=1)
        steps = gates.index(ROWS * s + STEP).load(COLUMN)
        if DECAY == "scalar":
            dX = Z * (-steps * gates.index(ROWS * s + ENTRY).load(COLUMN))[None, :]
        else:
            dX = Z * -steps[None, :]
        dS = warpgroup_mma(gl.convert_layout(dX.to(DTYPE), STATE_LEFT), k, dS, is_async=True)
        if STRICT:
            dX_rest = (dX - dX.to(DTYPE).to(gl.float32)).to(DTYPE)
            dS = warpgroup_mma(gl.convert_layout(dX_rest, STATE_LEFT), k, dS, is_async=True)
        tma.store_wait(0)
        mbarrier.wait(Z_empty, parity ^ 1)
        Z = Z * gl.where(steps > SMALL, steps, 1.0)[None, :]
        Z_buffer.index(PART + z).permute((1, 0)).store(Z.to(DTYPE))
        fence_async_shared()
        tile = as_tile(Z_buffer.index(PART + z), HALF)
        tma_store(dv_tiles, [row, first + (NC - 1 - n) * C, column + PART * HALF], tile)
        dS = warpgroup_mma_wait(0, deps=[dS])
        mbarrier.arrive(Z_full, count=1)
        if PART == 1 and not STRICT:
            mbarrier.wait(Z_full, parity)
            W_L, d_steps = gradient_of_L(Z_buffer, U_buffer, gates, s, z, DECAY)
            mbarrier.wait(WL_empty, parity ^ 1)
            W_buffer.index(1 + z).store(W_L)
            fence_async_shared()
            mbarrier.arrive(WL_full, count=1)
            store_step_gradients(d_beta, d_steps, place, n)
        mbarrier.arrive(empty.index(s), count=1)
        if DECAY == "scalar":
            mbarrier.wait(S_full, parity)
            part = row_products(dS, S_buffer.index(PART + z).load(STATE).to(gl.float32))
            gl.store(overlap + chunk * D + o_v, part)
            mbarrier.arrive(S_empty, count=1)
    if d_initial is not None:
        if NC > 0:
            gl.store(d_initial + o_state, dS)
    tma.store_wait(0)
