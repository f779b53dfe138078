"""Short causal convolution with SiLU and, per head, an L2 norm: one pass over memory, forward and backward.

    z_t = sum_i w_i x_{t-i}      s = z * sigmoid(z)  or z      y = s  or, per head,  s / sqrt(|s|^2 + eps)

Inputs before a row, or before a packed sequence, come from its state. The backward pass keeps only the inputs.
"""

from functools import lru_cache

import torch
import triton

from deltazoo.ops.fused.kernels import L2_NORM_EPS, REFUSAL
from deltazoo.ops.fused.kernels.short_conv_kernels import short_conv_backward_kernel, short_conv_forward_kernel
from deltazoo.ops.fused.kernels.sum_of_parts import sum_of_parts
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["short_conv", "short_convs"]

_CHANNELS = 128
"""Channels of one program without a norm over heads."""

_TILE = 512
"""Elements of one token over all runs of a program: four per thread. Eight need twice the registers backward."""

_GROUP = 4
"""Tokens that are loaded together."""

_LONGEST_RUN = 64
"""Most tokens of a run. The backward pass computes the W - 1 past its end twice, which are few in comparison."""

_ENOUGH_PROGRAMS = 1024
"""Programs that fill a large GPU. With fewer, runs get shorter."""


@lru_cache(maxsize=1024)
def _constants(B: int, T: int, C: int, W: int, silu: bool, head_dim: int) -> tuple[int, Constants]:
    """Programs along the tokens, and the constants of both kernels."""
    width = head_dim or min(_CHANNELS, C)
    block = max(16, triton.next_power_of_2(width))
    runs = max(1, _TILE // block)
    heads = triton.cdiv(C, width)

    def programs(length: int) -> int:
        return max(1, triton.cdiv(B * triton.cdiv(T, length), runs))

    length = _LONGEST_RUN
    while length > 1 and (length >= 2 * T or (length > _GROUP and programs(length) * heads < _ENOUGH_PROGRAMS)):
        length //= 2
    constants = Constants(
        programs(length) * heads, B=B, T=T, C=C, eps=L2_NORM_EPS, W=W, WIDTH=width, SILU=int(silu),
        NORM=int(head_dim > 0), RUN=length, GROUP=min(_GROUP, length), R=runs, BC=block,
        num_warps=min(8, max(1, block * runs // 128)),
    )  # fmt: skip
    return programs(length), constants


def _forward(x, weight, past, sequence, cu_seqlens, silu, head_dim):
    x, weight = x.contiguous(), weight.contiguous()
    past = None if past is None else past.contiguous()
    y = torch.empty_like(x)
    _, constants = _constants(*x.shape, weight.shape[-1], silu, head_dim)
    with torch.cuda.device_of(x):
        launch(short_conv_forward_kernel, constants, x, weight, past, sequence, cu_seqlens, y)
    return y


def _backward(x, weight, past, sequence, cu_seqlens, silu, head_dim, d_y):
    x, weight, d_y = x.contiguous(), weight.contiguous(), d_y.contiguous()
    past = None if past is None else past.contiguous()
    d_x = torch.empty_like(x)
    programs, constants = _constants(*x.shape, weight.shape[-1], silu, head_dim)
    parts = x.new_empty(programs, *weight.shape, dtype=torch.float32)
    with torch.cuda.device_of(x):
        launch(short_conv_backward_kernel, constants, x, weight, past, sequence, cu_seqlens, d_y, d_x, parts)
        d_weight = sum_of_parts(parts, weight.dtype)
    return d_x, d_weight


_ARGUMENTS = "Tensor x, Tensor weight, Tensor? past, Tensor? sequence, Tensor? cu_seqlens, bool silu, int head_dim"

short_conv = DifferentiableOperator(
    f"short_conv({_ARGUMENTS}) -> Tensor",
    _forward,
    fake=lambda x, *others: x.new_empty(x.shape),
    backward=Operator(
        f"short_conv_backward({_ARGUMENTS}, Tensor d_y) -> (Tensor, Tensor)",
        _backward,
    ),
    refusal=REFUSAL,
)
"""`short_conv(x, weight, past, sequence, cu_seqlens, silu, head_dim)`, see `deltazoo.ops.fused.fused_short_conv`."""


def _forward_three(q, k, v, q_weight, k_weight, v_weight, sequence, cu_seqlens, silu, q_head, k_head, v_head):
    calls = zip((q, k, v), (q_weight, k_weight, v_weight), (q_head, k_head, v_head), strict=True)
    return tuple([_forward(x, weight, None, sequence, cu_seqlens, silu, head) for x, weight, head in calls])


def _backward_three(
    q, k, v, q_weight, k_weight, v_weight, sequence, cu_seqlens, silu, q_head, k_head, v_head, d_q, d_k, d_v
):
    weights, heads = (q_weight, k_weight, v_weight), (q_head, k_head, v_head)
    calls = zip((q, k, v), weights, heads, (d_q, d_k, d_v), strict=True)
    gradients = [_backward(x, weight, None, sequence, cu_seqlens, silu, head, d_y) for x, weight, head, d_y in calls]
    return *(d_x for d_x, _ in gradients), *(d_weight for _, d_weight in gradients)


_THREE = (
    "Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor v_weight, Tensor? sequence, "
    "Tensor? cu_seqlens, bool silu, int q_head, int k_head, int v_head"
)

short_convs = DifferentiableOperator(
    f"short_convs({_THREE}) -> (Tensor, Tensor, Tensor)",
    _forward_three,
    fake=lambda *inputs: tuple([x.new_empty(x.shape) for x in inputs[:3]]),
    backward=Operator(
        f"short_convs_backward({_THREE}, Tensor d_q, Tensor d_k, Tensor d_v)"
        " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _backward_three,
    ),
    refusal=REFUSAL,
)
"""`short_convs(...)`, see `deltazoo.ops.fused.fused_short_convs`."""
