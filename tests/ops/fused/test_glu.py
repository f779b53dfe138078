"""The kernels of SwiGLU against plain torch, alone and between linear maps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fused_cases import HALF, Case, Results, opcheck, test_interpreted, test_on_the_gpu  # noqa: F401

from deltazoo.layers import SwiGLU

pytest.importorskip("triton")

from deltazoo.ops.fused import glu, swiglu  # noqa: E402


@dataclass(frozen=True)
class Product(Case):
    """SwiGLU and its gradients."""

    shape: tuple[int, ...] = (3, 5, 24)

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        gate, up, d_y = (draw(*self.shape, scale=3) for _ in range(3))
        y = swiglu(gate.requires_grad_(), up.requires_grad_(), fused=fused)
        d_gate, d_up = torch.autograd.grad(y, [gate, up], d_y)
        return {"y": y.detach(), "d_gate": d_gate, "d_up": d_up}


@dataclass(frozen=True)
class FeedForward(Case):
    """SwiGLU with its linear maps, and all gradients."""

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        module, x = SwiGLU(12, 20, fused=fused), draw(2, 7, 12).requires_grad_()
        for linear in (module.gate_proj, module.up_proj, module.down_proj):
            linear.weight = torch.nn.Parameter(draw(*linear.weight.shape) / 2)
        y = module(x)
        names, parameters = zip(*module.named_parameters(), strict=True)
        gradients = torch.autograd.grad(y, [x, *parameters], draw(*y.shape))
        return {"y": y.detach(), **dict(zip(("x", *names), gradients, strict=True))}


CASES: list[Case] = [
    Product("swiglu"),
    Product("swiglu_two_programs", shape=(41, 150)),
    Product("swiglu_half", dtype=HALF),
    FeedForward("feed_forward"),
    FeedForward("feed_forward_half", dtype=HALF),
]


def test_factors_that_do_not_fit() -> None:
    gate = torch.ones(2, 5, 8, device="meta")
    with pytest.raises(ValueError, match=r"alike, got torch.float32 \(2, 5, 8\) and torch.float32 \(2, 5, 4\)"):
        swiglu(gate, gate[..., :4], fused=True)
    with pytest.raises(ValueError, match=r"alike, got torch.float32 \(2, 5, 8\) and torch.bfloat16"):
        swiglu(gate, gate.bfloat16(), fused=True)


def check_operators() -> None:
    x, matrix = torch.randn(2, 5, 8), torch.randn(4, 8)
    maps = matrix, matrix.flip(0), matrix.T.contiguous()
    opcheck((glu._swiglu_operator, x, x.flip(0)), (glu._mlp_operator, x, *maps))


def check_bits_of_one_function() -> None:
    """In training one function for all three maps; where one is not trained, several, with the same bits."""
    module, x = SwiGLU(12, 80, fused=True), torch.randn(2, 7, 12, requires_grad=True)
    results = []
    for together in (True, False):
        module.gate_proj.weight.requires_grad_(together)
        y = module(x)
        assert y.grad_fn is not None
        inputs = {node.name() for node, _ in y.grad_fn.next_functions if node}
        assert (inputs == {"torch::autograd::AccumulateGrad"}) == together
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, module.up_proj.weight, module.down_proj.weight])])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
