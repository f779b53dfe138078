"""Liger's kernels against plain torch in float64, in every gradient: interpreted on a CPU, and compiled on a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import pytest
import torch
from liger_kernels import Results, interpreted_results, judge, needs_liger, save_interpreted
from torch import Tensor

from deltazoo.layers.mlp import SwiGLU
from deltazoo.layers.norm import RMSNorm
from deltazoo.ops.fused import linear_cross_entropy
from deltazoo.ops.fused.liger import (
    liger_add_rms_norm,
    liger_linear_cross_entropy,
    liger_rms_norm,
    liger_swiglu,
)


class Inputs:
    """Random tensors that are the same in every dtype and on every device."""

    def __init__(self, own: torch.dtype, dtype: torch.dtype | None, device: str) -> None:
        self.own, self.dtype, self.device = own, dtype, device
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, own: torch.dtype | None = None) -> Tensor:
        """Rounded to the case's dtype, or to the one given, then in the dtype asked for."""
        x = torch.randn(shape, generator=self.generator).to(own or self.own)
        return x.to(self.device, self.dtype or x.dtype)


@dataclass(frozen=True)
class Norm:
    """A norm, or a residual and a norm; the loss uses the sum, too, as a block does."""

    name: str
    shape: tuple[int, ...] = (2, 5, 48)
    residual: bool = False
    dtype: torch.dtype = torch.float32
    residual_dtype: torch.dtype | None = None
    eps: float = 1e-6

    def run(self, device: str, *, liger: bool, dtype: torch.dtype | None = None) -> Results:
        draw = Inputs(self.dtype, dtype, device)
        module = RMSNorm(self.shape[-1], self.eps, liger=liger)
        module.weight = torch.nn.Parameter(draw(self.shape[-1]))
        x = draw(*self.shape).requires_grad_()
        if not self.residual:
            y = module(x)
            d_x, d_weight = torch.autograd.grad(y, [x, module.weight], draw(*y.shape).to(y))
            return {"y": y.detach(), "d_x": d_x, "d_weight": d_weight}
        residual = draw(*self.shape, own=self.residual_dtype).requires_grad_()
        y, total = module(x, residual=residual)
        leaves = [x, residual, module.weight]
        gradients = torch.autograd.grad([y, total], leaves, [draw(*y.shape).to(y), draw(*y.shape).to(y)])
        names = ("d_x", "d_residual", "d_weight")
        return {"y": y.detach(), "total": total.detach(), **dict(zip(names, gradients, strict=True))}


@dataclass(frozen=True)
class MLP:
    """A whole SwiGLU."""

    name: str
    shape: tuple[int, ...] = (2, 5, 16)
    width: int = 48
    dtype: torch.dtype = torch.float32

    def run(self, device: str, *, liger: bool, dtype: torch.dtype | None = None) -> Results:
        draw = Inputs(self.dtype, dtype, device)
        module = SwiGLU(self.shape[-1], self.width, liger=liger)
        for linear in (module.gate_proj, module.up_proj, module.down_proj):
            linear.weight = torch.nn.Parameter(draw(*linear.weight.shape) * linear.in_features**-0.5)
        x = draw(*self.shape).requires_grad_()
        y = module(x)
        names, parameters = zip(*module.named_parameters(), strict=True)
        gradients = torch.autograd.grad(y, [x, *parameters], draw(*y.shape))
        return {"y": y.detach(), **dict(zip(("d_x", *names), gradients, strict=True))}


@dataclass(frozen=True)
class Loss:
    """The loss of some rows, a seventh of them ignored, divided as by the number of items in a batch."""

    name: str
    rows: int = 50
    dim: int = 16
    vocabulary: int = 61
    dtype: torch.dtype = torch.float32
    frozen_input: bool = False
    frozen_weight: bool = False

    def run(self, device: str, *, liger: bool, dtype: torch.dtype | None = None) -> Results:
        draw = Inputs(self.dtype, dtype, device)
        x = draw(self.rows, self.dim).requires_grad_(not self.frozen_input)
        weight = (draw(self.vocabulary, self.dim) * self.dim**-0.5).requires_grad_(not self.frozen_weight)
        labels = torch.randint(0, self.vocabulary, (self.rows,), generator=draw.generator).to(device)
        labels[::7] = -100
        summed = liger_linear_cross_entropy if liger else linear_cross_entropy
        loss = summed(x, weight, labels) / self.rows
        leaves = {name: leaf for name, leaf in (("d_x", x), ("d_weight", weight)) if leaf.requires_grad}
        gradients = torch.autograd.grad(loss, list(leaves.values()))
        return {"loss": loss.detach(), **dict(zip(leaves, gradients, strict=True))}


SMALL = [
    Norm("norm"),
    Norm("norm_odd", shape=(7, 20)),
    Norm("norm_large_eps", eps=0.5),
    Norm("add_norm", residual=True),
    Norm("add_norm_odd", shape=(3, 1, 20), residual=True, eps=0.5),
    MLP("mlp"),
    MLP("mlp_odd", shape=(7, 12), width=20),
    Loss("loss"),
    Loss("loss_one_row", rows=2, vocabulary=7),
    Loss("loss_frozen_input", frozen_input=True),
    Loss("loss_frozen_weight", frozen_weight=True),
]


def with_half(half: torch.dtype) -> list[Norm | MLP | Loss]:
    return [
        *SMALL,
        Norm("norm_half", dtype=half),
        Norm("add_norm_half", residual=True, dtype=half),
        Norm("add_norm_half_to_float32", residual=True, dtype=half, residual_dtype=torch.float32),
        MLP("mlp_half", dtype=half),
        Loss("loss_half", dtype=half),
    ]


INTERPRETED = with_half(torch.float16)
COMPILED = [
    *with_half(torch.bfloat16),
    *(Norm(f"norm_1024_{dtype}", shape=(2, 1024, 1024), dtype=dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(
        Norm(f"add_norm_1024_{dtype}", shape=(2, 1024, 1024), residual=True, dtype=dtype)
        for dtype in (torch.float32, torch.bfloat16)
    ),
    *(MLP(f"mlp_2816_{dtype}", (2, 512, 1024), 2816, dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(Loss(f"loss_32000_{dtype}", 3000, 1024, 32000, dtype) for dtype in (torch.float32, torch.bfloat16)),
]


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Results]:
    return interpreted_results(__file__, tmp_path_factory.mktemp("interpreted"))


def check(case: Norm | MLP | Loss, results: Results, device: str) -> None:
    judge(results, [case.run(device, liger=False)], case.run(device, liger=False, dtype=torch.float64))


@needs_liger
@pytest.mark.parametrize("case", INTERPRETED, ids=lambda case: case.name)
def test_interpreted(case: Norm | MLP | Loss, interpreted: dict[str, Results]) -> None:
    check(case, interpreted[case.name], "cpu")


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("case", COMPILED, ids=lambda case: case.name)
def test_on_a_gpu(case: Norm | MLP | Loss) -> None:
    check(case, case.run("cuda", liger=True), "cuda")


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("case", COMPILED[-8:], ids=lambda case: case.name)
def test_repeated_calls_give_the_same_bits(case: Norm | MLP | Loss) -> None:
    first, *others = (case.run("cuda", liger=True) for _ in range(3))
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.gpu
@needs_liger
@pytest.mark.parametrize("liger", [True, False])
def test_the_loss_takes_less_memory_than_its_logits(liger: bool) -> None:
    rows, vocabulary = 8192, 32000
    x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(vocabulary, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    summed = liger_linear_cross_entropy if liger else linear_cross_entropy
    (summed(x, weight, labels) / rows).backward()
    assert torch.cuda.max_memory_allocated() - before < 2 * rows * vocabulary * 2  # in float32: one copy


@pytest.mark.gpu
@needs_liger
class TestASecondBackwardPass:
    def test_of_swiglu_is_refused(self) -> None:
        gate, up = (torch.randn(4, 8, device="cuda", requires_grad=True) for _ in range(2))
        y = liger_swiglu(gate * 1, up * 1).sum()
        y.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one backward pass"):
            y.backward()

    def test_of_the_loss_is_refused(self) -> None:
        x, weight = (torch.randn(4, 8, device="cuda", requires_grad=True) for _ in range(2))
        loss = liger_linear_cross_entropy(x, weight, torch.zeros(4, dtype=torch.int64, device="cuda"))
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one backward pass"):
            loss.backward()

    def test_of_the_norms_gives_the_same(self) -> None:
        x, residual = (torch.randn(4, 8, device="cuda", requires_grad=True) for _ in range(2))
        weight = torch.ones(8, device="cuda")
        y, total = liger_add_rms_norm(x, residual, weight, 1e-6)
        result = (liger_rms_norm(y, weight, 1e-6) * total).sum()
        first, second = (torch.autograd.grad(result, [x, residual], retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))

    def test_to_differentiate_it_is_refused(self) -> None:
        x, weight = torch.randn(4, 8, device="cuda", requires_grad=True), torch.ones(8, device="cuda")
        for y in (liger_rms_norm(x, weight, 1e-6), liger_add_rms_norm(x, x, weight, 1e-6)[0], liger_swiglu(x, x)):
            with pytest.raises(NotImplementedError, match="no second derivative"):
                torch.autograd.grad(y.sum(), x, create_graph=True)


WEIGHT, LABELS = torch.ones(8), torch.zeros(4, dtype=torch.int64)
CALLS = {
    "rms_norm": lambda x: liger_rms_norm(x, WEIGHT, 1e-6),
    "add_rms_norm": lambda x: liger_add_rms_norm(x, x, WEIGHT, 1e-6),
    "swiglu": lambda x: liger_swiglu(x, x),
    "linear_cross_entropy": lambda x: liger_linear_cross_entropy(x, x, LABELS),
}


@pytest.mark.parametrize("call", CALLS)
class TestRefusals:
    @pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on a CPU")
    def test_a_cpu(self, call: str) -> None:
        with pytest.raises(NotImplementedError, match="run on GPUs, not on cpu: leave liger off"):
            CALLS[call](torch.randn(4, 8))

    def test_float64(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(NotImplementedError, match=r"not torch\.float64: leave liger off"):
            CALLS[call](torch.randn(4, 8, dtype=torch.float64))

    def test_without_the_package(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        for name in [name for name in sys.modules if name.split(".")[0] == "liger_kernel"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "liger_kernel", None)
        message = r"need liger_kernel, which is not installed: pip install '.\[fast\]' in a checkout"
        with pytest.raises(NotImplementedError, match=message):
            CALLS[call](torch.randn(4, 8))

    def test_transforms(self, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        x = torch.randn(4, 8)
        with pytest.raises(NotImplementedError, match="no forward mode and no torch.func transforms: leave liger off"):
            torch.func.jvp(CALLS[call], (x,), (x,))


if __name__ == "__main__":
    save_interpreted(INTERPRETED, sys.argv[1])
