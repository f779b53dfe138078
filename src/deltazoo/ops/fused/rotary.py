"""The rotary embedding (arXiv:2104.09864), the half-split form of Llama, in one pass over memory each way.

    y_i = cos_i x_i - sin_i x_{i+h}      y_{i+h} = cos_{i+h} x_{i+h} + sin_{i+h} x_i      i < h = d/2

for the first d channels of a head; the others stay. The backward pass is the transpose, and keeps only the angles.
"""

from functools import lru_cache

import torch
from torch import Tensor

from deltazoo.ops.autograd_modes import records_gradients
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.optional_triton import Constants, launch, tl, triton
from deltazoo.ops.fused.row_operator import row_operator

_ELEMENTS = 4096
"""Elements that a program turns at a time."""


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor], *, fused: bool | None = None) -> Tensor:
    """Heads whose first d channels are turned by their angles; channels from d on stay.

    Args:
        x: `[B, T, H, K]`.
        rotary: cosines and sines `[B or 1, T, d]`, d even and at most K: channels i and i + d/2 form a pair.
        fused: see `takes_kernel`. The kernel gives no gradient to the angles, and computes in float32; torch computes
            in x's dtype.

    Returns:
        `[B, T, H, K]` in x's dtype.

    Raises:
        ValueError: angles for a kernel that do not fit x or need a gradient.
    """
    if takes_kernel(fused, x, *rotary, trained=rotary):
        _require_angles(x, *rotary)
        return _operator(x, *rotary)
    cos, sin = (part[:, :, None].to(x.dtype) for part in rotary)
    turned, rest = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def _require_angles(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.ndim != 4 or cos.shape != sin.shape or cos.shape[:-1] not in (x.shape[:2], (1, x.shape[1])):
        shapes = ", ".join(str(tuple(part.shape)) for part in (x, cos, sin))
        raise ValueError(f"expected x [B, T, H, K] with cos and sin [B or 1, T, d], got {shapes}")
    if cos.shape[-1] % 2 or not 0 < cos.shape[-1] <= x.shape[-1]:
        raise ValueError(f"the angles must be of an even number of the {x.shape[-1]} channels, got {cos.shape[-1]}")
    if records_gradients(cos, sin):
        raise ValueError("the fused rotary embedding gives no gradient to its angles: detach them")


@triton.jit(do_not_specialize=["R", "angle_rows"])
def rotary_kernel(x, cos, sin, y, R, angle_rows, H: tl.constexpr, K: tl.constexpr, D: tl.constexpr,
                  BACKWARD: tl.constexpr, BR: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
                  BREST: tl.constexpr):  # fmt: skip
    """One program turns all heads of BR tokens, of R in all. The angles begin anew after `angle_rows` tokens."""
    tokens = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    heads, pairs = tl.arange(0, BH), tl.arange(0, BD)
    angles = (tokens % angle_rows)[:, None] * D + pairs[None, :]
    known = (tokens < R)[:, None] & (pairs < D // 2)[None, :]
    cos_first = tl.load(cos + angles, mask=known, other=0.0).to(tl.float32)[:, None, :]
    cos_second = tl.load(cos + angles + D // 2, mask=known, other=0.0).to(tl.float32)[:, None, :]
    sin_first = tl.load(sin + angles, mask=known, other=0.0).to(tl.float32)[:, None, :]
    sin_second = tl.load(sin + angles + D // 2, mask=known, other=0.0).to(tl.float32)[:, None, :]
    rows = tokens[:, None] * (H * K) + heads[None, :] * K
    mask = known[:, None, :] & (heads < H)[None, :, None]
    offsets = rows[:, :, None] + pairs[None, None, :]
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + D // 2, mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        sin_first, sin_second = -sin_second, -sin_first
    tl.store(y + offsets, (cos_first * first - sin_first * second).to(y.dtype.element_ty), mask=mask)
    tl.store(y + offsets + D // 2, (cos_second * second + sin_second * first).to(y.dtype.element_ty), mask=mask)
    if D < K:
        rest = tl.arange(0, BREST)
        offsets = rows[:, :, None] + D + rest[None, None, :]
        mask = ((tokens < R)[:, None] & (heads < H)[None, :])[:, :, None] & (rest < K - D)[None, None, :]
        tl.store(y + offsets, tl.load(x + offsets, mask=mask), mask=mask)


@lru_cache(maxsize=1024)
def _constants(R: int, angle_rows: int, H: int, K: int, D: int, backward: bool) -> Constants:
    heads, pairs, rest = (triton.next_power_of_2(max(1, size)) for size in (H, D // 2, K - D))
    rows = max(1, _ELEMENTS // (heads * max(2 * pairs, rest)))
    return Constants(
        max(1, -(-R // rows)), R=R, angle_rows=angle_rows, H=H, K=K, D=D, BACKWARD=backward,
        BR=rows, BH=heads, BD=pairs, BREST=rest, num_warps=4,
    )  # fmt: skip


def _turn(x, cos, sin, backward):
    B, T, H, K = x.shape
    y = torch.empty_like(x)
    constants = _constants(B * T, max(1, cos.shape[0] * T), H, K, cos.shape[-1], backward)
    launch(rotary_kernel, constants, x, cos, sin, y)
    return y


_operator = row_operator(
    "rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor",
    lambda x, cos, sin: _turn(x, cos, sin, False),
    lambda d_y, cos, sin: _turn(d_y, cos, sin, True),
    backward_schema="rotary_backward(Tensor d_y, Tensor cos, Tensor sin) -> Tensor",
    save=lambda ctx, inputs, y: ctx.save_for_backward(*inputs[1:]),
    gradients=lambda backward, ctx, d_y: (backward(d_y, *ctx.saved_tensors), None, None),
)
