"""Our layers compute what transformers' own torch code computes with the same weights."""

from __future__ import annotations

import importlib
import importlib.util

import pytest
import torch
from torch import Tensor, nn

from deltazoo.layers import DeltaRuleAttention

CONVOLUTIONS = ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
OLMO = {
    "hidden_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
}
KIMI = {
    "hidden_size": 32,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "num_hidden_layers": 1,
    "layer_types": ["linear_attention"],
    "mlp_layer_types": ["dense"],
}
# Layer class: model, configuration class, its options, our rule and sizes, and their names that differ from ours.
CASES = {
    "OlmoHybridGatedDeltaNet": (
        *("olmo_hybrid", "OlmoHybridConfig", OLMO),
        *("gated_deltanet", {"num_v_heads": 4, "expand_v": 2}, {}),
    ),
    "KimiLinearDeltaAttention": (
        *("kimi_linear", "KimiLinearConfig", KIMI),
        *("kda", {"expand_v": 1}, {"forget_gate.": "", "_a_proj": "_proj.0", "_b_proj": "_proj.1"}),
    ),
}


def weights_of(theirs: nn.Module, ours: DeltaRuleAttention, renamed: dict[str, str]) -> dict[str, Tensor]:
    """Their state dict under our names: one convolution is three of ours, and a bias that they lack is zero."""
    found = {name: torch.zeros_like(x) for name, x in ours.state_dict().items() if name == "g_proj.1.bias"}
    for name, x in theirs.state_dict().items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        if name == "conv1d.weight":
            channels = [ours.get_parameter(part).shape[0] for part in CONVOLUTIONS]
            found |= dict(zip(CONVOLUTIONS, x.split(channels), strict=True))
        else:
            found[name] = x.reshape(ours.get_parameter(name).shape)
    return found


@pytest.mark.parametrize("name", CASES)
def test_same_outputs_and_gradients(name: str) -> None:
    family, config_name, options, rule, sizes, renamed = CASES[name]
    package = f"transformers.models.{family}"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"this version of transformers has no {family}")
    config = getattr(importlib.import_module(f"{package}.configuration_{family}"), config_name)(**options)
    torch.manual_seed(0)
    theirs = getattr(importlib.import_module(f"{package}.modeling_{family}"), name)(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    eps = theirs.o_norm.variance_epsilon if hasattr(theirs.o_norm, "variance_epsilon") else theirs.o_norm.eps
    negative = getattr(theirs, "allow_neg_eigval", False)
    ours = DeltaRuleAttention(rule, 32, 2, 8, norm_eps=eps, allow_neg_eigval=negative, **sizes).eval()
    ours.load_state_dict(weights_of(theirs, ours, renamed))

    x = torch.randn(2, 70, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, output = theirs(x), ours(y)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (output * weights).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-3, atol=1e-4 * x.grad.abs().max().item())
