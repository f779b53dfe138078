"""`L sigmoid(gate) * x`, or its gate's root times x, in one pass over memory, forward and backward.

    f = L sigmoid(gate)      y = f x      d_x = f d      d_gate = f sigmoid(-gate) x d
    f = sqrt(L sigmoid(gate))             d_x = f d      d_gate = f sigmoid(-gate) x d / 2

The backward pass keeps only the inputs.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from deltazoo.ops.fused.kernels import REFUSAL
from deltazoo.ops.fused.kernels.sigmoid import logistic
from deltazoo.ops.operator import DifferentiableOperator, Operator
from deltazoo.ops.triton.launch import Constants, launch

__all__ = ["sigmoid_gate"]

_ELEMENTS = 2048
"""Elements of one program."""


@triton.jit
def _factor(gate, LARGEST: tl.constexpr, ROOT: tl.constexpr):
    """f and `sigmoid(-gate)`."""
    s, rest, root = logistic(gate)
    return root * tl.sqrt(tl.full([], LARGEST, tl.float32)) if ROOT else LARGEST * s, rest


# N is specialised: unless Triton knows that N is a multiple of 16, it masks and reads single elements.
@triton.jit
def sigmoid_gate_forward_kernel(gate, x, y, N, LARGEST: tl.constexpr, ROOT: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    f, _ = _factor(g, LARGEST, ROOT)
    tl.store(y + offsets, (f * value).to(y.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid_gate_backward_kernel(gate, x, d_y, d_gate, d_x, N, LARGEST: tl.constexpr, ROOT: tl.constexpr,
                                 BLOCK: tl.constexpr):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < N
    g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    d = tl.load(d_y + offsets, mask=mask, other=0.0).to(tl.float32)
    f, rest = _factor(g, LARGEST, ROOT)
    d *= f
    tl.store(d_x + offsets, d.to(d_x.dtype.element_ty), mask=mask)
    d *= value * rest
    tl.store(d_gate + offsets, (0.5 * d if ROOT else d).to(d_gate.dtype.element_ty), mask=mask)


@lru_cache(maxsize=1024)
def _constants(N: int, largest: float, root: bool) -> Constants:
    return Constants(max(1, -(-N // _ELEMENTS)), N=N, LARGEST=largest, ROOT=root, BLOCK=_ELEMENTS, num_warps=8)


def _forward(gate, x, largest, root):
    gate, x = gate.contiguous(), x.contiguous()
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        launch(sigmoid_gate_forward_kernel, _constants(x.numel(), largest, root), gate, x, y)
    return y


def _backward(gate, x, largest, root, d_y):
    gate, x, d_y = gate.contiguous(), x.contiguous(), d_y.contiguous()
    d_gate, d_x = torch.empty_like(gate), torch.empty_like(x)
    with torch.cuda.device_of(x):
        launch(sigmoid_gate_backward_kernel, _constants(x.numel(), largest, root), gate, x, d_y, d_gate, d_x)
    return d_gate, d_x


_ARGUMENTS = "Tensor gate, Tensor x, float largest, bool root"

sigmoid_gate = DifferentiableOperator(
    f"sigmoid_gate({_ARGUMENTS}) -> Tensor",
    _forward,
    fake=lambda gate, x, largest, root: x.new_empty(x.shape),
    backward=Operator(
        f"sigmoid_gate_backward({_ARGUMENTS}, Tensor d_y) -> (Tensor, Tensor)",
        _backward,
    ),
    refusal=REFUSAL,
)
"""`sigmoid_gate(gate, x, largest, root)`, see `deltazoo.ops.fused.fused_sigmoid_gate`."""
