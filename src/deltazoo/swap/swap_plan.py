"""What each chosen layer will become, decided and checked before anything is changed."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from deltazoo.layers import layer_class
from deltazoo.names import unknown
from deltazoo.spec import get_rule
from deltazoo.swap.attention_weights import HeadShape, read_shape
from deltazoo.swap.families import ModelFamily, decoder_layers_of
from deltazoo.swap.layer_choice import LayerChoice, choose_layers

__all__ = ["LayerPlan", "check_layer_options", "plan_layers"]

_DECIDED = frozenset({"self", "rule", "hidden_size", "layer_idx", "initializer_range", "beta_bias"})
"""Options of layers that follow from the layer's index, the original weights or arguments of `swap_attention`."""
_SIZES = ("num_heads", "head_dim", "num_v_heads", "expand_v", "num_micro_steps", "conv_initializer_range")
"""Options that copied weights decide; convolutions start as the identity then."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer to be swapped."""

    index: int
    attention: nn.Module
    """The softmax attention that is there."""
    shape: HeadShape
    options: dict[str, Any]
    """Of the new layer, as the configuration will record them."""


def check_layer_options(options: Mapping[str, Any], init: str, rule: str, arguments: Iterable[str]) -> None:
    """Refuse layer options that the rule does not have or that copied weights decide.

    Args:
        options: of layers, by name.
        init, rule: as given to `swap_attention`.
        arguments: names of its own keyword arguments, one of which an unknown option may be meant to be.

    Raises:
        TypeError: an unknown option.
        ValueError: a size, with `init="transfer"`.
    """
    constructors = (vars(kind).get("__init__") for kind in layer_class(rule).__mro__ if kind is not object)
    known = {name for made in constructors if made is not None for name in inspect.signature(made).parameters}
    known -= {*_DECIDED, "args", "kwargs", "options"}
    for name in options:
        if name not in known:
            raise TypeError(f"swap_attention: {unknown('option', name, [*arguments, *sorted(known)])}")
        if name in _SIZES and init == "transfer":
            raise ValueError(f'{name} is decided by the weights that init="transfer" copies; pass init="random"')


def plan_layers(
    model: PreTrainedModel,
    family: ModelFamily,
    rule: str,
    layers: LayerChoice,
    init: str,
    *,
    rope: bool,
    qk_norm: bool,
    grouped: bool,
    layer_options: Mapping[str, Any],
) -> list[LayerPlan]:
    """Plans of all chosen layers; the arguments are those of `swap_attention`.

    Raises:
        ValueError: a choice that fits no layers, or attention that is not as the family's entry says.
    """
    decoder_layers = decoder_layers_of(model, family)
    plans = []
    for index in choose_layers(layers, len(decoder_layers)):
        attention = decoder_layers[index].get_submodule(family.attention)
        shape = read_shape(family, attention, model.config, index)
        options: dict[str, Any] = {
            "variant": rule,
            "revision": get_rule(rule).revision,
            "num_heads": shape.num_heads,
            "head_dim": shape.head_dim,
            "expand_v": 1.0,
            "rope": rope and shape.has_rope,
            "qkv_bias": shape.qkv_bias,
            "o_bias": shape.o_bias,
        }
        if grouped and shape.num_kv_heads < shape.num_heads:
            options["num_kv_heads"] = shape.num_kv_heads
        if qk_norm and shape.qk_norm is not None:
            options |= {"qk_norm": shape.qk_norm, "qk_norm_eps": shape.qk_norm_eps}
        if init == "transfer":
            spec = get_rule(rule)
            options |= {
                "activation": "identity",
                "beta_bias": spec.corrects,
                "gate_bias": spec.output_gate == "full",
            }
        plans.append(LayerPlan(index, attention, shape, {**options, **layer_options}))
    return plans
