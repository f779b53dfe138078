"""Layers in forward mode, under the transforms of torch.func, and differentiated twice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from few_rules import FEW_RULES
from torch import Tensor
from torch.func import functional_call, grad, jvp, vjp, vmap

from deltazoo.layers import DeltaRuleAttention, LayerStates, make_layer


def layer_and_parameters(rule: str) -> tuple[DeltaRuleAttention, dict[str, Tensor]]:
    layer = make_layer(rule, 12, 2, 4, layer_idx=0).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return layer, {name: parameter.detach() for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("batch", ["whole", "padded", "packed"])
@pytest.mark.parametrize("rule", FEW_RULES)
def test_tangents_are_finite_differences_and_agree_with_gradients(rule: str, batch: str) -> None:
    layer, parameters = layer_and_parameters(rule)
    x, kwargs = torch.randn(2, 21, 12, dtype=torch.float64), {}
    if batch == "padded":
        kwargs["attention_mask"] = (torch.rand(2, 21) < 0.7).long()
    elif batch == "packed":
        x, kwargs["cu_seqlens"] = x.flatten(0, 1)[None], torch.tensor([0, 9, 9, 42])

    def function(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x,), kwargs)

    toward = {name: torch.randn_like(value) for name, value in parameters.items()}, torch.randn_like(x)

    def moved(by: float) -> Tensor:
        with torch.no_grad():
            return function({n: p + by * toward[0][n] for n, p in parameters.items()}, x + by * toward[1])

    output, tangent = jvp(function, (parameters, x), toward)
    torch.testing.assert_close(output, layer(x, **kwargs))
    torch.testing.assert_close(tangent, (moved(1e-6) - moved(-1e-6)) / 2e-6, rtol=1e-5, atol=1e-6)
    back = torch.randn_like(output)
    d_parameters, d_x = vjp(function, parameters, x)[1](back)
    products = sum((d * toward[0][name]).sum() for name, d in d_parameters.items()) + (d_x * toward[1]).sum()
    torch.testing.assert_close((back * tangent).sum(), products)


def test_gradients_per_sample() -> None:
    layer, parameters = layer_and_parameters("gated_deltanet")
    x = torch.randn(3, 9, 12, dtype=torch.float64)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, parameters, (x[None],)).square().sum()

    found = vmap(grad(loss), (None, 0))(parameters, x)
    for i in range(3):
        torch.testing.assert_close({name: g[i] for name, g in found.items()}, grad(loss)(parameters, x[i]))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
def test_token_by_token(mode: Any) -> None:
    layer, _ = layer_and_parameters("kda")
    x, toward = torch.randn(2, 2, 11, 12, dtype=torch.float64)

    def token_by_token(x: Tensor) -> Tensor:
        states = LayerStates()
        return torch.cat([layer(token, past_key_values=states) for token in x.split([4, *[1] * 7], dim=1)], dim=1)

    with mode():
        torch.testing.assert_close(jvp(token_by_token, (x,), (toward,)), jvp(layer, (x,), (toward,)))
