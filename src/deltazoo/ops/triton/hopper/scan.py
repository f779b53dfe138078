"""The serial part on Hopper, with the arithmetic of `chunk.scan` and copies beside the products.

Two partitions of four warps hold 64 value channels of the state each, transposed `[V, K]`, in the registers of their
matrix products. One more warp copies the operands of the next chunks into rings of buffers with the copy engine (TMA)
and prepares the factors of step sizes and decay. Barriers in shared memory say which buffers are full and which have
been read; the two partitions never wait for each other. Operands that a chunk needs late (A, P, and separate keys to
write with) have a ring of their own: with fewer stages of it there are more of all others.

A strict launch multiplies with two terms where the plain one does: the inverse, the operand that it multiplies, and
corrections.
"""

from typing import Any

from torch import Tensor

from deltazoo.ops.triton.chunk.scan import Start
from deltazoo.ops.triton.gluon import (
    fence_async_shared,
    gl,
    jit,
    matrix_tiles,
    mbarrier,
    reinterpret,
    states_tiles,
    tma,
    tma_load,
    tma_store,
    token_tiles,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from deltazoo.ops.triton.launch import Constants, launch
from deltazoo.ops.triton.plan import Plan, per_plan
from deltazoo.ops.triton.problem import Kept, Problem
from deltazoo.ops.triton.tiles import CHUNK, gluon_scan_options

C = gl.constexpr(64)  # tokens per chunk
D = gl.constexpr(128)  # channels of a head, of keys and of values
HALF = gl.constexpr(64)  # value channels of a partition

# Rows of factors per stage, one factor per token. Without a decay per head there is one row, of step sizes.
ERASE = gl.constexpr(0)  # step size, and decay of the state that the erase reads
OUT = gl.constexpr(1)  # decay of the state that the output reads, and scale
WRITE = gl.constexpr(2)  # decay of a correction until the chunk's end
BETA = gl.constexpr(3)  # step size; the reverse scan needs none

STATE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
"""Layout of `[64 value channels, 128 key channels]`, a product's accumulator."""
TOKENS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Layout of `[64 value channels, 64 tokens]`."""
LEFT = gl.constexpr(gl.DotOperandLayout(0, TOKENS.value, 2))
"""Layout of the left operand of a product; that of `[64, 128]` products is the same under another name."""
LEFT_STATE = gl.constexpr(gl.DotOperandLayout(0, STATE.value, 2))


@jit
def as_tile(buffer, channels: gl.constexpr):
    """A buffer `[tokens, channels]` in the form of the copy engine, a tile of one row of the batch."""
    return reinterpret(buffer, buffer.dtype, [1, C, channels], gl.NVMMASharedLayout(128, 16, 3))


@jit
def store_factors(
    factors, totals, stage, beta, G, chunk, scale, ROWS: gl.constexpr, DECAY: gl.constexpr, UNDECAYED: gl.constexpr
):
    """Store the factors of one chunk, by one warp."""
    LANES: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    o_c = gl.arange(0, C, LANES)
    row = stage * ROWS
    b_beta = gl.load(beta + chunk * C + o_c)
    if DECAY == "scalar":
        b_G = gl.load(G + chunk * C + o_c)
        g_last = gl.load(G + chunk * C + o_c * 0 + C - 1)
        b_F = b_G
        if UNDECAYED:
            b_F = gl.load(G + chunk * C + o_c - 1, mask=o_c > 0, other=0.0)
        o_total = gl.arange(0, 1, LANES) + C - 1
        totals.index(stage).store(gl.exp2(gl.load(G + chunk * C + o_total)))
        factors.index(row + ERASE).store(b_beta * gl.exp2(b_F))
        factors.index(row + OUT).store(gl.exp2(b_G) * scale)
        factors.index(row + WRITE).store(gl.exp2(g_last - b_G))
        if ROWS > BETA:
            factors.index(row + BETA).store(b_beta)
    else:
        factors.index(row + ERASE).store(b_beta)
    if DECAY == "channel":
        o_k = gl.arange(0, D, gl.BlockedLayout([4], [32], [1], [0]))
        totals.index(stage).store(gl.exp2(gl.load(G + chunk * D + o_k)))


@jit
def factor(factors, row):
    """The factor of every token, as a row that multiplies `[value channels, tokens]`."""
    return factors.index(row).load(gl.SliceLayout(0, TOKENS))[None, :]


@jit
def decayed(S, totals, stage, DECAY: gl.constexpr):
    """The state `[value channels, key channels]` times the decay of a whole chunk."""
    if DECAY == "scalar":
        S *= totals.index(stage).load(gl.SliceLayout(1, STATE))[:, None]
    if DECAY == "channel":
        S *= totals.index(stage).load(gl.SliceLayout(0, STATE))[None, :]
    return S


@jit
def copy_partition(
    tiles, rings, barriers, factors, totals, beta, G, place, DECAY: gl.constexpr, UNDECAYED: gl.constexpr,
    SEPARATE: gl.constexpr, HAS_V: gl.constexpr, OUTPUT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """Copy the operands of `count` chunks, as stages become free, and store their factors."""
    scale, row, first, key_column, value_column, slot, HV, count = place
    q_tiles, k_in_tiles, k_out_tiles, v_tiles, AP_tiles = tiles
    q_ring, k_in_ring, k_out_ring, v_ring, AP_ring = rings
    full, empty, late_full, late_empty, _ = barriers
    ROWS: gl.constexpr = 4 if DECAY == "scalar" else 1
    BYTES: gl.constexpr = (1 + OUTPUT) * C * D * 2 + HAS_V * PARTS * C * HALF * 2
    LATE_BYTES: gl.constexpr = (1 + OUTPUT) * C * C * 2 + SEPARATE * C * D * 2
    for i in range(count):
        stage = i % STAGES
        token = first + i * C
        chunk = slot + i * HV
        mbarrier.wait(empty.index(stage), ((i // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, BYTES)
        at_keys = [row, token, key_column]
        tma_load(k_in_tiles, at_keys, bar, as_tile(k_in_ring.index(stage), D))
        if HAS_V:
            for part in gl.static_range(PARTS):
                at_values = [row, token, value_column + part * HALF]
                tma_load(v_tiles, at_values, bar, as_tile(v_ring.index(stage * PARTS + part), HALF))
        if OUTPUT:
            tma_load(q_tiles, at_keys, bar, as_tile(q_ring.index(stage), D))
        store_factors(factors, totals, stage, beta, G, chunk, scale, ROWS, DECAY, UNDECAYED)
        mbarrier.arrive(bar, count=1)
        late = i % LATE_STAGES
        mbarrier.wait(late_empty.index(late), ((i // LATE_STAGES) & 1) ^ 1)
        bar = late_full.index(late)
        mbarrier.expect(bar, LATE_BYTES)
        tma_load(AP_tiles, [chunk * (2 * C), 0], bar, AP_ring.index(late))
        if SEPARATE:
            tma_load(k_out_tiles, at_keys, bar, as_tile(k_out_ring.index(late), D))


@jit
def store_tile(tiles, coordinates, buffer, x):
    """Start to copy x `[64 value channels, 64 tokens]` to `tiles` through the buffer `[tokens, value channels]`."""
    buffer.permute((1, 0)).store(x)
    fence_async_shared()
    tma_store(tiles, coordinates, as_tile(buffer, HALF))


@jit
def split_inverse(A, rest, HALF_OF_ROWS: gl.constexpr):
    """Separate the two terms of a strict inverse (`chunk.inverse.store_strict`): 32 rows of A, columns of `rest`."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = HALF_OF_ROWS * 32 + gl.arange(0, 32, gl.SliceLayout(1, ROWS))[:, None]
    upper = row <= gl.arange(0, C, gl.SliceLayout(0, ROWS))[None, :]
    half = A.slice(HALF_OF_ROWS * 32, 32, dim=0)
    both = half.load(ROWS)
    none = gl.full([32, C], 0.0, A.dtype, ROWS)
    half.store(gl.where(upper, both, none))
    rest.slice(HALF_OF_ROWS * 32, 32, dim=1).permute((1, 0)).store(gl.where(upper, none, both))
    fence_async_shared()


@jit
def second_term(x, DTYPE: gl.constexpr):
    """The difference between float32 x and x in 16 bits, in 16 bits."""
    return (x - x.to(DTYPE).to(gl.float32)).to(DTYPE)


@jit
def state_partition(
    walk, PART: gl.constexpr, DECAY: gl.constexpr, SEPARATE: gl.constexpr, INITIAL: gl.constexpr, HAS_V: gl.constexpr,
    OUTPUT: gl.constexpr, KEEP: gl.constexpr, BY_TOKEN: gl.constexpr, STRICT: gl.constexpr, PARTS: gl.constexpr,
    STAGES: gl.constexpr, LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """Carry the state of 64 value channels through `count` chunks."""
    tiles, rings, barriers, factors, totals, buffers, initial_state, final_state, place, store_final = walk
    scale, row, first, value_column, slot, B, HV, count, state_slot = place
    out_tiles, U_tiles, states_tiles = tiles
    q_ring, k_in_ring, k_out_ring, v_ring, AP_ring = rings
    full, empty, late_full, late_empty, split = barriers
    out_buffers, states_buffers, rest_ring = buffers
    out_buffer = out_buffers.index(PART)
    states_buffer = states_buffers.index(PART)
    DTYPE: gl.constexpr = k_in_ring.dtype
    ROWS: gl.constexpr = 4 if DECAY == "scalar" else 1
    o_v = value_column % D + PART * HALF + gl.arange(0, HALF, gl.SliceLayout(1, STATE))
    o_k = gl.arange(0, D, gl.SliceLayout(0, STATE))
    o_state = state_slot * (D * D) + o_k[None, :] * D + o_v[:, None]
    if INITIAL == "state":
        S = gl.load(initial_state + o_state)
    elif INITIAL == "identity":
        S = gl.where(o_v[:, None] == o_k[None, :], 1.0, 0.0)
    else:
        S = gl.full([HALF, D], 0.0, gl.float32, STATE)
    zero = gl.full([HALF, C], 0.0, gl.float32, TOKENS)
    column = value_column + PART * HALF
    S_rounded = S.to(DTYPE)
    out = zero.to(DTYPE)
    for i in range(count):
        stage = i % STAGES
        token = first + i * C
        late = i % LATE_STAGES
        AP = AP_ring.index(late)
        A = AP.slice(0, C, dim=0) if OUTPUT else AP
        k_in = k_in_ring.index(stage)
        if SEPARATE:
            k_out = k_out_ring.index(late)
        else:
            k_out = k_in
        mbarrier.wait(full.index(stage), (i // STAGES) & 1)
        S_left = gl.convert_layout(S_rounded, LEFT)
        Y = warpgroup_mma(S_left, k_in.permute((1, 0)), zero, use_acc=False, is_async=True)
        if OUTPUT:
            O = warpgroup_mma(S_left, q_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            # The output of the chunk before is stored during these products.
            if i > 0:
                tma.store_wait(0)
                store_tile(out_tiles, [row, token - C, column], out_buffer, out)
        if KEEP:
            tma.store_wait(1)
            states_buffer.store(S_rounded)
            fence_async_shared()
            if BY_TOKEN:
                head_column = value_column - value_column % D
                half = value_column % D // HALF + PART
                tile = as_tile(states_buffer, D)
                tma_store(states_tiles, [row + half * B, token, head_column], tile)
            else:
                tma_store(states_tiles, [(slot + i * HV) * D + value_column % D + PART * HALF, 0], states_buffer)
        mbarrier.arrive(empty.index((i + STAGES - 1) % STAGES), count=1, pred=i > 0)
        mbarrier.arrive(late_empty.index((i + LATE_STAGES - 1) % LATE_STAGES), count=1, pred=i > 0)
        # Factors that later products need are loaded during the products before.
        erase = factor(factors, stage * ROWS + ERASE)
        v = zero
        if HAS_V:
            v = v_ring.index(stage * PARTS + PART).permute((1, 0)).load(TOKENS).to(gl.float32)
            v *= factor(factors, stage * ROWS + (BETA if DECAY == "scalar" else ERASE))
        mbarrier.wait(late_full.index(late), (i // LATE_STAGES) & 1)
        if STRICT:
            for half in gl.static_range(2 // PARTS):
                split_inverse(A, rest_ring.index(late), PART + half)
            mbarrier.arrive(split.index(late), count=1)
        if OUTPUT:
            Y = warpgroup_mma_wait(1, deps=[Y])
        else:
            Y = warpgroup_mma_wait(0, deps=[Y])
        R = v - erase * Y
        R_left = gl.convert_layout(R.to(DTYPE), LEFT)
        if STRICT:
            R_rest = gl.convert_layout(second_term(R, DTYPE), LEFT)
            mbarrier.wait(split.index(late), (i // LATE_STAGES) & 1)
        U = warpgroup_mma(R_left, A, zero, use_acc=False, is_async=True)
        if STRICT:
            U = warpgroup_mma(R_left, rest_ring.index(late), U, is_async=True)
            U = warpgroup_mma(R_rest, A, U, is_async=True)
        S = decayed(S, totals, stage, DECAY)
        if DECAY == "scalar":
            write = factor(factors, stage * ROWS + WRITE)
            read = factor(factors, stage * ROWS + OUT)
        if OUTPUT:
            U, O = warpgroup_mma_wait(0, deps=[U, O])
        else:
            U = warpgroup_mma_wait(0, deps=[U])
        if DECAY == "scalar":
            written = U * write
        else:
            written = U
        S = warpgroup_mma(gl.convert_layout(written.to(DTYPE), LEFT_STATE), k_out, S, is_async=True)
        if STRICT:
            S = warpgroup_mma(gl.convert_layout(second_term(written, DTYPE), LEFT_STATE), k_out, S, is_async=True)
        if OUTPUT:
            if DECAY == "scalar":
                O *= read
            else:
                O *= scale
            U_left = gl.convert_layout(U.to(DTYPE), LEFT)
            O = warpgroup_mma(U_left, AP.slice(C, C, dim=0), O, is_async=True)
        if KEEP:
            tma.store_wait(1)
            store_tile(U_tiles, [row, token, column], out_buffer, U.to(DTYPE))
        if OUTPUT:
            S, O = warpgroup_mma_wait(0, deps=[S, O])
            out = O.to(DTYPE)
        else:
            S = warpgroup_mma_wait(0, deps=[S])
        S_rounded = S.to(DTYPE)
    if OUTPUT:
        if count > 0:
            tma.store_wait(0)
            store_tile(out_tiles, [row, first + (count - 1) * C, column], out_buffer, out)
    if final_state is not None and not (STRICT and KEEP and not OUTPUT):  # in that case nothing follows
        if store_final:
            gl.store(final_state + o_state, S)
    tma.store_wait(0)


@jit
def first_large(large_gain, slot, count, HV):
    """The first of `count` chunks with a large erase gain; `count` if there is none."""
    o = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    first = count
    for start in range(0, count, 128):
        chunk = start + o
        large = gl.load(large_gain + slot + chunk * HV, mask=chunk < count, other=0)
        first = gl.minimum(first, gl.min(gl.where(large != 0, chunk, count), 0))
    return first


@jit(do_not_specialize=["T", "NT", "segments", "chunks", "HK", "HV"])
def hopper_scan_kernel(
    q_tiles, k_in_tiles, k_out_tiles, v_tiles, AP_tiles, out_tiles, U_tiles, states_tiles, beta, G, large_gain, stopped,
    initial_state, final_state, scale, T, NT, segments, chunks, HK, HV, DECAY: gl.constexpr, BY_GAIN: gl.constexpr,
    SEPARATE: gl.constexpr, UNDECAYED: gl.constexpr, INITIAL: gl.constexpr, HAS_V: gl.constexpr, OUTPUT: gl.constexpr,
    KEEP: gl.constexpr, BY_TOKEN: gl.constexpr, STRICT: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr,
    LATE_STAGES: gl.constexpr,
):  # fmt: skip
    """`chunk.scan.scan_kernel` for heads of 128 channels, 16-bit inputs and rows that are not packed.

    One program owns `64 * PARTS` value channels of one value head of one row or segment. Grid (2 / PARTS * HV * N).
    With BY_TOKEN the states lie in the form that `backward_kernel` reads. `stopped`, if given, has the number of the
    chunk at which each head begins.
    """
    DTYPE: gl.constexpr = k_in_tiles.dtype
    OPERAND: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SPLIT: gl.constexpr = 2 // PARTS
    REST: gl.constexpr = stopped is not None
    part = gl.program_id(0) % SPLIT
    i_h = gl.program_id(0) // SPLIT % HV
    i_n = gl.program_id(0) // (SPLIT * HV)
    row, first_chunk = i_n // segments, i_n % segments * chunks
    first = first_chunk * C
    slot = (row * NT + first_chunk) * HV + i_h
    count = gl.cdiv(gl.minimum(T - first, chunks * C), C)
    store_final = True
    if stopped is not None:
        done = gl.load(stopped + i_n * HV + i_h)
        first += done * C
        slot += done * HV
        count -= done
    if BY_GAIN and not (STRICT and REST):
        stop = first_large(large_gain, slot, count, HV)
        if STRICT:
            count -= stop
            first += stop * C
            slot += stop * HV
        else:
            if KEEP and not OUTPUT:  # only the launch with STRICT reads the state, if chunks remain for it
                store_final = stop < count
            count = stop
    if REST or STRICT and BY_GAIN:
        if count <= 0:  # most often
            return

    k_in_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
    q_ring, k_out_ring, v_ring, rest_ring, out_buffers, states_buffers, totals = (k_in_ring,) * 7
    if OUTPUT:
        q_ring = gl.allocate_shared_memory(DTYPE, [STAGES, C, D], OPERAND)
    if SEPARATE:
        k_out_ring = gl.allocate_shared_memory(DTYPE, [LATE_STAGES, C, D], OPERAND)
    if HAS_V:
        v_ring = gl.allocate_shared_memory(DTYPE, [STAGES * PARTS, C, HALF], OPERAND)
    AP_ring = gl.allocate_shared_memory(DTYPE, [LATE_STAGES, 2 * C if OUTPUT else C, C], OPERAND)
    if STRICT:
        rest_ring = gl.allocate_shared_memory(DTYPE, [LATE_STAGES, C, C], OPERAND)
    if OUTPUT or KEEP:
        out_buffers = gl.allocate_shared_memory(DTYPE, [PARTS, C, HALF], OPERAND)
    if KEEP:
        states_buffers = gl.allocate_shared_memory(DTYPE, [PARTS, HALF, D], OPERAND)
    factors = gl.allocate_shared_memory(gl.float32, [STAGES * (4 if DECAY == "scalar" else 1), C], PLAIN)
    if DECAY != "none":
        totals = gl.allocate_shared_memory(gl.float32, [STAGES, D if DECAY == "channel" else 1], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    late_full = gl.allocate_shared_memory(gl.int64, [LATE_STAGES, 1], mbarrier.MBarrierLayout())
    late_empty = gl.allocate_shared_memory(gl.int64, [LATE_STAGES, 1], mbarrier.MBarrierLayout())
    split = late_full
    if STRICT:
        split = gl.allocate_shared_memory(gl.int64, [LATE_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)
        mbarrier.init(empty.index(stage), count=PARTS)
    for stage in gl.static_range(LATE_STAGES):
        mbarrier.init(late_full.index(stage), count=1)
        mbarrier.init(late_empty.index(stage), count=PARTS)
        if STRICT:
            mbarrier.init(split.index(stage), count=PARTS)
    fence_async_shared()

    key_column = i_h // (HV // HK) * D
    value_column = i_h * D + part * HALF
    rings = (q_ring, k_in_ring, k_out_ring, v_ring, AP_ring)
    barriers = (full, empty, late_full, late_empty, split)
    state_slot = (i_n * HV + i_h).to(gl.int64)
    rows = gl.num_programs(0) // (SPLIT * HV * segments)
    place = (scale, row, first, value_column, slot, rows, HV, count, state_slot)
    walk = (
        (out_tiles, U_tiles, states_tiles), rings, barriers, factors, totals, (out_buffers, states_buffers, rest_ring),
        initial_state, final_state, place, store_final,
    )  # fmt: skip
    tiles = (q_tiles, k_in_tiles, k_out_tiles, v_tiles, AP_tiles)
    place = (scale, row, first, key_column, value_column, slot, HV, count)
    # A tuple in a variable would turn constants into run-time values, so the arguments stand here.
    if PARTS == 2:
        gl.warp_specialize([
            (state_partition, (walk, 0, DECAY, SEPARATE, INITIAL, HAS_V, OUTPUT, KEEP,
                               BY_TOKEN, STRICT, PARTS, STAGES, LATE_STAGES)),
            (state_partition, (walk, 1, DECAY, SEPARATE, INITIAL, HAS_V, OUTPUT, KEEP,
                               BY_TOKEN, STRICT, PARTS, STAGES, LATE_STAGES)),
            (copy_partition, (tiles, rings, barriers, factors, totals, beta, G, place, DECAY, UNDECAYED, SEPARATE,
                              HAS_V, OUTPUT, PARTS, STAGES, LATE_STAGES)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (state_partition, (walk, 0, DECAY, SEPARATE, INITIAL, HAS_V, OUTPUT, KEEP,
                               BY_TOKEN, STRICT, PARTS, STAGES, LATE_STAGES)),
            (copy_partition, (tiles, rings, barriers, factors, totals, beta, G, place, DECAY, UNDECAYED, SEPARATE,
                              HAS_V, OUTPUT, PARTS, STAGES, LATE_STAGES)),
        ], [1], [24])  # fmt: skip


def gluon_scan_arguments(plan: Plan, options: dict[str, int], **named: Any) -> Constants:
    """Constants of a serial scan in Gluon, with a program for one part of 64 value channels of a head, or for both."""
    return Constants(
        2 // options["PARTS"] * plan.HV * plan.scans, UNDECAYED=plan.undecayed, scale=plan.scale, T=plan.T,
        NT=plan.NT, HV=plan.HV, **plan.scanned_heads, **named, **options,
    )  # fmt: skip


@per_plan
def _constants(plan: Plan, start: Start, values: bool, output: bool, keep: bool, strict: bool) -> Constants:
    options = gluon_scan_options(output, keep, values, plan.decay, plan.separate, strict, plan.many_scans)
    return gluon_scan_arguments(
        plan, options, HAS_V=values, INITIAL=start, OUTPUT=output, KEEP=keep,
        BY_TOKEN=keep and plan.fused_backward, STRICT=strict,
    )  # fmt: skip


def launch_scan(
    p: Problem, kept: Kept, start: Start, v: Tensor | None, initial: Tensor | None, final: Tensor | None,
    output: Tensor | None, U: Tensor | None, states: Tensor | None, strict: bool, stopped: Tensor | None = None,
) -> None:  # fmt: skip
    """Launch `stages.scan_once` from `start`; it stores the output, or U with the states, or both, or neither."""
    plan, ((q_in, k_in, k_out), (beta, G, AP, large_gain)) = p.plan, kept.scanned(p)
    assert q_in is not None and k_in is not None and k_out is not None and AP is not None
    with_output = output is not None
    launch(
        hopper_scan_kernel, _constants(plan, start, v is not None, with_output, states is not None, strict),
        token_tiles(q_in, plan.K) if with_output else None,
        token_tiles(k_in, plan.K),
        token_tiles(k_out, plan.K) if plan.separate else None,
        None if v is None else token_tiles(v, plan.V // 2),
        matrix_tiles(AP, 2 * CHUNK if with_output else CHUNK),
        None if output is None else token_tiles(output, plan.V // 2),
        None if U is None else token_tiles(U, plan.V // 2),
        None if states is None else states_tiles(states),
        beta, G, large_gain, stopped, initial, final,
    )  # fmt: skip
