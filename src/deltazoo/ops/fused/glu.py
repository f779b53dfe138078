"""SwiGLU, `silu(gate) * up`, in one pass over memory, forward and backward, alone or with the linear maps around it.

A backward pass keeps only the inputs. The gradient of the last linear map needs the product, which the backward pass
computes again while it computes the gradients of gate and up (arXiv:2002.05202).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.ops.dtypes import cast_for_product
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.fused.optional_triton import launch, tl, triton
from deltazoo.ops.fused.row_operator import element_constants, row_operator
from deltazoo.ops.linear_maps import linear_maps, sum_of_products, trained_weights
from deltazoo.ops.recompute import recomputable


def swiglu(gate: Tensor, up: Tensor, *, fused: bool | None = None) -> Tensor:
    """`silu(gate) * up`, recomputed in a backward pass.

    Args:
        gate, up: tensors of one shape.
        fused: see `takes_kernel`; None: torch for two dtypes.

    Raises:
        ValueError: tensors of two dtypes or shapes for a kernel.
    """
    alike = gate.dtype == up.dtype and gate.shape == up.shape
    if not takes_kernel(fused if alike or fused else False, gate, up):
        return recomputable(_swiglu_torch, gate, up)
    if not alike:
        raise ValueError(
            f"gate and up must be alike, got {gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)}"
        )
    return recomputable(_swiglu_operator, gate, up)


def swiglu_mlp(x: Tensor, gate: nn.Module, up: nn.Module, down: nn.Module, *, fused: bool | None = None) -> Tensor:
    """`down(silu(gate(x)) * up(x))`.

    By the kernel, a training step records one function in 60% of the host's time for three. Its backward pass keeps x
    and the results of gate and up.

    Args:
        x: `[..., C]`.
        gate, up: linear maps of x to `[..., D]`.
        down: a linear map of `[..., D]`.
        fused: see `swiglu`.

    Raises:
        ValueError: see `swiglu`.
    """
    weights = trained_weights(gate, up, down)
    if weights and x.requires_grad:
        x_cast, *weights = cast_for_product(x, *weights)
        alike = weights[0].shape == weights[1].shape and all([weight.dtype == x_cast.dtype for weight in weights])
        if alike and takes_kernel(fused, x_cast, *weights):
            return _mlp_operator(x_cast, *weights)[0]
    factors = linear_maps(x, (gate, up))
    return down(swiglu(*factors, fused=fused))


def _swiglu_torch(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


# N is specialised: unless Triton knows that N is a multiple of 16, it masks and reads single elements.
@triton.jit
def swiglu_forward_kernel(gate, up, y, N, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + offsets, (g * sigmoid(g, gate.dtype.element_ty != tl.float32) * u).to(y.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(gate, up, d_y, d_gate, d_up, y, N, BLOCK: tl.constexpr):
    """`y`, unless None, is the recomputed product; it may have the memory of `d_y`."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_y + offsets, mask=mask, other=0.0).to(tl.float32)
    factor = sigmoid(g, gate.dtype.element_ty != tl.float32)
    slope = factor + g * factor * (1 - factor)
    if y is not None:
        tl.store(y + offsets, (g * factor * u).to(y.dtype.element_ty), mask=mask)
    tl.store(d_gate + offsets, (d * u * slope).to(d_gate.dtype.element_ty), mask=mask)
    tl.store(d_up + offsets, (d * g * factor).to(d_up.dtype.element_ty), mask=mask)


def _forward(gate, up):
    y = torch.empty_like(gate)
    launch(swiglu_forward_kernel, element_constants(gate.numel()), gate, up, y)
    return y


def _backward(gate, up, d_y):
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    launch(swiglu_backward_kernel, element_constants(gate.numel()), gate, up, d_y, d_gate, d_up, None)
    return d_gate, d_up


def _mlp_forward(x, gate_weight, up_weight, down_weight):
    gate, up = F.linear(x, gate_weight), F.linear(x, up_weight)
    return F.linear(_forward(gate, up), down_weight), gate, up


def _mlp_backward(x, gate, up, gate_weight, up_weight, down_weight, d_z):
    rows, d_z, gate, up = (part.flatten(0, -2) for part in (x, d_z, gate, up))
    d_gate, d_up, product = (torch.empty_like(gate) for _ in range(3))
    torch.mm(d_z, down_weight, out=product)  # the gradient of the product, until the kernel writes the product there
    launch(swiglu_backward_kernel, element_constants(gate.numel()), gate, up, product, d_gate, d_up, product)
    d_x = sum_of_products(rows, [(d_gate, gate_weight), (d_up, up_weight)]).view(x.shape)
    return d_x, d_gate.t() @ rows, d_up.t() @ rows, d_z.t() @ product


_swiglu_operator = row_operator("swiglu(Tensor gate, Tensor up) -> Tensor", _forward, _backward)

_mlp_operator = row_operator(
    "swiglu_mlp(Tensor x, Tensor gate, Tensor up, Tensor down) -> (Tensor, Tensor, Tensor)",
    _mlp_forward,
    _mlp_backward,
    fake=lambda x, *weights: tuple([x.new_empty((*x.shape[:-1], weights[i].shape[0])) for i in (2, 0, 1)]),
    backward_schema="swiglu_mlp_backward(Tensor x, Tensor y_gate, Tensor y_up, Tensor gate, Tensor up, Tensor down, "
    "Tensor d_z) -> (Tensor, Tensor, Tensor, Tensor)",
    backward_fake=lambda x, y_gate, y_up, *weights: tuple([y.new_empty(y.shape) for y in (x, *weights[:3])]),
    save=lambda ctx, inputs, results: ctx.save_for_backward(inputs[0], *results[1:], *inputs[1:]),
    gradients=lambda backward, ctx, d_z, *_: backward(*ctx.saved_tensors, d_z),
    shown=1,
)
