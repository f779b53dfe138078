"""The kernels of norms against plain torch, alone, with a residual or a gate; and what they refuse."""

from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from fused_cases import HALF, Case, Results, opcheck, test_interpreted, test_on_the_gpu  # noqa: F401
from torch import Tensor

from deltazoo.layers import GatedRMSNorm, RMSNorm, l2_normalize
from deltazoo.layers.norm import GATE_ACTIVATIONS

pytest.importorskip("triton")

from deltazoo.ops.fused import add_rms_norm, gated_rms_norm, norms, rms_norm  # noqa: E402


@dataclass(frozen=True)
class Norm(Case):
    """One call of the gated norm with its gradients."""

    shape: tuple[int, ...] = (2, 5, 3, 16)
    activation: str = "silu"
    most_parts: int = 4096

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        module = GatedRMSNorm(self.shape[-1], activation=self.activation, fused=fused)
        module.weight = torch.nn.Parameter(draw(self.shape[-1]))
        x, gate = draw(*self.shape).requires_grad_(), draw(*self.shape).requires_grad_()
        y = module(x, gate)
        with mock.patch.object(norms, "_MOST_GATED_PARTS", self.most_parts):
            d_x, d_gate, d_weight = torch.autograd.grad(y, [x, gate, module.weight], draw(*y.shape))
        return {"y": y.detach(), "d_x": d_x, "d_gate": d_gate, "d_weight": d_weight}


@dataclass(frozen=True)
class PlainNorm(Case):
    """One call of the plain norm with its gradients, or of a norm with a residual, which has two results."""

    shape: tuple[int, ...] = (3, 7, 24)
    residual: torch.dtype | None = None
    most_parts: int = 512

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        module = RMSNorm(self.shape[-1], fused=fused)
        module.weight = torch.nn.Parameter(draw(self.shape[-1], given=self.residual))
        x = draw(*self.shape).requires_grad_()
        inputs: dict[str, Tensor] = {"x": x, "weight": module.weight}
        if self.residual is None:
            outputs = {"y": module(x)}
        else:
            inputs["residual"] = draw(*self.shape, given=self.residual).requires_grad_()
            outputs = dict(zip(("y", "total"), module(x, inputs["residual"]), strict=True))
        upstream = [draw(*y.shape, given=self.residual) for y in outputs.values()]
        with mock.patch.object(norms, "_MOST_PARTS", self.most_parts):
            gradients = torch.autograd.grad(list(outputs.values()), list(inputs.values()), upstream)
        return {name: y.detach() for name, y in outputs.items()} | dict(zip(inputs, gradients, strict=True))


@dataclass(frozen=True)
class UnitHeads(Case):
    """The L2 norm of heads and its gradient."""

    shape: tuple[int, ...] = (2, 9, 3, 12)
    size: float = 1.0

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        x, d_y = draw(*self.shape, scale=self.size), draw(*self.shape)
        y = l2_normalize(x.requires_grad_(), fused=fused)
        return {"y": y.detach(), "d_x": torch.autograd.grad(y, x, d_y)[0]}


CASES: list[Case] = [
    Norm("silu"),
    Norm("sigmoid", activation="sigmoid"),
    Norm("odd", shape=(3, 7, 20)),
    Norm("many_rows", shape=(300, 16)),
    Norm("several_blocks_per_program", shape=(700, 16), most_parts=2),
    Norm("norm_half", dtype=HALF),
    PlainNorm("plain_norm"),
    PlainNorm("plain_norm_odd", shape=(3, 7, 37), residual=torch.float32),
    PlainNorm("plain_norm_one_row", shape=(1, 1, 3000), residual=torch.float32),
    PlainNorm("plain_norm_several_blocks_per_program", shape=(333, 16), most_parts=2, residual=torch.float32),
    PlainNorm("plain_norm_half", dtype=HALF),
    PlainNorm("plain_norm_half_sum", shape=(131, 24), dtype=HALF, residual=HALF),
    PlainNorm("plain_norm_half_beside_float32", dtype=HALF, residual=torch.float32),
    PlainNorm("plain_norm_float32_beside_half", residual=HALF),
    *(UnitHeads(f"unit_heads_of_size_{size:g}", size=size) for size in (1, 1e-3, 0)),
    UnitHeads("unit_heads_alone_half", shape=(3, 50, 2, 24), dtype=HALF),
]


@pytest.mark.gpu
def test_repeated_calls_give_the_same_bits() -> None:
    plain_norm = PlainNorm("large", shape=(4000, 1024), residual=torch.float32)
    for case in (Norm("large", shape=(4000, 128)), plain_norm):
        first, *others = (case.run("cuda", fused=True) for _ in range(5))
        assert all(torch.equal(first[name], other[name]) for other in others for name in first)


@pytest.mark.parametrize("fake", [True, False], ids=["fake", "autograd"])
@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16])
def test_the_plain_norm_compiles_without_a_graph_break(stream: torch.dtype, fake: bool) -> None:
    """On meta tensors, and with the dtypes of a model under autocast."""

    def run(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, total = norms._add_rms_operator(x, residual, weight, 1e-5, torch.bfloat16)
        return rms_norm(y, weight, 1e-5, fused=True), total

    def leaf(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, device="meta", dtype=dtype, requires_grad=not fake)

    inputs = leaf(2, 20, 24, dtype=torch.bfloat16), leaf(2, 20, 24, dtype=stream), leaf(24, dtype=torch.float32)
    y, total = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs)
    assert (y.dtype, total.dtype) == (torch.bfloat16, stream)
    if not fake:
        gradients = torch.autograd.grad(y.float().sum() + total.float().sum(), inputs)
        assert [(g.shape, g.dtype) for g in gradients] == [(x.shape, x.dtype) for x in inputs]


class TestRefusals:
    @pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on a CPU")
    def test_a_cpu(self) -> None:
        with pytest.raises(NotImplementedError, match="not on cpu"):
            GatedRMSNorm(4, fused=True)(torch.randn(1, 3, 4), torch.randn(1, 3, 4))

    @pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter runs on a CPU")
    def test_a_norm_on_a_cpu(self) -> None:
        with pytest.raises(NotImplementedError, match="not on cpu"):
            RMSNorm(4, fused=True)(torch.randn(1, 3, 4))
        with pytest.raises(NotImplementedError, match="not on cpu"):
            RMSNorm(4, fused=True)(torch.randn(1, 3, 4), torch.randn(1, 3, 4))

    def test_a_norm_of_other_shapes_and_dtypes(self) -> None:
        long, x = torch.empty(1, 8193, device="meta"), torch.empty(2, 3, 4, device="meta")
        with pytest.raises(NotImplementedError, match="rows of up to 8192, not 8193"):
            rms_norm(long, long[0], 1e-5, fused=True)
        with pytest.raises(ValueError, match=r"one shape, got \(2, 3, 4\) and \(2, 1, 4\)"):
            add_rms_norm(x, x[:, :1], x[0, 0], 1e-5, fused=True)
        with pytest.raises(NotImplementedError, match=r"not torch\.float64"):
            add_rms_norm(x, x.double(), x[0, 0], 1e-5, fused=True)
        with pytest.raises(ValueError, match="of one device, got meta and cpu"):
            add_rms_norm(x, torch.empty(2, 3, 4), x[0, 0], 1e-5, fused=True)

    def test_a_second_derivative_of_a_norm(self) -> None:
        x = torch.empty(2, 4, device="meta", requires_grad=True)
        with mock.patch.object(norms, "launch"):
            sums = add_rms_norm(x, x, x[0], 1e-5, fused=True)
            results = rms_norm(x, x[0], 1e-5, fused=True), sums[0]
        for y in results:
            with pytest.raises(NotImplementedError, match="no second derivative"):
                torch.autograd.grad(y.sum(), x, create_graph=True)

    def test_tensors_on_two_devices(self) -> None:
        x = torch.empty(2, 1, 8, device="meta")
        with pytest.raises(ValueError, match="of one device, got meta and cpu"):
            gated_rms_norm(x, x, torch.empty(8), 1e-5, "silu", fused=True)

    def test_an_activation_of_the_gate_that_was_added_by_name(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.randn(2, 3, 4)
        with pytest.raises(ValueError, match="unknown gate_activation 'tanh'"):
            gated_rms_norm(x, x, x[0, 0], 1e-5, "tanh")
        monkeypatch.setitem(GATE_ACTIVATIONS, "tanh", torch.tanh)
        with pytest.raises(ValueError, match="has no activation tanh, only silu, sigmoid"):
            GatedRMSNorm(4, activation="tanh", fused=True)
        assert not GatedRMSNorm(4, activation="tanh", fused=None).fused


def check_operators() -> None:
    x, w = torch.randn(2, 5, 3, 8), torch.randn(8)
    opcheck(
        (norms._l2_operator, x, 1e-6),
        (norms._rms_operator, x, w, 1e-5, torch.float16),
        (norms._add_rms_operator, x, x.flip(0), w, 1e-5, torch.float16),
        (norms._add_rms_operator, x.half(), x, w, 1e-5, torch.float16),
        (norms._gated_operator, x, x.flip(0), w, 1e-5, True),
    )
