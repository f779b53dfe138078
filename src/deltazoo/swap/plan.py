"""The plan of a swap: the layers to be replaced and the options of the new ones, checked before anything is changed."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from deltazoo.layers import layer_class
from deltazoo.layers.layer_options import option_names
from deltazoo.names import unknown
from deltazoo.spec import get_rule
from deltazoo.swap.families import ModelFamily, decoder_layers_of, family_of
from deltazoo.swap.layer import swapped_layers
from deltazoo.swap.models import SwappedModel, original_classes
from deltazoo.swap.transfer import HeadShape, read_shape

LayerChoice = str | Sequence[int] | Callable[[int], bool]
"""`"all"`, a ratio `"3:1"`, numbers (a sequence, or text such as `"0,2,5"`), or a function from number to bool."""
_DECIDED = frozenset({"hidden_size", "layer_idx", "initializer_range", "beta_bias"})
"""Options of layers that follow from the layer's index, the original weights or arguments of `swap_attention`."""
_SIZES = ("num_heads", "head_dim", "num_v_heads", "expand_v", "num_micro_steps", "conv_initializer_range")
"""Options that copied weights decide; convolutions then start as the identity."""


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer."""

    index: int
    attention: nn.Module
    """The softmax attention to be replaced."""
    shape: HeadShape
    options: dict[str, Any]
    """Options of the new layer, which the configuration will record."""


def check_model(model: nn.Module) -> ModelFamily:
    """The entry of `FAMILIES` for a model that can be swapped.

    Raises:
        TypeError: a model that is not of transformers.
        ValueError: an unknown family, cross-attention, attention that looks ahead, models swapped before, quantised
            models, layers that share their attention.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"expected a transformers model, got {type(model).__name__}; of a wrapped model (PEFT, DDP, compiled) pass "
            "the model inside"
        )
    if isinstance(model, SwappedModel):
        kept = all(layer.teacher is not None for layer in swapped_layers(model).values())
        first = "call unswap_attention" if kept else "start from the original model"
        raise ValueError(
            f"{type(model).__name__} is swapped already: {first}, then name all layers to be swapped in one call"
        )
    config = model.config
    family = family_of(config)
    known = list(original_classes(type(config)).values())
    if type(model) not in known:
        raise ValueError(
            f"{type(model).__name__} is no class that Auto classes load for {family.model_type!r}: "
            f"{', '.join(cls.__name__ for cls in known)}"
        )
    if getattr(config, "add_cross_attention", False):
        raise ValueError("the model has cross-attention (config.add_cross_attention); only decoders can be swapped")
    if getattr(config, "use_bidirectional_attention", False):
        raise ValueError("the model's attention looks ahead (config.use_bidirectional_attention); a recurrence cannot")
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ValueError("the model is quantised; swap the unquantised model, then quantise")
    owners = defaultdict(list)  # only one of several layers that share weights would get a copy
    for index, decoder_layer in enumerate(decoder_layers_of(model, family)):
        for parameter in decoder_layer.get_submodule(family.attention).parameters():
            owners[parameter].append(index)
    shared = sorted(layers for layers in owners.values() if len(layers) > 1)
    if shared:
        raise ValueError(f"layers {shared[0]} share attention weights; give each layer weights of its own first")
    return family


def choose_layers(choice: LayerChoice, num_layers: int) -> list[int]:
    """Numbers of the layers to swap, ascending.

    Args:
        choice: one of the forms of `LayerChoice`. A ratio of delta-rule to softmax layers is repeated from the first
            layer on: `"3:1"` is three delta-rule layers, one softmax layer, and so on.

    Raises:
        ValueError: an unreadable choice, a number outside the model or twice, or no layer at all.
    """
    read = parse_layers(choice)
    if callable(read):
        chosen = [index for index in range(num_layers) if read(index)]
    else:
        for number in read:
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < num_layers:
                raise ValueError(f"layers are numbered 0 to {num_layers - 1}, got {number!r}")
        if len(set(read)) != len(read):
            raise ValueError(f"layers names a layer twice: {list(read)}")
        chosen = sorted(read)
    if not chosen:
        raise ValueError(f"layers={choice!r} chooses none of the {num_layers} layers")
    return chosen


def parse_layers(choice: LayerChoice) -> Sequence[int] | Callable[[int], bool]:
    """The numbers or the predicate of a choice.

    Raises:
        ValueError: the choice has none of the forms of `LayerChoice`.
    """
    if not isinstance(choice, str) and (callable(choice) or isinstance(choice, Iterable)):
        return choice
    written = choice if isinstance(choice, str) else ""
    if written == "all":
        return lambda index: True
    if re.fullmatch(r"\d+(,\d+)*", written):
        return [int(number) for number in written.split(",")]
    ratio = re.fullmatch(r"(\d+):(\d+)", written)
    if ratio is None or ratio[1] == ratio[2] == "0":
        raise ValueError(
            'layers must be "all", a ratio such as "3:1", numbers such as "0,2,5", or in Python a sequence of numbers '
            f"or a function, got {choice!r}"
        )
    delta, softmax = int(ratio[1]), int(ratio[2])
    return lambda index: index % (delta + softmax) < delta


def check_layer_options(options: Mapping[str, Any], init: str, rule: str, arguments: Iterable[str]) -> None:
    """Refuse layer options that the rule does not have or that copied weights decide.

    Args:
        options: options of layers, by name.
        init, rule: the arguments of `swap_attention`.
        arguments: names of its keyword arguments, among which the message also looks for the nearest.

    Raises:
        TypeError: an unknown option.
        ValueError: a size, with `init="transfer"`.
    """
    known = {*option_names(layer_class(rule))} - _DECIDED
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
        ValueError: a choice that fits no layers, or attention that differs from the family's entry.
    """
    decoder_layers = decoder_layers_of(model, family)
    plans, spec = [], get_rule(rule)
    for index in choose_layers(layers, len(decoder_layers)):
        attention = decoder_layers[index].get_submodule(family.attention)
        shape = read_shape(family, attention, model.config, index)
        options: dict[str, Any] = {
            "variant": rule,
            "revision": spec.revision,
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
            gate_bias = spec.output_gate == "full"
            options |= {"activation": "identity", "beta_bias": spec.corrects, "gate_bias": gate_bias}
        plans.append(LayerPlan(index, attention, shape, {**options, **layer_options}))
    return plans
