"""Which parameters decay: the same answer for our groups, for marks and for transformers' Trainer."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import deltazoo
import deltazoo.models  # noqa: F401
from deltazoo.layers import layer_class, parameter_groups, parameters_without_decay

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "head_dim": 16, "vocab_size": 40}


@pytest.mark.parametrize("mixer", deltazoo.list_rules())
def test_gates_norms_and_biases_do_not_decay(mixer: str) -> None:
    bias = mixer == "gated_deltanet"  # of the step size, the one that a mixer may have besides its own
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("delta_rule", mixer=mixer, beta_bias=bias, **SIZES))
    decaying, constant = parameter_groups(model, 0.1)
    assert (decaying["weight_decay"], constant["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    kept = {names[id(parameter)] for parameter in constant["params"]}
    decayed = {names[id(parameter)] for parameter in decaying["params"]}
    assert kept.isdisjoint(decayed)
    assert kept | decayed == set(names.values())
    gates = (*layer_class(mixer).float32_parameters, "bias", "norm.weight")
    assert {name for name in names.values() if name.endswith(gates)} == kept
    assert "model.layers.0.attn.q_proj.weight" in decayed
    assert "model.embeddings.weight" in decayed


def test_a_mark_keeps_a_matrix_from_decaying_and_frozen_parameters_are_left_out() -> None:
    module = torch.nn.Linear(3, 3)
    module.weight._no_weight_decay = True  # type: ignore[assignment]
    module.bias.requires_grad_(False)
    decaying, constant = parameter_groups(module, 0.1)
    assert decaying["params"] == []
    assert len(constant["params"]) == 1
    assert constant["params"][0] is module.weight


def test_whatever_has_one_dimension_does_not_decay() -> None:
    """Decay gates of other libraries' layers declare nothing."""
    module = torch.nn.Module()
    module.A_log, module.weight = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, 2))
    assert parameters_without_decay(module) == {"A_log"}
