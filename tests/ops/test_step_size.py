"""The step-size rules: values, limits, and gradients that stay finite where the formulas are 0/0 or inf/inf."""

from __future__ import annotations

from decimal import Decimal, localcontext
from itertools import product

import pytest
import torch
from torch import Tensor

from deltazoo.ops import step_size

RULES = {"exact": step_size.exact, "implicit": step_size.implicit}
ALL = {**RULES, "kaczmarz": step_size.kaczmarz}


def closed_form(rule: str, b: float, lam: float) -> float:
    """The formula with sixty digits, so that nothing cancels."""
    with localcontext(prec=60):
        gate, length = Decimal(b), Decimal(lam)
        if rule == "exact":
            return float((1 - (-gate * length).exp()) / length if lam else gate)
        if rule == "kaczmarz":
            return float(gate / (length + Decimal(10) ** -6))
        return float(gate / (1 + gate * length))


def of_squared_length(
    rule: str, b: float, lam: float, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """beta of a key with squared length ``lam``, and the two leaves it was computed from."""
    gate = torch.full((1, 1, 1), b, dtype=dtype, requires_grad=True)
    key = torch.zeros(1, 1, 1, 4, dtype=dtype)
    key[..., 1] = lam**0.5
    return ALL[rule](gate, key.requires_grad_()), gate, key


def test_euler_is_the_gate_itself_in_float32() -> None:
    b = torch.rand(2, 3, 4, dtype=torch.bfloat16)
    assert step_size.euler(b).dtype == torch.float32 and torch.equal(step_size.euler(b), b.float())
    assert step_size.euler(b.double()).dtype == torch.float64


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("lam", [0.0, 1e-30, 1e-12, 1e-6, 1e-3, 0.02, 0.1, 1.0, 7.0, 1e2, 1e4, 1e8])
def test_values_are_those_of_the_closed_form(lam: float, rule: str) -> None:
    for b, dtype in product([1e-6, 0.01, 0.3, 1.0, 2.0], [torch.float64, torch.float32]):
        beta, gate, key = of_squared_length(rule, b, lam, dtype)
        rounded = closed_form(rule, gate.item(), key.detach().double().square().sum().item())
        assert beta.item() == pytest.approx(rounded, rel=20 * torch.finfo(dtype).eps), (b, dtype)


@pytest.mark.parametrize("rule", ALL)
@pytest.mark.parametrize("lam", [1e-6, 9.9e-3, 1.01e-2, 0.5, 3.0, 50.0])
def test_gradients_are_those_of_finite_differences(lam: float, rule: str) -> None:
    """On both sides of every switch between two formulas, and away from it."""
    _, gate, key = of_squared_length(rule, 1.0, lam)
    assert torch.autograd.gradcheck(ALL[rule], (gate, key), eps=1e-7, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_no_kink_where_the_formula_changes(rule: str) -> None:
    """Value and gradient run smoothly through squared lengths from 1e-4 to 1, wherever a series gives way."""
    lam = torch.logspace(-4, 0, 4001, dtype=torch.float64)
    key = lam.sqrt()[None, :, None, None].requires_grad_()
    beta = RULES[rule](torch.ones(1, 4001, 1, dtype=torch.float64), key)
    (slope,) = torch.autograd.grad(beta.sum(), key)
    slope = (slope / (2 * key)).flatten()  # d beta / d lam
    exact = torch.tensor([_slope(rule, x) for x in lam.tolist()], dtype=torch.float64)
    torch.testing.assert_close(slope, exact, rtol=1e-9, atol=0)


def _slope(rule: str, lam: float) -> float:
    with localcontext(prec=60):
        x = Decimal(lam)
        return float(((1 + x) * (-x).exp() - 1) / x**2 if rule == "exact" else -1 / (1 + x) ** 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("b", [0.0, 1e-3, 1.0])
def test_a_zero_key_gives_the_gate_and_finite_gradients(b: float, dtype: torch.dtype, rule: str) -> None:
    gate = torch.full((1, 2, 2), b, dtype=dtype, requires_grad=True)
    key = torch.zeros(1, 2, 1, 8, dtype=dtype, requires_grad=True)
    beta = RULES[rule](gate, key)
    assert torch.equal(beta, gate.to(beta.dtype))
    d_gate, d_key = torch.autograd.grad(beta.sum(), [gate, key])
    assert torch.equal(d_gate, torch.ones_like(gate)) and torch.equal(d_key, torch.zeros_like(key))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.float32, 1e6), (torch.float32, 1e15), (torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float16, 6e4)],
    ids=str,
)
def test_huge_keys_give_one_over_their_squared_length_and_finite_gradients(
    dtype: torch.dtype, length: float, rule: str
) -> None:
    gate = torch.full((1, 1, 1), 0.5, dtype=dtype, requires_grad=True)
    key = torch.tensor([length, 0.0, 0.0, 0.0], dtype=dtype)[None, None, None].requires_grad_()
    beta = RULES[rule](gate, key)
    assert beta.isfinite().all() and (beta >= 0).all()
    squared = key.detach().double().square().sum().item()
    if squared < 1e30:
        assert beta.item() == pytest.approx(1 / squared, rel=1e-5)
    else:
        assert beta.item() <= 1.01e-30
    for gradient in torch.autograd.grad(beta.sum(), [gate, key]):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_limits_of_short_and_long_keys(rule: str) -> None:
    assert of_squared_length(rule, 0.7, 1e-14)[0].item() == pytest.approx(0.7, rel=1e-12)
    assert of_squared_length(rule, 0.7, 1e14)[0].item() * 1e14 == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_transition_eigenvalue_lies_between_zero_and_one(rule: str) -> None:
    """1 - beta |k|^2 is exp(-b |k|^2) or 1 / (1 + b |k|^2): never negative, never above 1, for any key."""
    key = torch.randn(4, 50, 2, 8, dtype=torch.float64) * torch.logspace(-4, 4, 50, dtype=torch.float64)[:, None, None]
    b = torch.rand(4, 50, 4, dtype=torch.float64) * 2
    lam = key.square().sum(-1).repeat_interleave(2, dim=2)
    eigenvalue = 1 - RULES[rule](b, key) * lam
    expected = torch.exp(-b * lam) if rule == "exact" else 1 / (1 + b * lam)
    torch.testing.assert_close(eigenvalue, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("rule", RULES)
def test_grouped_value_heads_share_the_length_of_their_key(rule: str) -> None:
    b, k = torch.rand(2, 5, 6, dtype=torch.float64), torch.randn(2, 5, 3, 8, dtype=torch.float64)
    together = RULES[rule](b, k)
    assert together.shape == (2, 5, 6)
    for j in range(6):
        alone = RULES[rule](b[:, :, j : j + 1], k[:, :, j // 2 : j // 2 + 1])
        torch.testing.assert_close(together[:, :, j : j + 1], alone)


@pytest.mark.parametrize("rule", RULES)
def test_half_precision_inputs_are_computed_in_float32(rule: str) -> None:
    b, k = torch.rand(2, 5, 3).bfloat16(), torch.randn(2, 5, 3, 8).bfloat16()
    beta = RULES[rule](b, k)
    assert beta.dtype == torch.float32
    assert torch.equal(beta, RULES[rule](b.float(), k.float()))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("b_shape", "k_shape"),
    [((2, 5, 3), (2, 5, 2, 8)), ((2, 4, 2), (2, 5, 2, 8)), ((2, 5), (2, 5, 2, 8)), ((2, 5, 2), (2, 5, 8))],
)
def test_shapes_that_do_not_fit_are_named(b_shape: tuple[int, ...], k_shape: tuple[int, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=r"expected b \[B, T, HV\] and k \[B, T, H, K\]") as error:
        RULES[rule](torch.rand(b_shape), torch.rand(k_shape))
    assert str(b_shape) in str(error.value) and str(k_shape) in str(error.value)


def test_kaczmarz_removes_the_same_share_of_the_error_for_any_key_but_the_shortest() -> None:
    b = torch.rand(1, 40, 1, dtype=torch.float64)
    k = torch.randn(1, 40, 1, 8, dtype=torch.float64) * torch.logspace(-5, 5, 40, dtype=torch.float64)[:, None, None]
    lam = k.square().sum(-1)
    share = step_size.kaczmarz(b, k) * lam
    assert (share <= b).all()
    long = lam > 1
    torch.testing.assert_close(share[long], b[long], rtol=2e-6, atol=0)
    assert (share[lam < 1e-8] < 0.01 * b[lam < 1e-8]).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [0.0, 1e-7, 1e-5, 1e-3, 1e-2])
def test_kaczmarz_writes_at_most_five_hundred_values_under_a_short_key(length: float, dtype: torch.dtype) -> None:
    """`beta |k|` is the length of what a value of length 1 writes; its gradients are finite too."""
    gate = torch.ones(1, 1, 2, dtype=dtype, requires_grad=True)
    key = torch.tensor([length, 0.0, 0.0, 0.0], dtype=dtype)[None, None, None].requires_grad_()
    beta = step_size.kaczmarz(gate, key)
    written = beta.double() * key.detach().double().norm()
    assert (written <= 500 * (1 + 1e-6)).all()
    d_gate, d_key = torch.autograd.grad(beta.sum(), [gate, key])
    assert d_gate.isfinite().all() and d_key.isfinite().all()
    assert length or torch.equal(d_key, torch.zeros_like(key))


def test_kaczmarz_on_a_key_is_eulers_step_on_the_unit_key_with_a_shorter_value() -> None:
    b, k = torch.rand(2, 5, 3, dtype=torch.float64), 3 * torch.randn(2, 5, 3, 8, dtype=torch.float64)
    length = (k.square().sum(-1) + 1e-6).sqrt()
    unit, beta = k / length[..., None], step_size.kaczmarz(b, k)
    torch.testing.assert_close(beta[..., None] * k, b[..., None] * unit / length[..., None])  # write
    erase = torch.einsum("bth,bthi,bthj->bthij", beta, k, k)
    torch.testing.assert_close(erase, torch.einsum("bth,bthi,bthj->bthij", step_size.euler(b), unit, unit))
