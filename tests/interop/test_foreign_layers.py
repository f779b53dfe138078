"""Delta-rule layers of transformers against ours, with transformers' own torch code as the judge."""

import importlib

import pytest
import torch
from torch import nn

from deltazoo.interop.foreign_layers import FOREIGN_LAYERS, copy_into_transformers, layer_from_transformers
from deltazoo.layers import DeltaRuleAttention

GDN = {
    "hidden_size": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"],
    "num_hidden_layers": 1,
}
MODELS = {
    "Qwen3NextGatedDeltaNet": ("qwen3_next", "Qwen3NextConfig", GDN),
    "Qwen3_5GatedDeltaNet": ("qwen3_5", "Qwen3_5TextConfig", GDN),
    "Qwen3_5MoeGatedDeltaNet": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", GDN),
    "OlmoHybridGatedDeltaNet": (
        "olmo_hybrid",
        "OlmoHybridConfig",
        {**GDN, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "KimiLinearDeltaAttention": (
        "kimi_linear",
        "KimiLinearConfig",
        {"hidden_size": 32, "linear_num_heads": 2, "linear_head_dim": 8, "num_hidden_layers": 1,
         "layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]},
    ),
}  # fmt: skip
# Older versions of transformers have fewer of these models.
AVAILABLE = [
    name for name, (module, _, _) in MODELS.items() if importlib.util.find_spec(f"transformers.models.{module}")
]


def foreign_layer(name):
    module_name, config_name, options = MODELS[name]
    package = f"transformers.models.{module_name}"
    config = getattr(importlib.import_module(f"{package}.configuration_{module_name}"), config_name)(**options)
    torch.manual_seed(0)
    layer = getattr(importlib.import_module(f"{package}.modeling_{module_name}"), name)(config, layer_idx=0)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer.eval()


def test_every_known_layer_is_tested():
    assert set(MODELS) == set(FOREIGN_LAYERS)
    assert {"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "OlmoHybridGatedDeltaNet"} <= set(AVAILABLE)


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.feature("layers of qwen3_next, qwen3_5, olmo_hybrid, kimi_linear")
def test_same_outputs_and_gradients(name):
    theirs = foreign_layer(name)
    ours = layer_from_transformers(theirs)
    x = torch.randn(2, 70, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    expected, output = theirs(x), ours(y)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (output * weights).sum().backward()
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-3, atol=1e-4 * x.grad.abs().max().item())


@pytest.mark.parametrize("name", AVAILABLE)
@pytest.mark.feature("layers of qwen3_next, qwen3_5, olmo_hybrid, kimi_linear")
def test_there_and_back_is_exact(name):
    theirs, other = foreign_layer(name), foreign_layer(name)
    ours = layer_from_transformers(theirs)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    copy_into_transformers(ours, other)
    for key, x in theirs.state_dict().items():
        assert torch.equal(other.state_dict()[key], x), key


@pytest.mark.feature("errors: checkpoints")
def test_what_the_other_layer_cannot_hold_is_refused():
    if "KimiLinearDeltaAttention" in AVAILABLE:
        theirs = foreign_layer("KimiLinearDeltaAttention")
        ours = layer_from_transformers(theirs)
        nn.init.ones_(ours.g_proj[1].bias)
        with pytest.raises(ValueError, match="g_proj.1.bias is not zero"):
            copy_into_transformers(ours, theirs)
    with pytest.raises(ValueError, match="is a gated_deltanet layer, got one of efla"):
        copy_into_transformers(DeltaRuleAttention("efla", 32, 2, 8), foreign_layer("Qwen3NextGatedDeltaNet"))
    with pytest.raises(ValueError, match="Linear is not a delta-rule layer we know"):
        layer_from_transformers(nn.Linear(2, 2))
