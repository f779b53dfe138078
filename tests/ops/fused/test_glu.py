"""The kernels of SwiGLU against plain torch, alone and between linear maps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fused_cases import HALF, Case, Results, judge
from torch import Tensor

from deltazoo.layers import SwiGLU

pytest.importorskip("triton")

from deltazoo.ops.fused import glu, swiglu  # noqa: E402


@dataclass(frozen=True)
class Product:
    """SwiGLU and its gradients."""

    name: str
    shape: tuple[int, ...] = (3, 5, 24)
    dtype: torch.dtype = torch.float32

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        generator = torch.Generator().manual_seed(0)
        gate, up, d_y = (
            (3 * torch.randn(self.shape, generator=generator)).to(self.dtype).to(device, dtype or self.dtype)
            for _ in range(3)
        )
        y = swiglu(gate.requires_grad_(), up.requires_grad_(), fused=fused)
        d_gate, d_up = torch.autograd.grad(y, [gate, up], d_y)
        return {"y": y.detach(), "d_gate": d_gate, "d_up": d_up}


@dataclass(frozen=True)
class FeedForward:
    """SwiGLU with its linear maps, and all gradients."""

    name: str
    dtype: torch.dtype = torch.float32

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype).to(device, dtype or self.dtype)

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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_interpreted(case: Case, interpreted: dict[str, Results]) -> None:
    judge(case, interpreted[case.name])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_on_the_gpu(case: Case) -> None:
    judge(case, case.run("cuda", fused=True))


def test_factors_that_do_not_fit() -> None:
    gate = torch.ones(2, 5, 8, device="meta")
    with pytest.raises(ValueError, match=r"alike, got torch.float32 \(2, 5, 8\) and torch.float32 \(2, 5, 4\)"):
        swiglu(gate, gate[..., :4], fused=True)
    with pytest.raises(ValueError, match=r"alike, got torch.float32 \(2, 5, 8\) and torch.bfloat16"):
        swiglu(gate, gate.bfloat16(), fused=True)


def check_operators() -> None:
    """Fake results are as the real ones, in layout and storage too, and autograd's formula passes torch's tests."""
    x, matrix = torch.randn(2, 5, 8), torch.randn(4, 8)
    maps = matrix, matrix.flip(0), matrix.T.contiguous()
    for operator, *arguments in ((glu._swiglu_operator, x, x.flip(0)), (glu._mlp_operator, x, *maps)):
        leaves = [y.detach().requires_grad_() if isinstance(y, Tensor) else y for y in arguments]
        torch.library.opcheck(operator.overload, leaves)


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
