"""`silu(gate) * up` in one pass over memory, forward and backward, alone or with the linear map that reads it.

The backward pass keeps only the inputs. With the linear map, whose gradient needs the product, it makes the product
again in the same pass as the gradients of the inputs.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from deltazoo.ops.fused.device_math import sigmoid
from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["swiglu", "swiglu_linear"]

_ELEMENTS = 2048
"""Elements of one program."""


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


@lru_cache(maxsize=1024)
def _constants(N: int) -> Constants:
    return Constants(max(1, -(-N // _ELEMENTS)), N=N, BLOCK=_ELEMENTS, num_warps=8)


def _forward(gate, up):
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        launch(swiglu_forward_kernel, _constants(gate.numel()), gate, up, y)
    return y


def _backward(gate, up, d_y):
    gate, up, d_y = gate.contiguous(), up.contiguous(), d_y.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device_of(gate):
        launch(swiglu_backward_kernel, _constants(gate.numel()), gate, up, d_y, d_gate, d_up, None)
    return d_gate, d_up


def _linear_forward(gate, up, weight):
    return F.linear(_forward(gate, up), weight)


def _linear_backward(gate, up, weight, d_z):
    gate, up = gate.contiguous(), up.contiguous()
    d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
    d_z = d_z.flatten(0, -2)
    product = torch.empty_like(gate).flatten(0, -2)
    torch.mm(d_z, weight, out=product)  # its gradient, until the kernel writes the product there
    with torch.cuda.device_of(gate):
        launch(swiglu_backward_kernel, _constants(gate.numel()), gate, up, product, d_gate, d_up, product)
    return d_gate, d_up, d_z.t() @ product


swiglu = DifferentiableOperator(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    _forward,
    fake=lambda gate, up: gate.new_empty(gate.shape),
    backward=Operator(
        "swiglu_backward(Tensor gate, Tensor up, Tensor d_y) -> (Tensor, Tensor)",
        _backward,
    ),
    refusal=REFUSAL,
)
"""`swiglu(gate, up)`, see `deltazoo.ops.fused.fused_swiglu`."""

swiglu_linear = DifferentiableOperator(
    "swiglu_linear(Tensor gate, Tensor up, Tensor weight) -> Tensor",
    _linear_forward,
    fake=lambda gate, up, weight: gate.new_empty((*gate.shape[:-1], weight.shape[0])),
    backward=Operator(
        "swiglu_linear_backward(Tensor gate, Tensor up, Tensor weight, Tensor d_z) -> (Tensor, Tensor, Tensor)",
        _linear_backward,
    ),
    refusal=REFUSAL,
)
"""`swiglu_linear(gate, up, weight)`, see `deltazoo.ops.fused.fused_swiglu_linear`."""
