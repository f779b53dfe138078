"""A scan over tokens with one number per channel, for further states of rules: linear, or damped by its size.

    h_t = a_t p_{t-1} + b_t        p_t = h_t / (1 + c_t h_t)

`a` is the decay, `b` the number that a token adds, `c` the damping; c = 0 is a decayed sum. A piece of it is a map
`p -> B + D p / (1 + C p)`; of two pieces one after another, with `r = 1 / (1 + C_2 B_1)`,

    B = B_2 + D_2 B_1 r            C = C_1 + C_2 D_1 r            D = D_1 D_2 r^2

without cancellation if a, b and c are not negative. The gradients are a linear scan from the last token to the first:

    dp_{t-1} = dy_t + a_t s_t^2 dp_t, s_t = 1 / (1 + c_t h_t)        dh_t = s_t^2 dp_t        dc_t = -p_t^2 dp_t
"""

from functools import lru_cache

import torch
from torch import Tensor

from deltazoo.ops.dtypes import at_least_float32, wide_dtype
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.row_operator import row_operator
from deltazoo.ops.recompute import recomputable

_ELEMENTS = 2048
"""Elements that a program scans at once, of at most 32 channels."""


def token_scan(
    decay: Tensor,
    added: Tensor,
    damping: Tensor | None = None,
    start: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    fused: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The states p before each token and after the last, where `p_t = h_t / (1 + c_t h_t)`, `h_t = a_t p_{t-1} + b_t`.

    Args:
        decay: a, `[B, T, D]`; or `[B, T, 1]`, one number per token.
        added: b, `[B, T, D]`; not negative with a damping.
        damping: c, `[B, T, D]`, not negative; None: zero.
        start: p before the first token, `[N, D]` float32 (float64 stays); None: zeros.
        cu_seqlens: `[N + 1]` boundaries of sequences packed along T, with B = 1; None: N = B.

    Returns:
        `[B, T, D]` in the dtype of added, and `[N, D]` float32 (float64 stays).

    Raises:
        ValueError: tensors that do not fit each other.
    """
    B, T, D = added.shape
    N = B if cu_seqlens is None else len(cu_seqlens) - 1
    shapes = decay.shape[:2], decay.shape[2], *(None if x is None else x.shape for x in (damping, start))
    if (
        shapes[0] != (B, T)
        or shapes[1] not in (1, D)
        or shapes[2] not in (None, (B, T, D))
        or (shapes[3] not in (None, (N, D)))
    ):
        given = ", ".join(str(None if x is None else tuple(x.shape)) for x in (decay, added, damping, start))
        raise ValueError(
            f"expected decay [B, T, D or 1], added and damping [B, T, D] and start [N, D] with N = {N}, got {given}"
        )
    if decay.shape[2] != D and decay.requires_grad:
        decay = decay.expand(B, T, D)
    if start is None:
        start = added.new_zeros(N, D, dtype=wide_dtype(added))
    if T > 1 and takes_kernel(fused, added, decay, damping, start, cu_seqlens):
        return recomputable(_token_scan, decay, added, damping, start, cu_seqlens)
    return recomputable(_scan_in_torch, decay, added, damping, start, cu_seqlens)


def _scan_in_torch(
    decay: Tensor, added: Tensor, damping: Tensor | None, start: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    B, T, D = added.shape
    a, b = at_least_float32(decay).expand(B, T, D), at_least_float32(added)
    c = None if damping is None else at_least_float32(damping)
    if T == 1 and cu_seqlens is None:
        h = a[:, 0] * start + b[:, 0]
        return start[:, None].to(added.dtype), h if c is None else h / (1 + c[:, 0] * h)
    a, b = a.flatten(0, 1), b.flatten(0, 1)
    c = None if c is None else c.flatten(0, 1)
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, B * T + 1, T, device=a.device)
    holds_tokens = cu_seqlens.diff() > 0
    first = torch.where(holds_tokens, cu_seqlens[:-1], 0).long()
    # The state before a sequence becomes part of its first token, which then depends on no other.
    before_first = torch.where(holds_tokens[:, None], start, 0)
    begins = torch.zeros_like(a[:, 0]).index_add(0, first, holds_tokens.to(a.dtype))[:, None] > 0
    started = torch.zeros_like(b).index_add(0, first, before_first)
    b = b + a * started
    a = torch.where(begins, 0, a)
    after = _associative_scan(a, b, c, T)
    before = torch.where(begins, started, after.roll(1, 0))
    last = torch.where(holds_tokens, cu_seqlens[1:] - 1, 0).long()
    final = torch.where(holds_tokens[:, None], after[last], start)
    return before.view(B, T, D).to(added.dtype), final


def _associative_scan(a: Tensor, b: Tensor, c: Tensor | None, longest: int) -> Tensor:
    """B of all tokens up to each, `[M, D]`, where a is zero at the first of every `longest` tokens at most."""
    if c is None:
        D, B, C = a, b, None
    else:
        s = 1 / (1 + c * b)
        D, B, C = a * s * s, b * s, c * a * s
    step = 1
    while step < longest:
        d, p = D[step:], B[:-step]
        if C is None:
            B = torch.cat([B[:step], B[step:] + d * p])
        else:
            r = 1 / (1 + C[step:] * p)
            B = torch.cat([B[:step], B[step:] + d * p * r])
            C = torch.cat([C[:step], C[:-step] + C[step:] * D[:-step] * r])
            d = d * r * r
        D = torch.cat([D[:step], d * D[:-step]])
        step *= 2
    return B


@triton.jit
def _sum_then(D, B, next_D, next_B):
    return D * next_D, next_B + next_D * B


@triton.jit
def _then(D, B, C, next_D, next_B, next_C):
    r = 1 / (1 + next_C * B)
    return D * next_D * r * r, next_B + next_D * B * r, C + next_C * D * r


@triton.jit
def _span(cu_seqlens, T, D, BC: tl.constexpr):
    """Sequence and channels of a program, and the sequence's first token among those of all rows, and length."""
    blocks = tl.cdiv(D, BC)
    n = tl.program_id(0) // blocks
    columns = tl.program_id(0) % blocks * BC + tl.arange(0, BC)
    if cu_seqlens is None:
        first, length = n.to(tl.int64) * T, T
    else:
        first = tl.load(cu_seqlens + n).to(tl.int64)
        length = (tl.load(cu_seqlens + n + 1) - first).to(tl.int32)
    return n, columns, first, length


@triton.jit
def _load(x, at, columns, mask, D, SHARED: tl.constexpr, other):
    """A tile of x `[M, D]`, or of `[M, 1]`."""
    if SHARED:
        places = at[:, None] + 0 * columns[None, :]
    else:
        places = at[:, None] * D + columns[None, :]
    return tl.load(x + places, mask=mask, other=other).to(tl.float32)


@triton.jit(do_not_specialize=["T"])
def token_scan_forward_kernel(a, b, c, start, y, final, cu_seqlens, T, D, SHARED: tl.constexpr, BT: tl.constexpr,
                              BC: tl.constexpr):  # fmt: skip
    """Row t of a tile holds the token before t, so that the scan gives the state before t; grid (N * blocks of D,)."""
    n, columns, first, length = _span(cu_seqlens, T, D, BC)
    inside = columns < D
    carried = tl.load(start + n * D + columns, mask=inside, other=0.0)
    rows = tl.arange(0, BT)
    for begin in range(0, length + 1, BT):  # the state after the last token is that before the one that would follow
        tokens = begin + rows
        at = first + tokens - 1
        mask = ((tokens > 0) & (tokens <= length))[:, None] & inside[None, :]
        A, B = _load(a, at, columns, mask, D, SHARED, 1.0), _load(b, at, columns, mask, D, False, 0.0)
        if c is None:
            A, B = tl.associative_scan((A, B), 0, _sum_then)
            states = B + A * carried[None, :]
        else:
            C = _load(c, at, columns, mask, D, False, 0.0)
            s = 1 / (1 + C * B)
            A, B, C = tl.associative_scan((A * s * s, B * s, C * A * s), 0, _then)
            states = B + A * carried[None, :] / (1 + C * carried[None, :])
        held = (tokens < length)[:, None] & inside[None, :]
        tl.store(y + (at + 1)[:, None] * D + columns[None, :], states.to(y.dtype.element_ty), mask=held)
        carried = tl.sum(tl.where((rows == BT - 1)[:, None], states, 0.0), axis=0)
    tl.store(final + n * D + columns, carried, mask=inside)  # rows after the last token change nothing


@triton.jit(do_not_specialize=["T"])
def token_scan_backward_kernel(a, b, c, y, cu_seqlens, d_y, d_final, d_a, d_b, d_c, d_start, T, D,
                               SHARED: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr):  # fmt: skip
    """Row t of a tile, from the last token on, holds the token after t, so that the scan gives dp_t."""
    n, columns, first, length = _span(cu_seqlens, T, D, BC)
    inside = columns < D
    carried = tl.load(d_final + n * D + columns, mask=inside, other=0.0)
    rows = tl.arange(0, BT)
    for begin in range(0, length + 1, BT):
        tokens = length - 1 - begin - rows
        at = first + tokens
        after = ((tokens + 1 < length) & (tokens + 1 >= 0))[:, None] & inside[None, :]
        factor = _load(a, at + 1, columns, after, D, SHARED, 1.0)
        if c is not None:
            P = _load(y, at + 1, columns, after, D, False, 0.0)
            h = factor * P + _load(b, at + 1, columns, after, D, False, 0.0)
            s = 1 / (1 + _load(c, at + 1, columns, after, D, False, 0.0) * h)
            factor = factor * s * s
        G = _load(d_y, at + 1, columns, after, D, False, 0.0)
        factor, G = tl.associative_scan((factor, G), 0, _sum_then)
        G += factor * carried[None, :]  # dp_t; of the token before the first, the gradient of the start
        carried = tl.sum(tl.where((rows == BT - 1)[:, None], G, 0.0), axis=0)
        held = (tokens >= 0)[:, None] & inside[None, :]
        places = at[:, None] * D + columns[None, :]
        P = _load(y, at, columns, held, D, False, 0.0)
        if c is not None:
            h = _load(a, at, columns, held, D, SHARED, 0.0) * P + _load(b, at, columns, held, D, False, 0.0)
            s = 1 / (1 + _load(c, at, columns, held, D, False, 0.0) * h)
            tl.store(d_c + places, (-G * h * h * s * s).to(d_c.dtype.element_ty), mask=held)
            G *= s * s
        tl.store(d_b + places, G.to(d_b.dtype.element_ty), mask=held)
        if d_a is not None:
            tl.store(d_a + places, (G * P).to(d_a.dtype.element_ty), mask=held)
    tl.store(d_start + n * D + columns, carried, mask=inside)


@lru_cache(maxsize=1024)
def _constants(N: int, T: int, D: int, shared: bool) -> Constants:
    channels = min(32, triton.next_power_of_2(D))
    tokens = min(256, _ELEMENTS // channels)
    grid = N * -(-D // channels)
    return Constants(grid, T=T, D=D, SHARED=shared, BT=tokens, BC=channels, num_warps=4)


def _constants_of(decay: Tensor, added: Tensor, sequences: int) -> Constants:
    _, T, D = added.shape
    return _constants(sequences, T, D, decay.shape[2] != D)


def _forward(decay, added, damping, start, cu_seqlens):
    before, final = torch.empty_like(added), torch.empty_like(start)
    given = decay, added, damping, start, before, final, cu_seqlens
    launch(token_scan_forward_kernel, _constants_of(decay, added, len(start)), *given)
    return before, final


def _backward(decay, added, damping, before, cu_seqlens, d_before, d_final):
    d_decay = None if decay.shape != added.shape else torch.empty_like(decay)
    d_added, d_damping = torch.empty_like(added), None if damping is None else torch.empty_like(damping)
    d_start = torch.empty_like(d_final)
    gradients = d_decay, d_added, d_damping, d_start
    given = decay, added, damping, before, cu_seqlens, d_before, d_final
    launch(token_scan_backward_kernel, _constants_of(decay, added, len(d_final)), *given, *gradients)
    return gradients


_token_scan = row_operator(
    "token_scan(Tensor decay, Tensor added, Tensor? damping, Tensor start, Tensor? cu_seqlens) -> (Tensor, Tensor)",
    _forward,
    _backward,
    fake=lambda decay, added, damping, start, cu_seqlens: (added.new_empty(added.shape), start.new_empty(start.shape)),
    backward_schema="token_scan_backward(Tensor decay, Tensor added, Tensor? damping, Tensor before, "
    "Tensor? cu_seqlens, Tensor d_before, Tensor d_final) -> (Tensor, Tensor, Tensor, Tensor)",
    backward_fake=lambda decay, added, damping, before, cu_seqlens, d_before, d_final: (
        None if decay.shape != added.shape else decay.new_empty(decay.shape),
        added.new_empty(added.shape),
        None if damping is None else damping.new_empty(damping.shape),
        d_final.new_empty(d_final.shape),
    ),
    save=lambda ctx, inputs, results: ctx.save_for_backward(*inputs[:3], results[0], inputs[4]),
    gradients=lambda backward, ctx, d_before, d_final: (*backward(*ctx.saved_tensors, d_before, d_final), None),
)
