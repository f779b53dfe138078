"""Norms against their formulas in float64, and the MLP."""

import pytest
import torch
import torch.nn.functional as F

from deltazoo.layers import GatedRMSNorm, RMSNorm, SwiGLU, default_intermediate_size, l2_normalize


def test_l2_norm_has_its_epsilon_inside_the_root() -> None:
    x = torch.randn(4, 8, dtype=torch.float64) * torch.tensor([1e-6, 1e-3, 1.0, 1e3], dtype=torch.float64)[:, None]
    torch.testing.assert_close(l2_normalize(x), x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt())


def test_l2_norm_has_a_bounded_gradient_at_zero() -> None:
    x = torch.zeros(3, 8, requires_grad=True)
    l2_normalize(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3, 8), 1e3))


def test_half_precision_is_rounded_once() -> None:
    x = (100 * torch.randn(64, 128)).bfloat16()
    norm = RMSNorm(128).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    exact = F.rms_norm(x.double(), (128,), norm.weight.double(), 1e-5)
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), exact.bfloat16(), rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    exact = x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2_normalize(x), exact.bfloat16(), rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@pytest.mark.parametrize(("activation", "function"), [("silu", F.silu), ("sigmoid", torch.sigmoid)])
def test_gate_multiplies_after_the_norm(activation: str, function: object) -> None:
    x, gate = torch.randn(2, 5, 8, dtype=torch.float64).mul(7), torch.randn(2, 5, 8, dtype=torch.float64)
    norm = GatedRMSNorm(8, activation=activation).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 2)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight * function(gate)  # type: ignore[operator]
    torch.testing.assert_close(norm(x, gate), expected)


def test_unknown_gate_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown gate_activation 'swish'; known: silu, sigmoid, or a function"):
        GatedRMSNorm(8, activation="swish")


def test_mlp_has_the_width_of_the_published_models() -> None:
    assert default_intermediate_size(1024) == 2816
    assert default_intermediate_size(2048) == 5632
    mlp = SwiGLU(8, 16)
    x = torch.randn(2, 3, 8)
    expected = mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    assert torch.equal(mlp(x), expected)
    assert sum(p.numel() for p in mlp.parameters()) == 3 * 8 * 16


def test_a_residual_in_plain_torch() -> None:
    norm, x, residual = RMSNorm(16), torch.randn(2, 3, 16), torch.randn(2, 3, 16)
    normalized, total = norm(x, residual=residual)
    assert torch.equal(total, residual + x) and torch.equal(normalized, norm(residual + x))
    assert norm(x.bfloat16(), residual=residual)[0].dtype == torch.float32
