"""The kernels of short convolutions over whole sequences (`short_conv`), for one input or for queries, keys and values.

Both kernels loop over tokens. A program computes the channels of one head for R runs of consecutive tokens. Each run is
within one row of the batch. The program advances all its runs together and keeps the last W - 1 inputs in registers. So
each input is loaded once, except the W - 1 before a run, which are loaded twice. The backward kernel also keeps the
last W - 1 `dz`. It goes W - 1 tokens past the end of the run, where the last `dx` become complete:
`dx_t = sum_j w_j dz_{t+j}`.

Tokens are loaded in groups: all loads of a group of GROUP tokens are issued before the first value is used. The taps,
the inputs before a token and the tokens of a group are tuples of tiles. Tuples of values before a token start with the
nearest one.
"""

# mypy: disable-error-code="assignment"
# Triton's loops over tuples run while compiling, where a name may take a longer tuple each time.

from functools import lru_cache

import torch

from deltazoo.ops.fused.choice import L2_NORM_EPS
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.row_operator import row_operator, sum_of_parts, sums_of_parts

_CHANNELS = 128
"""Channels of one program without a norm over heads."""

_TILE = 512
"""Elements of one token over all runs of a program: four per thread. Eight need twice the registers backward."""

_GROUP = 4
"""Number of tokens that are loaded together."""

_LONGEST_RUN = 64
"""Most tokens of a run. The backward pass computes the W - 1 past its end twice, which are few in comparison."""

_ENOUGH_PROGRAMS = 1024
"""Programs that fill a large GPU. With fewer, runs get shorter."""


@triton.jit
def _runs(program, B, T, RUN: tl.constexpr, R: tl.constexpr):
    """Row and first token of each run of a program, and the number of tokens that the row has from there on."""
    runs_per_row = tl.cdiv(T, RUN)
    run = program * R + tl.arange(0, R)
    row = run // runs_per_row
    first = (run % runs_per_row) * RUN
    return row, first, tl.where(row < B, T - first, 0)


@triton.jit
def _place(C, CK, CV, WIDTH: tl.constexpr, THREE: tl.constexpr):
    """The place of a program among those of THREE inputs side by side.

    It is its index along the tokens, the number of its input, its head there, the channels of the inputs before, and
    the channels of all.
    """
    q_heads = tl.cdiv(C, WIDTH)
    heads, channels = q_heads, C
    if THREE:
        k_heads = tl.cdiv(CK, WIDTH)
        heads, channels = q_heads + k_heads + tl.cdiv(CV, WIDTH), C + CK + CV
    program, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    number, before = 0, 0
    if THREE:
        number = (head >= q_heads).to(tl.int32) + (head >= q_heads + k_heads).to(tl.int32)
        before = tl.where(number == 0, 0, tl.where(number == 1, C, C + CK))
        head -= tl.where(number == 0, 0, tl.where(number == 1, q_heads, q_heads + k_heads))
    return program, number, head, before, channels


@triton.jit
def _channels(head, C, WIDTH: tl.constexpr, BC: tl.constexpr):
    """Channels of a head, and the mask of those that exist."""
    within = tl.arange(0, BC)
    columns = head * WIDTH + within
    return columns, (within < WIDTH) & (columns < C)


@triton.jit
def _taps(weight, columns, column_mask, W: tl.constexpr):
    """The weights of a channel, the current token's first."""
    taps = ()
    for i in tl.static_range(W):
        tap = tl.load(weight + columns * W + (W - 1 - i), mask=column_mask, other=0.0).to(tl.float32)
        taps = taps + (tap[None, :],)
    return taps


@triton.jit
def _group(rows, t, left, column_mask, C, GROUP: tl.constexpr):
    """Tokens t, t + 1, ... of each run, zero past the end of its row."""
    values = ()
    for i in tl.static_range(GROUP):
        mask = (t + i < left)[:, None] & column_mask[None, :]
        values = values + (tl.load(rows + (t + i) * C, mask=mask, other=0.0),)
    return values


@triton.jit
def _sequences(rows, t, left, N: tl.constexpr):
    """The packed sequences of tokens t, t + 1, ... of each run, -1 past the end."""
    sequences = ()
    for i in tl.static_range(N):
        sequences = sequences + (tl.load(rows + t + i, mask=t + i < left, other=-1).to(tl.int32),)
    return sequences


@triton.jit
def _before_run(x_rows, past, n, age, left, columns, column_mask, C, channels, W: tl.constexpr):
    """The inputs before each run, whose first token is token `age` of sequence n; the state holds those before n.

    x has C channels, and the state `channels`.
    """
    before = ()
    for i in tl.static_range(1, W):
        mask = ((age >= i) & (left > 0))[:, None] & column_mask[None, :]
        value = tl.load(x_rows - i * C, mask=mask, other=0.0).to(tl.float32)
        if past is not None:
            mask = ((age < i) & (left > 0))[:, None] & column_mask[None, :]
            offsets = (n[:, None].to(tl.int64) * channels + columns[None, :]) * (W - 1) + (age - i + W - 1)[:, None]
            value += tl.load(past + offsets, mask=mask, other=0.0).to(tl.float32)
        before = before + (value,)
    return before


@triton.jit
def _at_boundary(before, begins, past, n, columns, column_mask, channels, W: tl.constexpr):
    """The inputs before a token, from the state of sequence n if the token begins it."""
    chosen = ()
    for i in tl.static_range(1, W):
        value = 0.0
        if past is not None:
            offsets = (n[:, None].to(tl.int64) * channels + columns[None, :]) * (W - 1) + (W - 1 - i)
            value = tl.load(past + offsets, mask=begins[:, None] & column_mask[None, :], other=0.0).to(tl.float32)
        chosen = chosen + (tl.where(begins[:, None], value, before[i - 1]),)
    return chosen


@triton.jit
def _copies(value, N: tl.constexpr):
    """A tuple of N times `value`."""
    copies = ()
    for _ in tl.static_range(N):
        copies = copies + (value,)
    return copies


@triton.jit
def _advance(value, before, W: tl.constexpr):
    """The values before the next token: this token's value, and all but the oldest before."""
    advanced = ()
    if W > 1:
        advanced = (value,)
        for i in tl.static_range(W - 2):
            advanced = advanced + (before[i],)
    return advanced


@triton.jit
def _convolve(value, before, taps, W: tl.constexpr):
    z = value * taps[0]
    for i in tl.static_range(1, W):
        z += before[i - 1] * taps[i]
    return z


@triton.jit(do_not_specialize=["B", "T", "eps"])
def short_conv_forward_kernel(x, weight, past, sequence, cu_seqlens, y, k, k_weight, y_k, v, v_weight, y_v,
                              B, T, C, CK, CV, eps, W: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
                              NORM: tl.constexpr, NORM_V: tl.constexpr, RUN: tl.constexpr, GROUP: tl.constexpr,
                              R: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Convolution, SiLU if wanted, and division by the norm of the head; a tile holds one token of each run.

    x and y `[B, T, C]`, weight `[C, W]`, past `[N, all channels, W - 1]` or None, sequence `[T]` or None, cu_seqlens
    `[N + 1]` or None; k and v None, or beside the queries x; WIDTH channels of a program: those of a head if NORM.
    """
    PACKED: tl.constexpr = sequence is not None
    HALF: tl.constexpr = x.dtype.element_ty != tl.float32
    program, number, head, channels_before, channels = _place(C, CK, CV, WIDTH, k is not None)
    if past is not None:
        past += channels_before * (W - 1)
    if k is not None:
        if number == 1:
            x, weight, y, C = k, k_weight, y_k, CK
        if number == 2:
            x, weight, y, C = v, v_weight, y_v, CV
    columns, column_mask = _channels(head, C, WIDTH, BC)
    row, first, left = _runs(program, B, T, RUN, R)
    tokens = row.to(tl.int64) * T + first
    offsets = tokens[:, None] * C + columns[None, :]
    taps = _taps(weight, columns, column_mask, W)
    n, age = row, first
    if PACKED:
        n = tl.load(sequence + tokens, mask=left > 0, other=0).to(tl.int32)
        age = first - tl.load(cu_seqlens + n, mask=left > 0, other=0).to(tl.int32)
    before = _before_run(x + offsets, past, n, age, left, columns, column_mask, C, channels, W)
    for begin in range(0, RUN, GROUP):
        values = _group(x + offsets, begin, left, column_mask, C, GROUP)
        if PACKED:
            sequences = _sequences(sequence + tokens, begin, left, GROUP)
        for i in tl.static_range(GROUP):
            t = begin + i
            value = values[i].to(tl.float32)
            if PACKED:
                begins = (sequences[i] != n) & (t < left)
                n = sequences[i]
                before = _at_boundary(before, begins, past, n, columns, column_mask, channels, W)
            z = _convolve(value, before, taps, W)
            s = z * sigmoid(z, HALF) if SILU else z
            if NORM:
                unit = s * tl.rsqrt(tl.sum(s * s, axis=1) + eps)[:, None]
                s = unit if NORM_V else tl.where(number < 2, unit, s)
            mask = (t < left)[:, None] & column_mask[None, :]
            tl.store(y + offsets + t * C, s.to(y.dtype.element_ty), mask=mask)
            before = _advance(value, before, W)


@triton.jit
def _d_convolved(z, d, normed, eps, SILU: tl.constexpr, NORM: tl.constexpr, HALF: tl.constexpr):
    """Gradient of z from the gradient of y, whose heads were divided by their norms if `normed`."""
    s = z
    if SILU:
        gate = sigmoid(z, HALF)
        s = z * gate
    if NORM:
        inverse = tl.rsqrt(tl.sum(s * s, axis=1) + eps)[:, None]
        d = tl.where(normed, inverse * (d - s * (inverse * inverse * tl.sum(d * s, axis=1)[:, None])), d)
    if SILU:
        d *= gate + s * (1 - gate)
    return d


@triton.jit
def _d_input(d_z, d_z_before, n, n_before, taps, W: tl.constexpr, PACKED: tl.constexpr):
    """Gradient of the input W - 1 tokens back, from the gradients of z at the tokens of its sequence since."""
    total = d_z * taps[W - 1]
    if PACKED and W > 1:
        total = tl.where((n == n_before[W - 2])[:, None], total, 0.0)
    for i in tl.static_range(1, W):
        term = d_z_before[i - 1] * taps[W - 1 - i]
        if PACKED:
            term = tl.where((n_before[i - 1] == n_before[W - 2])[:, None], term, 0.0)
        total += term
    return total


@triton.jit
def _backward_token(
    t, value, d, n, before, d_z_before, n_before, d_x_rows, past, left, taps, columns, column_mask, C, channels, normed,
    eps, W: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute `dz` of token t, and store `dx` of the token W - 1 before it.

    Returns `dz`, and the inputs before the token in its sequence n.
    """
    if PACKED and W > 1:
        begins = (n != n_before[0]) & (t < left)
        before = _at_boundary(before, begins, past, n, columns, column_mask, channels, W)
    HALF: tl.constexpr = d_x_rows.dtype.scalar.element_ty != tl.float32
    d_z = _d_convolved(_convolve(value, before, taps, W), d, normed, eps, SILU, NORM, HALF)
    d_value = _d_input(d_z, d_z_before, n, n_before, taps, W, PACKED)
    target = t - (W - 1)
    mask = ((target >= 0) & (target < left))[:, None] & column_mask[None, :]
    tl.store(d_x_rows + target * C, d_value.to(d_x_rows.dtype.scalar.element_ty), mask=mask)
    return d_z, before


@triton.jit
def _add_products(sums, d_z, value, before, W: tl.constexpr):
    """Add a token's share to the gradients of the taps, the current token's first."""
    added = (sums[0] + d_z * value,)
    for i in tl.static_range(1, W):
        added = added + (sums[i] + d_z * before[i - 1],)
    return added


@triton.jit(do_not_specialize=["B", "T", "eps"])
def short_conv_backward_kernel(x, weight, past, sequence, cu_seqlens, d_y, d_x, d_weight, k, k_weight, d_y_k, d_k,
                               v, v_weight, d_y_v, d_v, B, T, C, CK, CV, eps, W: tl.constexpr, WIDTH: tl.constexpr,
                               SILU: tl.constexpr, NORM: tl.constexpr, NORM_V: tl.constexpr, RUN: tl.constexpr,
                               GROUP: tl.constexpr, R: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Gradient of x, and this program's part of the gradient of the weight.

    d_y and d_x `[B, T, C]`, d_weight `[programs along the tokens, all channels, W]`, parts of a sum; the others are
    those of the forward kernel.
    """
    PACKED: tl.constexpr = sequence is not None
    program, number, head, channels_before, channels = _place(C, CK, CV, WIDTH, k is not None)
    if past is not None:
        past += channels_before * (W - 1)
    if k is not None:
        if number == 1:
            x, weight, d_y, d_x, C = k, k_weight, d_y_k, d_k, CK
        if number == 2:
            x, weight, d_y, d_x, C = v, v_weight, d_y_v, d_v, CV
    normed = True if NORM_V else number < 2
    columns, column_mask = _channels(head, C, WIDTH, BC)
    row, first, left = _runs(program, B, T, RUN, R)
    tokens = row.to(tl.int64) * T + first
    offsets = tokens[:, None] * C + columns[None, :]
    taps = _taps(weight, columns, column_mask, W)
    n, age = row, first
    if PACKED:
        n = tl.load(sequence + tokens, mask=left > 0, other=0).to(tl.int32)
        age = first - tl.load(cu_seqlens + n, mask=left > 0, other=0).to(tl.int32)
    before = _before_run(x + offsets, past, n, age, left, columns, column_mask, C, channels, W)
    d_z_before = _copies(tl.zeros([R, BC], tl.float32), W - 1)
    n_before = _copies(n, W - 1)
    sums = _copies(tl.zeros([R, BC], tl.float32), W)
    for begin in range(0, RUN, GROUP):
        values = _group(x + offsets, begin, left, column_mask, C, GROUP)
        gradients = _group(d_y + offsets, begin, left, column_mask, C, GROUP)
        sequences = _copies(row, GROUP)
        if PACKED:
            sequences = _sequences(sequence + tokens, begin, left, GROUP)
        for i in tl.static_range(GROUP):
            value = values[i].to(tl.float32)
            d = gradients[i].to(tl.float32)
            d_z, before = _backward_token(
                begin + i, value, d, sequences[i], before, d_z_before, n_before, d_x + offsets, past, left, taps,
                columns, column_mask, C, channels, normed, eps, W, SILU, NORM, PACKED,
            )  # fmt: skip
            sums = _add_products(sums, d_z, value, before, W)
            before = _advance(value, before, W)
            d_z_before = _advance(d_z, d_z_before, W)
            n_before = _advance(sequences[i], n_before, W)
    values = _group(x + offsets, RUN, left, column_mask, C, W - 1)
    gradients = _group(d_y + offsets, RUN, left, column_mask, C, W - 1)
    sequences = _copies(row, W - 1)
    if PACKED:
        sequences = _sequences(sequence + tokens, RUN, left, W - 1)
    for i in tl.static_range(W - 1):
        value = values[i].to(tl.float32)
        d = gradients[i].to(tl.float32)
        d_z, before = _backward_token(
            RUN + i, value, d, sequences[i], before, d_z_before, n_before, d_x + offsets, past, left, taps, columns,
            column_mask, C, channels, normed, eps, W, SILU, NORM, PACKED,
        )  # fmt: skip
        before = _advance(value, before, W)
        d_z_before = _advance(d_z, d_z_before, W)
        n_before = _advance(sequences[i], n_before, W)
    parts = d_weight + (program.to(tl.int64) * channels + channels_before + columns) * W
    for i in tl.static_range(W):
        tl.store(parts + (W - 1 - i), tl.sum(sums[i], axis=0), mask=column_mask)


@lru_cache(maxsize=1024)
def _constants(
    B: int, T: int, C: int, CK: int, CV: int, W: int, silu: bool, head_dim: int, norm_v: bool
) -> tuple[int, Constants]:
    """Programs along the tokens, and the constants of both kernels; CK and CV are 0 for one input."""
    channels = (C, CK, CV) if CK else (C,)
    width = head_dim or min(_CHANNELS, *channels)
    block = max(16, triton.next_power_of_2(width))
    runs = max(1, _TILE // block)
    heads = sum([triton.cdiv(x, width) for x in channels])

    def programs(length: int) -> int:
        return max(1, triton.cdiv(B * triton.cdiv(T, length), runs))

    length = _LONGEST_RUN
    while length > 1 and (length >= 2 * T or (length > _GROUP and programs(length) * heads < _ENOUGH_PROGRAMS)):
        length //= 2
    constants = Constants(
        programs(length) * heads, B=B, T=T, C=C, CK=CK, CV=CV, eps=L2_NORM_EPS, W=W, WIDTH=width, SILU=int(silu),
        NORM=int(head_dim > 0), NORM_V=int(norm_v), RUN=length, GROUP=min(_GROUP, length), R=runs, BC=block,
        num_warps=min(8, max(1, block * runs // 128)),
    )  # fmt: skip
    return programs(length), constants


def _constants_of(q, k, v, weight, options):
    others = (0, 0) if k is None else (k.shape[2], v.shape[2])
    return _constants(*q.shape, *others, weight.shape[-1], *options)


def _forward(q, k, v, q_weight, k_weight, v_weight, past, sequence, cu_seqlens, *options):
    _, constants = _constants_of(q, k, v, q_weight, options)
    y, y_k, y_v = [None if x is None else torch.empty_like(x) for x in (q, k, v)]
    where = past, sequence, cu_seqlens
    launch(short_conv_forward_kernel, constants, q, q_weight, *where, y, k, k_weight, y_k, v, v_weight, y_v)
    return y, y_k, y_v


def _backward(q, k, v, q_weight, k_weight, v_weight, past, sequence, cu_seqlens, *options_and_gradients):
    *options, d_y, d_y_k, d_y_v = options_and_gradients
    programs, constants = _constants_of(q, k, v, q_weight, options)
    weights = q_weight, k_weight, v_weight
    d_q, d_k, d_v = [None if x is None else torch.empty_like(x) for x in (q, k, v)]
    channels = sum([weight.shape[0] for weight in weights if weight is not None])
    parts = q.new_empty(programs, channels, q_weight.shape[-1], dtype=torch.float32)
    launch(
        short_conv_backward_kernel, constants, q, q_weight, past, sequence, cu_seqlens, d_y, d_q, parts, k, k_weight,
        d_y_k, d_k, v, v_weight, d_y_v, d_v,
    )  # fmt: skip
    if k is None:
        return d_q, None, None, sum_of_parts(parts, q_weight.dtype).view_as(q_weight), None, None
    return d_q, d_k, d_v, *sums_of_parts(parts, weights)


_ARGUMENTS = (
    "Tensor q, Tensor? k, Tensor? v, Tensor q_weight, Tensor? k_weight, Tensor? v_weight, Tensor? past, "
    "Tensor? sequence, Tensor? cu_seqlens, bool silu, int head_dim, bool norm_v"
)

short_convs = row_operator(
    f"short_convs({_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _forward,
    _backward,
    backward_schema=f"short_convs_backward({_ARGUMENTS}, Tensor d_q, Tensor? d_k, Tensor? d_v)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
"""The operator of convolutions: of q, k and v, or of x in place of q, after a past of all their channels or without
one. Heads of `head_dim` channels are divided by their L2 norm, those of v if `norm_v`."""
