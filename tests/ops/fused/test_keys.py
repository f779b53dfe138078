"""The kernels of keys against plain torch: those that rules make, step sizes made of keys, and bounds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from fused_cases import HALF, Case, Results, opcheck, test_interpreted, test_on_the_gpu  # noqa: F401

from deltazoo.layers import make_layer
from deltazoo.layers.rule import EffectiveStep, bounded_step
from deltazoo.spec import get_rule

pytest.importorskip("triton")

from deltazoo.ops.fused import comba_keys, erase_gain, keys, q_delta_key, qed_key, squared_norm  # noqa: E402


@dataclass(frozen=True)
class Keys(Case):
    """Queries and keys that a rule makes, and all gradients."""

    rule: str
    shape: tuple[int, ...] = (2, 9, 3, 12)
    doubled: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        draw = self.drawing(device, dtype)
        _, _, H, K = self.shape
        layer = make_layer(self.rule, 8, H, K, fused_kernels=fused, allow_neg_eigval=self.doubled)
        q, k = (draw(*self.shape).requires_grad_() for _ in range(2))
        inputs = {"q": q, "k": k}
        for name in ("theta", "decay", "D"):
            if hasattr(layer, name):
                inputs[name] = draw(H, given=torch.float32).requires_grad_()
                setattr(layer, name, torch.nn.Parameter(inputs[name]))
                inputs[name] = getattr(layer, name)
        if self.rule == "q_delta":
            inputs["gate"] = draw(*self.shape[:3]).requires_grad_()
            results = (q_delta_key(inputs["gate"], q, k, fused=fused),)
        elif self.rule == "qed":
            inputs["gate"] = draw(*self.shape).requires_grad_()
            results = (layer.erase_key(inputs["gate"], q, k),)
        else:
            unit = self.rule == "comba_unit_erase"
            made = comba_keys(q, k, inputs["decay"], inputs["D"], unit=unit, fused=fused)
            results = tuple(x for x in made if x is not k)
        gradients = torch.autograd.grad(results, list(inputs.values()), [draw(*self.shape) for _ in results])
        made = {f"made_{number}": x.detach() for number, x in enumerate(results)}
        return made | dict(zip(inputs, gradients, strict=True))


@dataclass(frozen=True)
class StepSize(Case):
    """A step size from the gate and the key, for grouped value heads, and both gradients."""

    rule: str
    shape: tuple[int, ...] = (2, 9, 3, 12)
    size: float = 1.0
    doubled: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        generator = torch.Generator().manual_seed(0)
        B, T, H, _ = self.shape
        k = (self.size * torch.randn(self.shape, generator=generator)).to(self.dtype).to(device, dtype or self.dtype)
        b, d_beta = (torch.rand(B, T, 2 * H, generator=generator).to(device, dtype or torch.float32) for _ in range(2))
        inputs = [b.requires_grad_(), k.requires_grad_()]
        spec = get_rule(self.rule)
        beta = EffectiveStep(spec, allow_neg_eigval=self.doubled)(*inputs, fused=fused)
        d_b, d_k = torch.autograd.grad(beta, inputs, d_beta, allow_unused=True)
        return {"beta": beta.detach(), "d_b": d_b} | ({} if d_k is None else {"d_k": d_k})


@dataclass(frozen=True)
class Bound(Case):
    """Step sizes bounded by the erase gain, and the gradient, which the bound lets through where it does not bind."""

    shape: tuple[int, ...] = (2, 9, 3, 12)
    other_key: bool = False

    def run(self, device: str, *, fused: bool, dtype: torch.dtype | None = None) -> Results:
        generator = torch.Generator().manual_seed(0)
        k, e = (torch.randn(self.shape, generator=generator) / self.shape[-1] ** 0.5 for _ in range(2))
        k, e = (x.to(self.dtype).to(device, dtype or self.dtype) for x in (k, k + 0.5 * e))
        wide = dtype or torch.float32
        beta, d_beta = (2 * torch.rand(*self.shape[:2], 2 * self.shape[2], generator=generator) for _ in range(2))
        beta = beta.to(device, wide).requires_grad_()
        found = bounded_step(beta, k, e if self.other_key else None, largest_gain=1.0, fused=fused)
        assert (found < beta).any() and (found == beta).any()
        return {"beta": found.detach(), "d_beta": torch.autograd.grad(found, beta, d_beta.to(device, wide))[0]}


CASES: list[Case] = [
    *(
        Keys(f"{rule}_keys{'_half' * (dtype == HALF)}", rule, dtype=dtype)
        for rule in ("q_delta", "qed", "comba", "comba_unit_erase")
        for dtype in (torch.float32, HALF)
    ),
    Keys("qed_keys_doubled", "qed", shape=(1, 131, 2, 20), doubled=True),
    Keys("comba_keys_of_many_rows", "comba", shape=(3, 150, 5, 7)),
    *(StepSize(f"step_size_of_{rule}", rule) for rule in ("gated_efla", "longhorn", "kaczmarz")),
    *(StepSize(f"step_size_of_keys_of_{size:g}", "efla", size=size) for size in (1e-3, 30, 1e12, 0)),
    StepSize("step_size_of_absurd_keys", "gated_longhorn", size=1e17),
    StepSize("step_size_doubled", "neg_delta_net", doubled=True),
    StepSize("step_size_of_many_rows", "efla", shape=(3, 150, 5, 7)),
    *(StepSize(f"step_size_of_{rule}_half", rule, dtype=HALF) for rule in ("efla", "longhorn", "kaczmarz")),
    Bound("bounded_step"),
    Bound("bounded_step_of_another_key", other_key=True),
    Bound("bounded_step_of_many_rows", shape=(3, 150, 5, 7), other_key=True),
    Bound("bounded_step_half", other_key=True, dtype=HALF),
]


def test_keys_that_do_not_fit() -> None:
    x, gate, theta = (torch.ones(shape, device="meta") for shape in ((2, 5, 3, 8), (2, 5, 3), (3,)))
    for name, call in (
        ("query_share", lambda: q_delta_key(x, x, x, fused=True)),
        ("gated_query", lambda: qed_key(gate, x, x, theta, fused=True)),
        ("gated_query", lambda: qed_key(x, x, x, theta[:2], fused=True)),
        ("feedback", lambda: comba_keys(x, x, theta, theta[:2], fused=True)),
        ("feedback", lambda: comba_keys(x, x[:, :4], theta, theta, fused=True)),
        ("unit_feedback", lambda: comba_keys(x[0], x[0], theta, theta, unit=True, fused=True)),
    ):
        with pytest.raises(ValueError, match=f"'{name}' takes q and k"):
            call()


def test_keys_of_step_sizes_that_do_not_fit() -> None:
    with pytest.raises(NotImplementedError, match=r"not torch\.float64"):
        squared_norm(torch.ones(2, 5, 3, 8, device="meta", dtype=torch.float64), fused=True)
    with pytest.raises(NotImplementedError, match="rows of up to 8192, not 8193"):
        squared_norm(torch.ones(1, 8193, device="meta"), fused=True)
    k = torch.ones(2, 5, 3, 8, device="meta")
    with pytest.raises(ValueError, match=r"alike, got torch.float32 \(2, 5, 3, 8\) and torch.float32 \(2, 5, 3, 4\)"):
        erase_gain(k, k[..., :4], fused=True)


def check_operators() -> None:
    x, gate, p = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3), torch.randn(3)
    opcheck(
        (keys._rule_keys, x, x.flip(0), gate, None, None, "query_share", 1.0),
        (keys._rule_keys, x, x.flip(0), x.flip(1), p, None, "gated_query", 2.0),
        (keys._rule_keys, x, x.flip(0), None, p, p.flip(0), "feedback", 1.0),
        (keys._rule_keys, x, x.flip(0), None, p, p.flip(0), "unit_feedback", 1.0),
        (keys._squared_norm, x),
        (keys._erase_gain, x.detach(), x.detach().flip(0)),
    )
