"""SwiGLU, `silu(gate) * up`, in one pass over memory, forward and backward, alone or with the linear map that reads it.

A backward pass keeps only the inputs. With the linear map, whose gradient needs the product, it makes the product again
in the same pass as the gradients of the inputs (arXiv:2002.05202).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deltazoo.ops.dtypes import cast_for_product
from deltazoo.ops.fused.choice import takes_kernel
from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.fused.optional_triton import launch, tl, triton
from deltazoo.ops.fused.row_operator import element_constants, row_operator
from deltazoo.ops.linear_maps import takes_weight
from deltazoo.ops.recompute import recomputable

__all__ = ["swiglu", "swiglu_linear"]


def swiglu(gate: Tensor, up: Tensor, *, fused: bool | None = None) -> Tensor:
    """`silu(gate) * up`, recomputed in a backward pass.

    Args:
        gate, up: of one shape.
        fused: as of `takes_kernel`; None: torch for two dtypes.

    Raises:
        ValueError: a kernel is to take tensors of two dtypes or shapes.
    """
    return recomputable(_swiglu_operator if _takes_kernel(fused, gate, up) else _swiglu_torch, gate, up)


def swiglu_linear(gate: Tensor, up: Tensor, linear: nn.Module, *, fused: bool | None = None) -> Tensor:
    """`linear(silu(gate) * up)`; by the kernel, the backward pass of a training step keeps gate and up alone.

    Args:
        gate, up: `[..., D]`.
        linear: maps `[..., D]`.
        fused: as of `swiglu`.

    Raises:
        ValueError: as of `swiglu`.
    """
    if takes_weight(linear) and _takes_kernel(fused, gate, up, linear.weight):
        gate, up, weight = cast_for_product(gate, up, linear.weight)
        if weight.dtype == gate.dtype:
            return _linear_operator(gate, up, weight)
    return linear(swiglu(gate, up, fused=fused))


def _takes_kernel(fused: bool | None, gate: Tensor, up: Tensor, *others: Tensor) -> bool:
    alike = gate.dtype == up.dtype and gate.shape == up.shape
    if not takes_kernel(fused if alike or fused else False, gate, up, *others):
        return False
    if not alike:
        raise ValueError(
            f"gate and up must be alike, got {gate.dtype} {tuple(gate.shape)} and {up.dtype} {tuple(up.shape)}"
        )
    return True


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
    """`y`, unless None, is the product again; it may be where `d_y` is."""
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


def _linear_forward(gate, up, weight):
    return F.linear(_forward(gate, up), weight)


def _linear_backward(gate, up, weight, d_z):
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    d_z = d_z.flatten(0, -2)
    product = torch.empty_like(gate).flatten(0, -2)
    torch.mm(d_z, weight, out=product)  # its gradient, until the kernel writes the product there
    launch(swiglu_backward_kernel, element_constants(gate.numel()), gate, up, product, d_gate, d_up, product)
    return d_gate, d_up, d_z.t() @ product


_swiglu_operator = row_operator("swiglu(Tensor gate, Tensor up) -> Tensor", _forward, _backward)

_linear_operator = row_operator(
    "swiglu_linear(Tensor gate, Tensor up, Tensor weight) -> Tensor",
    _linear_forward,
    _linear_backward,
    fake=lambda gate, up, weight: gate.new_empty((*gate.shape[:-1], weight.shape[0])),
)
