"""`causal_conv1d`, `ShortConvolution` and the norms against their definitions, with states, packing and gradients."""

from __future__ import annotations

from typing import Any

import fla_definitions
import pytest
import torch
import torch.nn.functional as F
from pairwise import pairwise
from torch import Tensor, nn

from deltazoo.compat import fla

B, T, D, W = 2, 7, 6, 4
BOUNDS = torch.tensor([0, 2, 2, 3, T])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def compare(actual: Any, expected: Any, tensors: list[Tensor]) -> None:
    """Results and gradients."""
    seeds = [torch.randn_like(x) for x in expected]
    gradients = [
        torch.autograd.grad(sum((x * seed).sum() for x, seed in zip(results, seeds, strict=True)), tensors)
        for results in (actual, expected)
    ]
    for mine, theirs in zip([*actual, *gradients[0]], [*expected, *gradients[1]], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("bias", "activation", "packed", "state", "width"),
    pairwise([False, True], [None, "silu", "swish"], [False, True], [False, True], [1, 3, W]),
)
def test_causal_conv1d(bias: bool, activation: str | None, packed: bool, state: bool, width: int) -> None:
    torch.manual_seed(0)
    rows = 1 if packed else B
    tensors = {"x": randn(rows, T, D), "weight": randn(D, width), "residual": randn(rows, T, D)}
    tensors |= {"bias": randn(D)} if bias else {}
    tensors |= {"initial_state": randn(len(BOUNDS) - 1 if packed else B, D, width)} if state else {}
    options: dict[str, Any] = {"activation": activation, "cu_seqlens": BOUNDS if packed else None}
    actual = fla.causal_conv1d(**tensors, **options, output_final_state=True)
    compare(actual, fla_definitions.convolution(**tensors, **options), list(tensors.values()))
    y, none = fla.causal_conv1d(**tensors, **options)
    assert none is None and torch.equal(y, actual[0])


def test_causal_conv1d_of_heads() -> None:
    x, weight = randn(B, T, 2, D // 2), randn(D, W)
    y, state = fla.causal_conv1d(x, weight, activation="silu", output_final_state=True)
    expected = fla_definitions.convolution(x.flatten(2), weight, activation="silu")
    torch.testing.assert_close(y, expected[0].view_as(x))
    torch.testing.assert_close(state, expected[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"cp_context": object()}, NotImplementedError, "cp_context=None"),
        ({"seq_idx": torch.zeros(1)}, ValueError, "as cu_seqlens"),
        ({"dilation": 2}, TypeError, "unknown argument"),
        ({"activation": "gelu"}, ValueError, "known: silu, swish, None"),
        ({"backend": "tritn"}, ValueError, "did you mean 'triton'"),
        ({"weight": None}, ValueError, "weight"),
        ({"weight": torch.ones(D + 1, W)}, ValueError, "weight"),
        ({"residual": torch.ones(B, T)}, ValueError, "residual must have x's shape"),
        ({"initial_state": torch.ones(B, D, W - 1)}, ValueError, r"\(2, 6, 4\) \[N, D, W\]"),
        ({"cu_seqlens_cpu": BOUNDS}, ValueError, "pass cu_seqlens as well"),
        ({"cu_seqlens": torch.tensor([0, T]), "cu_seqlens_cpu": BOUNDS}, ValueError, "must equal cu_seqlens"),
    ],
)
def test_causal_conv1d_refuses(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fla.causal_conv1d(**({"x": torch.ones(B, T, D), "weight": torch.ones(D, W)} | options))


def short_convolution(**options: Any) -> fla.ShortConvolution:
    torch.manual_seed(0)
    return fla.ShortConvolution(D, W, dtype=torch.float64, **options)


@pytest.mark.parametrize("bias", [False, True])
def test_the_module_is_a_conv1d_with_its_parameters(bias: bool) -> None:
    layer = short_convolution(bias=bias)
    plain = nn.Conv1d(D, D, W, groups=D, bias=bias, dtype=torch.float64)
    assert isinstance(layer, nn.Conv1d) and layer.state_size == D * W
    plain.load_state_dict(layer.state_dict())
    x = randn(B, T, D)
    expected = F.silu(plain(F.pad(x.transpose(1, 2), (W - 1, 0)))).transpose(1, 2)
    torch.testing.assert_close(layer(x)[0], expected)


def test_a_mask_multiplies_the_inputs() -> None:
    layer, x = short_convolution(), randn(B, T, D).detach()
    before, mask = x.clone(), torch.ones(B, T, dtype=torch.long)
    mask[0, :3] = 0
    y, _ = layer(x, mask=mask)
    assert torch.equal(x, before)
    torch.testing.assert_close(y[:1, 3:], layer(x[:1, 3:])[0])
    with pytest.raises(ValueError, match="pass one of them"):
        layer(x[:1], mask=mask[:1], cu_seqlens=BOUNDS)


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_one_token_at_a_time_writes_the_cache(packed: bool) -> None:
    layer, x = short_convolution(activation=None, bias=True), randn(B, T, D).detach()
    whole, last = layer(x, output_final_state=True)
    state: Any = torch.zeros(B, D, W, dtype=torch.float64)
    kept, outputs = state, []
    boundaries = torch.arange(B + 1) if packed else None
    with torch.no_grad():
        for t in range(T):
            token = x[:, t : t + 1].view(1, B, D) if packed else x[:, t : t + 1]
            y, state = layer(token, cache=state, output_final_state=True, cu_seqlens=boundaries)
            assert state is kept
            outputs.append(y.view(B, 1, D))
        y, none = layer.step(x[:, :1], None, kept, cu_seqlens=None)
    assert none is None and not torch.equal(kept, last)
    torch.testing.assert_close(torch.cat(outputs, dim=1), whole)
    state, unchanged = layer(x[:, :1], cache=last, output_final_state=True)[1], last.clone()
    assert state is not last and torch.equal(last, unchanged)


def test_the_cache_is_left_alone_by_more_tokens_than_sequences() -> None:
    layer, x = short_convolution(), randn(1, 2, D).detach()
    cache = randn(2, D, W).detach()
    before = cache.clone()
    with torch.no_grad():
        layer(x, cache=cache, cu_seqlens=torch.tensor([0, 0, 2]))
    assert torch.equal(cache, before)


def test_the_module_refuses() -> None:
    for options, message in (({"activation": "relu"}, "silu"), ({"backend": "mix"}, "triton, cuda")):
        with pytest.raises(ValueError, match=message):
            short_convolution(**options)
    with pytest.raises(TypeError, match="unknown argument"):
        short_convolution(stride=2)
    assert short_convolution(use_fast_conv1d=True).backend == "triton"


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm(affine: bool, bias: bool, residual: bool) -> None:
    layer = fla.RMSNorm(D, elementwise_affine=affine, bias=bias, eps=1e-3, dtype=torch.float64)
    assert {*layer.state_dict()} == ({"weight", "bias"} if affine and bias else {"weight"} if affine else set())
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, r = randn(B, T, D), randn(B, T, D) if residual else None
    tensors = [x, *layer.parameters(), *([] if r is None else [r])]
    expected = fla_definitions.rms_norm(x, layer.weight, 1e-3, layer.bias, r)
    compare(layer(x, r, prenorm=True), (expected, x if r is None else x + r), tensors)
    assert torch.equal(layer(x, r), layer(x, r, prenorm=True)[0])


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("residual", [False, True])
def test_gated_rms_norm(affine: bool, activation: str, residual: bool) -> None:
    layer = fla.FusedRMSNormGated(D, affine, 1e-3, activation, dtype=torch.float64)
    assert {*layer.state_dict()} == ({"weight"} if affine else set())
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    x, g, r = randn(B, T, D), randn(B, T, D), randn(B, T, D) if residual else None
    tensors = [x, g, *layer.parameters(), *([] if r is None else [r])]
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    expected = fla_definitions.rms_norm(x, layer.weight, 1e-3, residual=r) * act(g)
    compare(layer(x, g, r, prenorm=True), (expected, x if r is None else x + r), tensors)
    assert torch.equal(layer(x, g, r), layer(x, g, r, prenorm=True)[0])


def test_dtypes_of_norms_and_residuals() -> None:
    x, wide = torch.randn(3, D).bfloat16(), torch.randn(3, D)
    norm, gated = fla.RMSNorm(D), fla.FusedRMSNormGated(D)
    for layer, inputs in ((norm, (x,)), (gated, (x, x))):
        y, kept = layer(*inputs, prenorm=True, residual_in_fp32=True)
        assert (y.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
        y, kept = layer(*inputs, residual=wide, prenorm=True)
        assert (y.dtype, kept.dtype) == (torch.bfloat16, torch.float32)
        y, kept = layer(*inputs, residual=x, prenorm=True)
        assert (y.dtype, kept.dtype) == (torch.bfloat16, torch.bfloat16)
    with pytest.raises(ValueError, match="one shape"):
        norm(x, residual=wide[:1])
    with pytest.raises(ValueError, match="did you mean 'sigmoid'"):
        fla.FusedRMSNormGated(D, activation="sigmod")


@pytest.mark.parametrize("norm", [fla.RMSNorm, fla.FusedRMSNormGated])
def test_parameters_of_norms(norm: type[nn.Module]) -> None:
    assert {*norm(D).state_dict()} == {"weight"}
    assert norm(D, dtype=torch.float64, device="meta").weight.dtype == torch.float64
    assert norm(D, device="meta").weight.is_meta
    assert fla.RMSNorm(D, bias=True, dtype=torch.float64).bias.dtype == torch.float64


def test_modules_print_what_they_are() -> None:
    assert "activation=silu, backend=triton" in repr(fla.ShortConvolution(D, W))
    assert repr(fla.RMSNorm(D, elementwise_affine=False)) == "RMSNorm(6, elementwise_affine=False, eps=1e-05)"
    assert "activation=swish" in repr(fla.FusedRMSNormGated(D))
